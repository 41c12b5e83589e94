"""What differs by nature between worlds: random numbers, and batch norm. Notes it, or switches it off for a second try.

Of random numbers it also notes the generator's state before they are drawn: ranks with equal states draw equal numbers,
which is right for equal rows only. Switched off, a row's random numbers come from the row itself: it gets the same ones
on one process and on any rank of several.
"""

import functools
import inspect
import random
import re

import torch

try:
    import numpy
except ImportError:  # the reader's environment has none
    numpy = None
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from . import private_torch
from .notes import ORDER, here, note, note_line, note_once, now

# Function -> what it draws by chance, and the argument that switches it off.
SWITCHES = {name: ("dropout", "training") for name in dir(functional) if "dropout" in name} | {
    "scaled_dot_product_attention": ("dropout", "dropout_p"),
    "batch_norm": ("batchnorm", "training"),
}
# that draw again
METHODS = {"rand": "uniform_", "rand_like": "uniform_", "randn": "normal_", "randn_like": "normal_"}
METHODS |= {"randint": "random_", "randint_like": "random_", "bernoulli": "bernoulli_"}
IN_PLACE = ["uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_"]
METHODS |= {name: name for name in IN_PLACE}
WATCHED = 2  # steps in which it is noted whether random numbers are drawn


def watch():
    """Note dropout and batch norm, and take what is drawn for each row from the row where that is asked for."""
    for name, switch in SWITCHES.items():  # PyTorch's own modules call them by these names, too
        setattr(functional, name, switched(getattr(functional, name), *switch))
    note_line(torch, "manual_seed", "seeded at")
    Draws().__enter__()  # to the end of this thread


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Has the arguments of PyTorch's, which is in C++ and doesn't tell them."""


def switched(function, kind, argument):
    """Note that a function draws by chance, or let it draw nothing."""
    signature = inspect.signature(function if inspect.isfunction(function) else attention)
    default = signature.parameters[argument].default

    @functools.wraps(function)
    def watched(*args, **options):
        given = signature.bind(*args, **options).arguments
        if given.get(argument, default) and given.get("p", 0.5) > 0:
            note_once("chance", kind)
            # it has running statistics
            if kind in ORDER["without"] and given.get("running_mean", 0) is not None:
                # a norm as large: a deep model trains, too
                if kind == "batchnorm" and given["input"][0].numel() > 1:
                    affine = given.get("weight"), given.get("bias"), given.get("eps", 1e-5)
                    return functional.group_norm(given["input"], 1, *affine)
                return function(**given | {argument: type(default)()})
        return function(*args, **options)

    return watched


def seed(number):
    """Seed each rank with another number, as unseeded processes would have; forked ranks would share one."""
    for one_of in (torch.manual_seed, random.seed, *([numpy.random.seed] if numpy else [])):
        one_of(number)


def of_torch(generator=None) -> list:
    """Return the state of a generator, or those of PyTorch's own ones."""
    if generator is not None:
        return [generator.get_state()]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def others() -> list:
    """Return the states of Python's and NumPy's random numbers."""
    parts = numpy.random.get_state() if numpy else ()
    return [random.getstate(), [part.tolist() if hasattr(part, "tolist") else part for part in parts]]


def states() -> list:
    """Return the states of the random numbers that scripts draw from."""
    return others() + [state.tolist() for state in of_torch()]


def restore(state):
    """Set the states that data sets draw from."""
    random.setstate(state[0])
    if numpy:
        numpy.random.set_state(state[1])
    torch.set_rng_state(torch.tensor(state[2], dtype=torch.uint8))


def look():
    """Begin to watch for random numbers."""
    now.states = states() if now.steps < WATCHED else None


def drawn():
    """Note that random numbers were drawn since the last look."""
    if now.states and now.steps < WATCHED and now.states != states():
        note_once("chance", "draws")
    now.states = None


def note_drawn(kind, state, size):
    """Note what was drawn from a state; hashes of texts are equal in forked processes."""
    note("drawn", name=kind, state=hash(str(state)), size=size, where=here())


class Draws(TorchFunctionMode):
    """Notes what the first step draws; switched off, takes what is drawn for each row of the batch from the row itself.

    The rows are then left in their order.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        off = "draws" in ORDER["without"]
        if now.inside:  # of our own sketches
            return function(*args, **kwargs)
        # the rows stay, in some order
        looks = now.states and not now.steps and not off and name != "randperm"
        old = of_torch(kwargs.get("generator")) if looks else []
        found = function(*args, **kwargs)
        if getattr(function, "__module__", "") == "torch.nn.init":  # weights, which belong to no row
            return found
        if not now.depth and (name in METHODS or name == "randperm"):
            now.chances += found.numel()
        for state, new in zip(old, of_torch(kwargs.get("generator")) if looks else [], strict=True):
            if not torch.equal(state, new):
                kind = "dropout" if re.search("dropout|attention", name) else now.drawing
                size = sum(tensor.numel() for tensor in private_torch.tensors_in(found))
                note_drawn(kind, state.tolist(), size)
                if kind == "draws":  # also from a generator of the script's own
                    note_once("chance", kind)
        if not off:
            return found
        rows = now.row if now.depth else now.batch
        # which rows are mixed depends on how a batch is divided
        if name == "randperm" and len(found) == len(rows):
            return found.sort().values
        if name in METHODS and rows and found.dim() and len(found) and len(found) % len(rows) == 0:
            draw_by_row(found, rows, METHODS[name], name, args, kwargs)
        return found


@torch.no_grad()
def draw_by_row(found, rows, method, name, args, kwargs):
    """Draw again, for each row with a generator of its own."""
    now.draws += 1
    note_once("chance", "draws")
    size = len(found) // len(rows)
    if name == "random_" or name.startswith("randint"):
        numbers = [number for number in args if type(number) is int]
        numbers += [kwargs[key] for key in ("low", "high") if key in kwargs]
        args = (found, *numbers)
    elif not name.endswith("_") and name != "bernoulli":
        args = (found,)
    named = {key: value for key, value in kwargs.items() if name.endswith("_") and key != "generator"}
    for place, row in enumerate(rows):
        part = slice(place * size, (place + 1) * size)
        chance = torch.Generator(found.device).manual_seed((int(row, 16) + 7919 * now.draws) % 2**63)
        own = [
            arg[part] if isinstance(arg, torch.Tensor) and arg.shape == found.shape else arg for arg in args
        ]
        rest = own if name == "bernoulli" else own[1:]
        getattr(found[part], method)(*rest, generator=chance, **named)
