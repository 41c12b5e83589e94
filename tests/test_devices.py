"""No rung mixes devices: every tensor of a step and a validation is where it is computed on."""

import ast
from types import SimpleNamespace

import pytest
import torch
from placed import Devices, Placed
from test_training import lines

from mpdemo import models
from mpdemo.measure import compare
from mpdemo.measure.trial import Trial
from mpdemo.paths import root
from mpdemo.run import train
from mpdemo.settings import Settings, checked
from mpdemo.training import setup
from mpdemo.training.stages import stage_shapes
from mpdemo.world.env import World

MAKERS = {
    f"torch.{name}"
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "eye", "rand", "randn")
}
FIRST, SECOND = torch.device("cpu", 1), torch.device("cpu", 2)
RUNGS = {
    "single": {"rung": "single"},
    "accumulated": {"rung": "single", "microbatches": 2},
    "cut": {"rung": "model_parallel", "form": "one-process", "devices": 2},
    "pipeline": {"rung": "pipeline", "form": "one-process", "devices": 2, "microbatches": 2},
}


@pytest.fixture(autouse=True)
def new_parameters():
    """A model that is moved gets new parameters: PyTorch would put `Placed` data into the plain ones."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


BY_DAY = ("single", "pipeline")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in RUNGS]
)
def test_a_whole_training_on_other_devices(name, tmp_path, monkeypatch):
    """Steps and validation on devices of their own give the losses of the CPU."""
    monkeypatch.setattr(setup, "local_devices", lambda world, count: [FIRST, SECOND][:count])
    losses = {}
    for device in (torch.device("cpu"), FIRST):
        out = tmp_path / str(device)
        words = {"model": "toy", "steps": 3, "batch_size": 512, "log_every": 2, "out": str(out)}
        settings = checked(Settings(**words | RUNGS[name]))
        with Devices():
            train(settings, World(device=device))
        losses[device] = [row["loss"] for row in lines(out, "step")]
    assert losses[FIRST] == pytest.approx(losses[torch.device("cpu")], rel=1e-6)


def test_gradients_go_to_other_processes_through_the_hosts_memory(monkeypatch):
    """A pickled tensor of a GPU is unpacked on the GPU of the same number, which is another process's."""
    sent = []
    monkeypatch.setattr(compare, "gather_objects", lambda value: sent.append(value) or [value])
    trial = SimpleNamespace(gradients=lambda: {"weight": Placed(torch.ones(2), FIRST)})
    assert compare.gradient_differences(SimpleNamespace(trials={compare.SINGLE: trial})) == {
        compare.SINGLE: 0.0
    }
    assert type(sent[0]["weight"]) is torch.Tensor and sent[0]["weight"].device == torch.device("cpu")


def test_gradients_are_computed_without_tf32_and_steps_as_pytorch_does():
    trial, found = Trial(Settings(rung="single", model="toy", image_size=28, batch_size=8), World()), []
    trial.rung.model.register_forward_pre_hook(lambda *_: found.append(torch.backends.cudnn.allow_tf32))
    trial.gradients(), trial.step()
    assert found == [False, True]


@pytest.mark.parametrize("files", ["*.py", "rungs/*.py", "training/*.py", "measure/**/*.py", "world/*.py"])
def test_a_tensor_that_is_made_names_its_device(files):
    """PyTorch makes a tensor without a device on the CPU, which no test on a CPU sees."""
    for file in (root() / "mpdemo").glob(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                assert "device" in {keyword.arg for keyword in node.keywords}, (
                    f"{file.name}, line {node.lineno}"
                )


def test_the_shapes_between_stages_are_found_without_computing():
    model = models.build("convnet", norm="group")
    settings = checked(Settings(rung="model_parallel", model="convnet", norm="group", batch_size=8), 2)
    (_, sent), (received, _) = stage_shapes(model, [1], settings, torch.device("cpu"))
    assert sent.shape == received.shape == (8, 16, 14, 14) and sent.device.type == "meta"
    assert model.training and {p.device.type for p in model.parameters()} == {"cpu"}


def test_it_refuses_what_cuda_refuses():
    placed, host = Placed(torch.ones(3), FIRST), torch.ones(3)
    assert (placed * torch.tensor(2.0)).device == FIRST  # a number of the CPU may take part
    for mistake in (
        lambda: placed + host,
        lambda: torch.stack([placed.sum(), host.sum()]),
        lambda: placed.to(SECOND) @ placed,
        lambda: torch.nn.functional.cross_entropy(placed.reshape(1, 3), torch.tensor([1])),
    ):
        with pytest.raises(RuntimeError, match="several devices"):
            mistake()
