"""What a rank runs to check the programs of notebooks/12_other_tools.ipynb; the checks are in other_tools.py."""

import copy

STEPS = 4


def batches():
    """Return batches of images (8, 1, 28, 28) and labels, the same in every call."""
    import torch

    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS, 8, 1, 28, 28, generator=generator)
    return list(zip(images, torch.randint(0, 10, (STEPS, 8), generator=generator), strict=True))


def reference(module) -> list[float]:
    """Train a copy of the module's only layer in a loop of its own; return the losses."""
    import torch
    from torch.nn.functional import cross_entropy

    net = copy.deepcopy(module.net)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for images, labels in batches():
        optimizer.zero_grad()
        loss = cross_entropy(net(images.flatten(1)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def drive_module(program, rank, world_size):
    """Train the reader's module as a trainer does; return what it did in the first step, and the losses."""
    import torch

    torch.manual_seed(0)
    module = program.Classifier()
    wanted, weight, losses = reference(module), module.net.weight.detach().clone(), []
    optimizer = module.configure_optimizers()
    seen = {"optimizer": isinstance(optimizer, torch.optim.Optimizer), "wanted": wanted, "losses": losses}
    for number, batch in enumerate(batches()):
        if seen["optimizer"]:
            optimizer.zero_grad()
        loss = module.training_step(batch, number)
        if number == 0:
            seen["moved"] = not torch.equal(weight, module.net.weight)
            seen["backward"] = module.net.weight.grad is not None
            seen["graph"] = isinstance(loss, torch.Tensor) and loss.requires_grad
            seen["returned"] = f"a {type(loss).__name__}" + " without a graph" * isinstance(loss, torch.Tensor)
            if seen["moved"] or seen["backward"] or not (seen["graph"] and seen["optimizer"]):
                return seen
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return seen


def drive_calls(program, rank, world_size):
    """Call the reader's `allreduce` and `broadcast_parameters`, the latter from rank 1."""
    import torch

    tensor = torch.tensor([2.0, 10.0]) * (1 + rank)
    given = tensor.clone()
    reduced = program.allreduce(tensor)
    state = {"weight": torch.full((1,), float(rank)), "bias": torch.full((1,), float(rank))}
    program.broadcast_parameters(state, 1)
    return {
        "reduced": reduced.tolist() if isinstance(reduced, torch.Tensor) else None,
        "kept": torch.equal(tensor, given),
        "state": [value.item() for value in state.values()],
    }


def drive_optimizer(program, rank, world_size):
    """Do two steps with the reader's `DistributedOptimizer`; compare the first with one process and all images."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from mpdemo.exercises.ddp_ranks import share_and_model
    from mpdemo.exercises.gradients import ratio

    model, (inputs, labels), right = share_and_model(rank)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = program.DistributedOptimizer(optimizer, model.named_parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"optimizer": False}
    for step in range(2):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        own = torch.cat([0.1 * p.grad.flatten() for p in model.parameters()])
        optimizer.step()
        if step == 0:
            moved = torch.cat([(before[name] - p.detach()).flatten() for name, p in model.named_parameters()])
            wanted = torch.cat([0.1 * right[name].flatten() for name in before])
            times, alone = ratio(moved, wanted), torch.allclose(moved, own, atol=1e-6)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(both, weights)
    equal = torch.equal(*both)
    return {"optimizer": True, "alone": alone and times is None, "times": times, "equal": equal}
