"""What a rank runs to check the programs of notebooks/02_data_parallel.ipynb; the checks are in data_parallel.py."""

import copy
import threading

from mpdemo.exercises.gradients import ratios

NUMBERS = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # the ten inputs of exercise 02.2


def drive_outputs(program, rank, world_size):
    """Call the reader's `outputs_of`; return values and gradient, where the products were computed, whether with w."""
    import torch

    products, shared = [], []

    class Watched(torch.Tensor):
        """Notes how large every product is, and whether the main thread computed it."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function.__name__.strip("_") in ("mul", "rmul", "multiply"):
                in_main = threading.current_thread() is threading.main_thread()
                products.append((max(tensor.numel() for tensor in args), in_main))
                shared.append(any(tensor.data_ptr() == w.data_ptr() for tensor in args))
            return super().__torch_function__(function, types, args, kwargs)

    x, w = torch.tensor(NUMBERS), torch.tensor(2.0, requires_grad=True)
    outputs = program.outputs_of(w, x.as_subclass(Watched), 4)
    tensor = isinstance(outputs, torch.Tensor)
    if tensor and outputs.requires_grad:
        outputs.as_subclass(torch.Tensor).mean().backward()
    values = outputs.tolist() if tensor else repr(type(outputs).__name__)
    return {"values": values, "gradient": w.grad and w.grad.item(), "products": products, "shared": any(shared)}


def small_model():
    """Return a model with a buffer, 12 inputs and their labels, the same in every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return model, torch.randn(12, 5), torch.randint(0, 3, (12,))


def drive_replicate(program, rank, world_size):
    """Call the reader's `replicate` with two stale copies; return what of them differs, and what they share."""
    import torch

    model, inputs, _ = small_model()
    copies = [copy.deepcopy(model) for _ in range(2)]
    model(inputs)  # moves the buffers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    program.replicate(model, *copies)
    source = model.state_dict()
    weights = {name for name, _ in model.named_parameters()}
    wrong, shared = [], False
    for number, other in enumerate(copies, 1):
        for name, tensor in other.state_dict().items():
            shared |= tensor.data_ptr() == source[name].data_ptr()
            if not torch.equal(tensor, source[name]):
                wrong.append((number, "weight" if name in weights else "buffer", name))
    return {"wrong": wrong, "shared": shared}


def drive_gradients(program, rank, world_size):
    """Call the reader's `gradients`; return the ratios to those of the whole batch, and of the first part alone."""
    import torch

    model, images, labels = small_model()
    model[1] = torch.nn.Identity()  # batch norm would depend on the part that a copy sees
    reference = copy.deepcopy(model)
    torch.nn.functional.cross_entropy(reference(images), labels).backward()
    program.gradients(model, images, labels, 3)
    right = [parameter.grad for parameter in reference.parameters()]
    first = copy.deepcopy(model)
    first.zero_grad()
    (torch.nn.functional.cross_entropy(first(images[:4]), labels[:4]) / 3).backward()
    first_right = [parameter.grad for parameter in first.parameters()]
    return {"whole": ratios(model, right), "first": ratios(model, first_right)}
