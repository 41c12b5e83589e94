"""A right script that cuts two layers among the ranks by hand; each rank holds the norm before them whole."""

import torch
import torch.distributed as dist
from torch import nn


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def through(name, forward, backward):
    ways = {
        "forward": staticmethod(lambda _, x: forward(x)),
        "backward": staticmethod(lambda _, grad: backward(grad)),
    }
    return type(name, (torch.autograd.Function,), ways).apply


enter, leave = through("Enter", torch.clone, summed), through("Leave", summed, torch.clone)


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.columns, self.rows = (
            nn.Parameter(torch.randn(16, 8).chunk(world)[rank].clone()) for _ in range(2)
        )

    def forward(self, x):
        return leave((enter(self.norm(x)) @ self.columns.T).relu() @ self.rows)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Net(dist.get_rank(), dist.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 8), torch.randn(64, 8)
for k in range(0, 64, 8):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[k : k + 8]), y[k : k + 8]).backward()
    optimizer.step()
