"""Compare nn.DataParallel's gradients with those of one device, to argv[1]: rows of JSON.

With one GPU both copies lie on it, so PyTorch copies where it would use NCCL; on a CPU it only calls the model.
"""

import sys
from itertools import product

import torch
from record import append
from throughput import DEVICE, ON_GPU
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

WITHIN = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the gradients' norm: the sums have another order
DEVICES = ([0, 0], [0, 1])[: torch.cuda.device_count()] if ON_GPU else [None]


def gradients(model, batch, dtype):
    """Return the loss and all gradients of a model."""
    model.zero_grad()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        loss = cross_entropy(model(batch[0]).float(), batch[1])
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def main():
    torch.backends.cudnn.allow_tf32 = False
    # eval: else each copy has batch norm statistics of its own
    network, rows = resnet18().to(DEVICE).eval(), []
    batch = torch.randn(32, 3, 64, 64, device=DEVICE), torch.randint(1000, (32,), device=DEVICE)
    for (dtype, within), devices in product(WITHIN.items(), DEVICES):
        loss, expected = gradients(network, batch, dtype)
        other, found = gradients(nn.DataParallel(network, devices), batch, dtype)
        apart = ((found - expected).norm() / expected.norm()).item()
        facts = {
            "devices": devices,
            "dtype": str(dtype),
            "losses": [loss, other],
            "gradients_differ_by": apart,
        }
        rows.append(facts | {"equal": apart < within and abs(other / loss - 1) < within})
    append(rows, sys.argv[1])
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
