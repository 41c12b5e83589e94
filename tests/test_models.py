"""The models are lists of blocks: equal to torchvision's, and the same function wherever they are cut."""

import pytest
import torch
import torchvision

from mpdemo.errors import UserError
from mpdemo.models import build
from mpdemo.settings import MODELS
from mpdemo.settings.cuts import block_names, resolve_cut

CONVNET = ["layer1", "layer2", "fc"]
RESNETS = ["resnet18", "resnet50", "resnet101"]


def large_by_night(*names):
    return [pytest.param(name, marks=pytest.mark.nightly if name == "resnet101" else ()) for name in names]


def small(name, **more):
    return build(name, image_size=32 if name in RESNETS else 28, **more)


@pytest.mark.parametrize("name", large_by_night(*RESNETS))
def test_resnets_are_torchvisions(name):
    """Same state dict but for the first and last blocks' names, same outputs, same gradients."""

    def by_their_names(tensors):
        return {name.removeprefix("stem.").removeprefix("head."): tensor for name, tensor in tensors}

    model, theirs = (
        build(name, classes=1000, channels=3, image_size=64),
        getattr(torchvision.models, name)(),
    )
    state = by_their_names(model.state_dict().items())
    assert list(state) == list(theirs.state_dict())
    theirs.load_state_dict(state)
    images = torch.randn(2, 3, 64, 64)
    for net in (model, theirs):
        net(images).square().mean().backward()
    assert torch.equal(model.eval()(images), theirs.eval()(images))
    own, wanted = by_their_names(model.named_parameters()), dict(theirs.named_parameters())
    assert all(torch.equal(own[name].grad, wanted[name].grad) for name in wanted)


@pytest.mark.parametrize("name", large_by_night(*MODELS))
def test_cut_anywhere(name):
    """The cut into single blocks and cuts in two compose to the uncut model and keep the parameters' names."""
    model = small(name, norm="batch").eval()
    images = torch.randn(2, *model.input_shape)
    with torch.no_grad():
        between = [images]  # what flows between the blocks
        for stage in model.cut(range(1, len(model))):
            between.append(stage(between[-1]))
        assert torch.equal(between[-1], model(images))
        assert between[-1].shape == (2, 10)
        for point in range(1, len(model), 1 if len(model) < 12 else 6):
            first, second = model.cut([point])
            assert torch.equal(first(images), between[point])
            assert torch.equal(second(between[point]), between[-1])
            assert sorted([*first.state_dict(), *second.state_dict()]) == sorted(model.state_dict())


def test_a_transformer_block_is_pytorchs():
    """The same outputs as PyTorch's own encoder layer with these weights."""
    block = build("transformer").get_submodule("block.3")
    theirs = torch.nn.TransformerEncoderLayer(192, 6, 768, 0.0, "gelu", batch_first=True, norm_first=True)
    ours = block.state_dict()
    ours["attention.key.bias"] = torch.zeros(192)  # a number added to all inputs of softmax changes nothing
    state = {
        f"self_attn.in_proj_{kind}": torch.cat(
            [ours[f"attention.{name}.{kind}"] for name in ("query", "key", "value")]
        )
        for kind in ("weight", "bias")
    }
    names = {"self_attn.out_proj": "attention.out", "linear1": "mlp.up", "linear2": "mlp.down"}
    for name, own in (names | {"norm1": "norm1", "norm2": "norm2"}).items():
        state |= {f"{name}.{kind}": ours[f"{own}.{kind}"] for kind in ("weight", "bias")}
    theirs.load_state_dict(state)
    tokens = torch.randn(2, 16, 192)
    assert torch.allclose(block(tokens), theirs(tokens), atol=1e-5)


def test_the_transformers_patches_follow_the_image():
    model = build("transformer", image_size=56, channels=3, classes=5)
    assert model.stage(0, 1)(torch.randn(2, 3, 56, 56)).shape == (2, 64, 192)
    assert model(torch.randn(2, 3, 56, 56)).shape == (2, 5)


def test_a_stage_shares_parameters():
    model = build("convnet")
    _, second = model.cut([1])
    parameters = dict(model.named_parameters())
    assert second.names == ["layer2", "fc"]
    assert all(p is parameters[name] for name, p in second.named_parameters())


@pytest.mark.parametrize("name", large_by_night(*MODELS))
def test_weights_depend_on_the_seed_only(name):
    torch.manual_seed(1)
    one = small(name, seed=5).state_dict()
    before = torch.get_rng_state()
    two, other = small(name, seed=5).state_dict(), small(name, seed=6).state_dict()
    # building takes nothing from the training's random numbers
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)


def test_resolve_cut():
    for cut in ("layer1,layer2", " layer1 , 2 ", [1, "layer2"], None):
        assert resolve_cut(CONVNET, cut, 3) == [1, 2]
    assert (
        resolve_cut(CONVNET, "1", 2) == [1]
        and resolve_cut(CONVNET, "", 1) == resolve_cut(CONVNET, None, 1) == []
    )
    names = block_names("resnet50")
    assert resolve_cut(names, "layer2.3", 2) == [names.index("layer3.0")]
    equal = resolve_cut(names, None, 4)
    sizes = [b - a for a, b in zip([0, *equal], [*equal, len(names)], strict=True)]
    assert sum(sizes) == len(names) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("cut", "stages", "message"),
    [
        ("3", 2, "cannot cut after '3'.*1 to 2"),
        ("layer1,", 3, "cannot cut after ''"),
        ("layer1", 3, "gives 2 stages, but 3 are wanted"),
        ("layer2,layer1", 3, "not increasing"),
    ],
)
def test_cuts_that_are_refused(cut, stages, message):
    with pytest.raises(UserError, match=message):
        resolve_cut(CONVNET, cut, stages)


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [("convnet", 3, "image size 3 is too small"), ("transformer", 30, "image size 30 does not divide")],
)
def test_images_that_do_not_fit_a_model_are_refused(name, image_size, message):
    with pytest.raises(UserError, match=message):
        build(name, image_size=image_size)


@pytest.mark.parametrize("name", MODELS)
def test_block_names_are_known_without_building_the_model(name):
    with torch.device("meta"):
        assert block_names(name) == build(name).names
