"""experts.py: with its experts on several processes the training of one device, where every expert sees every token."""

import re

import pytest
import torch
from test_scripts import copy, distance, launch, losses, names_of, small  # noqa: F401
from torch.nn.functional import gelu

LIMIT = 1e-5  # of each difference, relative: rounding comes to 5e-7, a mistake to 1e-2
NOTE = """        if not run.done:
            torch.save({name: p.grad.full_tensor() for name, p in model.named_parameters()}, f"grads-{rank}.pt")
"""
STEP = "        norm = "  # before which gradients are noted


@pytest.fixture
def device(small, monkeypatch):  # noqa: F811
    """Train on one device; return each epoch's two losses, and the gradients of the first step."""
    script, job = names_of(small / "experts.py"), names_of(small / "job.py")

    def mlp(block, x):
        experts, balances = block.experts, script["balances"]
        chances = experts.router(x).softmax(-1)
        weights, chosen = chances.topk(2)
        hidden = gelu(torch.einsum("btw,ehw->bteh", x, experts.up))
        every = torch.einsum("bteh,ewh->btew", hidden, experts.down)
        used = torch.zeros_like(chances).scatter(-1, chosen, 1.0)  # 1 for the two chosen experts
        balances.append(8 * ((used / 2).mean((0, 1)) * chances.mean((0, 1))).sum())
        return (every * (chances * used)[..., None]).sum(2)

    script["balances"] = []
    monkeypatch.setattr(script["MixtureBlock"], "mlp", mlp)
    torch.manual_seed(0)
    model = script["make_gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    train, check = script["make_datasets"]()
    count, found, first, sums = script["count"], [], None, [0.0, 0]
    for step, chosen in enumerate(job["places"](len(train), 32, 2, 0, 0, 1)):
        inputs, targets = train[[sample for _, sample in chosen]]
        script["balances"].clear()
        loss = model(inputs, targets)
        (loss / count(targets) + 0.01 * sum(script["balances"])).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 8e-3 * job["cosine"](step, 10)
        optimizer.step()
        optimizer.zero_grad()
        sums = [sums[0] + loss.item(), sums[1] + count(targets)]
        if step % 5 == 4:
            with torch.no_grad():
                found.append((sums[0] / sums[1], model(*check.tensors).item() / count(check.tensors[1])))
            sums = [0.0, 0]
    return found, first


def epochs(printed) -> list:
    """Return the losses and the validations that a run has printed."""
    return [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+), validation ([\d.]+)", printed)]


def differences(folder, printed, right) -> tuple:
    """Return the largest relative difference of a loss and of a tensor of the first gradient."""
    found, gradients = right
    pairs = [
        (a, b)
        for ours, wanted in zip(epochs(printed), found, strict=True)
        for a, b in zip(ours, wanted, strict=True)
    ]
    noted = torch.load(folder / "grads-0.pt")
    assert noted.keys() == gradients.keys()
    wrong = {name: ((noted[name] - grad).norm() / grad.norm()).item() for name, grad in gradients.items()}
    return max(abs(a - b) / b for a, b in pairs), max(wrong.values())


@pytest.mark.parametrize(("processes", "ep"), [
    (2, 2), *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((1, 1), (2, 1), (4, 2), (3, 1))),
])  # fmt: skip
def test_experts_of_several_processes_are_the_training_of_one_device(small, device, processes, ep):  # noqa: F811
    printed = launch(small, "experts.py", "--ep", ep, processes=processes, changes=[(STEP, NOTE + STEP)])
    assert max(differences(small, printed, device)) < LIMIT


def test_in_bf16_as_on_a_gpu_two_processes_have_the_gradients_of_one(small):  # noqa: F811
    changes, noted = [(STEP, NOTE + STEP), ("BF16 = job.GPU is not None", "BF16 = True")], []
    for n in (1, 2):
        launch(small, "experts.py", "--ep", n, "--checkpoint", n, processes=n, changes=changes)
        noted.append(torch.load(small / "grads-0.pt"))
    one, two = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in noted)
    assert (one - two).norm() < 3e-2 * one.norm()


@pytest.mark.nightly
@pytest.mark.parametrize(("old", "new", "ep"), [
    (" / mesh.size())", ")", 2),  # sums, where the rest has means
    ("grad_placements=(Partial(), ", "grad_placements=(Replicate(), ", 1),  # those of one copy
    ("dist.all_reduce(counts := counts.clone())", "pass", 2),  # the balance of each rank
    ("received, sent, self.group)", "received, sent, self.group).detach()", 2),  # no gradient comes back
    ("[order.argsort()].unflatten", "[order].unflatten", 2),
])  # fmt: skip
def test_a_mistake_is_seen(small, device, old, new, ep):  # noqa: F811
    changes = [(STEP, NOTE + STEP), (old, new)]
    printed = launch(small, "experts.py", "--ep", ep, processes=2, changes=changes)
    assert max(differences(small, printed, device)) > 100 * LIMIT


@pytest.mark.nightly
def test_experts_resume_on_other_processes(small, device):  # noqa: F811
    job = (small / "job.py").read_text()
    (small / "job.py").write_text(
        job.replace("SAVE_STEPS, SAVE_MINUTES = 100", "SAVE_STEPS, SAVE_MINUTES = 5")
    )
    stop = ("        if run.stopping:", "        if run.done == 5:")
    first = launch(small, "experts.py", "--ep", 2, processes=2, changes=[stop])
    again = launch(small, "experts.py")
    found = [number for pair in epochs(first) + epochs(again) for number in pair]
    assert found == pytest.approx([number for pair in device[0] for number in pair], rel=LIMIT)


EMPTY = """    model.blocks[0].scale = nn.Parameter(torch.rand(4, 64))
    for name in ("mask", "mean"):
        model.blocks[0].register_buffer(name, torch.rand(4) > 0.5, persistent=name == "mean")
"""
BOTH = """    whole = make_gpt() if torch.manual_seed(0) else None
    for name, value in (*whole.named_parameters(), *whole.named_buffers()):
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
        assert value.equal(own.full_tensor() if hasattr(own, "full_tensor") else own), name
    job.end("all is there")
"""


@pytest.mark.nightly
def test_every_rank_begins_with_the_parameters_and_buffers_of_rank_0(small):  # noqa: F811
    train, made = "    optimizer = torch.optim.AdamW(", "    return model\n\n\ndef make_model"
    changes = [(train, BOTH + train), (made, EMPTY + made)]
    assert "all is there" in launch(
        small, "experts.py", "--ep", 2, processes=2, changes=changes, fails=True
    )


@pytest.mark.nightly
def test_processes_that_cannot_share_the_experts_are_refused_in_one_line(small):  # noqa: F811
    said = "--ep 3: must divide the 2 processes and the 8 experts"
    assert said in launch(small, "experts.py", "--ep", 3, processes=2, fails=True)
