"""Typical wrong answers to the exercises of notebook 12."""

MODULE = """from torch import nn, optim
from torch.nn.functional import cross_entropy


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(784, 10)

    def training_step(self, batch, number):
        images, labels = batch
        loss = cross_entropy(self.net(images.flatten(1)), labels)
        return loss

    def configure_optimizers(self):
        return optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
"""
RETURN = "        return loss\n"
CALLS = """import torch.distributed as dist


def allreduce(tensor):
    result = tensor.clone()
    dist.all_reduce(result)
    return result / dist.get_world_size()


def broadcast_parameters(state, root_rank):
    for tensor in state.values():
        dist.broadcast(tensor, root_rank)
"""
OPTIMIZER = """import torch.distributed as dist


def DistributedOptimizer(optimizer, named_parameters):
    parameters = [parameter for _, parameter in named_parameters]

    def average(*_):
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    optimizer.register_step_pre_hook(average)
    return optimizer
"""

WRONG = {
    "12.1": [5, 8, 9, 0],
    "12.3": [(64, 24), (128, 12), (256, 6), (512, 24), (1024, 2)],
    "12.2": [
        MODULE.replace(RETURN, "        return loss.item()\n"),
        MODULE.replace(RETURN, "        return loss.detach()\n"),
        MODULE.replace(RETURN, "        loss.backward()\n        return loss\n"),
        MODULE.replace(
            RETURN, "        loss.backward()\n        self.configure_optimizers().step()\n        return loss\n"
        ),
        MODULE.replace("lr=0.1", "lr=0.01"),
        MODULE.replace("return optim.SGD", "optim.SGD"),
    ],
    "12.4": ["a", "c", "d"],
    "12.5": [261, 260, 522, 131],
    "12.6": [
        CALLS.replace(" / dist.get_world_size()", ""),
        CALLS.replace("tensor.clone()", "tensor"),
        CALLS.replace("    dist.all_reduce(result)\n", ""),
        CALLS.replace("root_rank)\n", "0)\n"),
        CALLS.replace("    return result", "    result"),
    ],
    "12.7": [
        OPTIMIZER.replace("            parameter.grad /= dist.get_world_size()\n", ""),
        OPTIMIZER.replace("    optimizer.register_step_pre_hook(average)\n", ""),
        OPTIMIZER.replace("step_pre_hook", "step_post_hook"),
        OPTIMIZER.replace("    return optimizer\n", ""),
        OPTIMIZER.replace("in parameters:", "in parameters[:1]:"),
    ],
}
