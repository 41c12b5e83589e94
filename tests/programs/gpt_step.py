"""Steps of the GPT of scripts/gpt.py, with the script's bf16 and recomputation, counted as those of a trial."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from home_scripts import SCRIPTS, names_of

from mpdemo.tools.plan import own
from mpdemo.tools.plan.own_model import OwnModel
from mpdemo.tools.plan.request import PlanRequest

LENGTH = names_of(SCRIPTS / "gpt.py")["LENGTH"]
SIZE = {"width": 256, "blocks": 4, "heads": 4}


def model_of(size, recompute=False, on="cpu") -> torch.nn.Module:
    """Return the script's GPT. On a CPU RMSNorm isn't fused, as the plan has it for a GPU, so LayerNorm stands in."""
    model = names_of(SCRIPTS / "gpt.py")["GPT"](**size, checkpointing=recompute)
    for holder in model.modules() if on == "cpu" else ():
        for name in ("norm", "norm1", "norm2"):
            if hasattr(holder, name):
                setattr(holder, name, torch.nn.LayerNorm(size["width"], bias=False))
    return model


class Steps:
    """What `mpdemo.predict.counting.peak_of_a_step` takes for a trial."""

    def __init__(self, device, batch, bf16=False, recompute=False, size=SIZE):
        with torch.device(device):
            model = model_of(size, recompute, device.type)
            self.tokens, self.targets = (torch.ones(batch, LENGTH, dtype=torch.long) for _ in range(2))
        self.rung = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.devices, self.bf16 = [device], bf16

    def step(self, within=None):
        """Do one step, as train_gpt.py does on one device."""
        with within or nullcontext():
            self.rung.optimizer.zero_grad()
            with torch.autocast(self.devices[0].type, torch.bfloat16, enabled=self.bf16):
                loss = self.rung.model(self.tokens, self.targets)
            (loss / self.targets.numel()).backward()
            self.rung.optimizer.step()


def planned(batch, bf16=False, recompute=False, size=SIZE, on="cpu") -> float:
    """Return the bytes at the peak of such a step by the plan."""
    model = OwnModel("gpt", (LENGTH,), tokens=True, function=partial(model_of, size, on=on))
    request = PlanRequest(model, batch, optimizer="adamw")
    return own.replicated(request, "autocast" if bf16 else "fp32", (1,), checkpointing=recompute).memory
