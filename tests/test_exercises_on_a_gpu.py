"""What works on CPU ranks and fails on GPUs, found by reading: no check of ours runs a solution on two GPUs."""

import ast

import pytest
from test_exercises import solved_cells

from mpdemo.paths import root

MAKES = {"tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"}
SENDS = {
    "all_reduce",
    "reduce",
    "broadcast",
    "send",
    "isend",
    "recv",
    "irecv",
    "all_gather",
    "gather",
    "scatter",
}
SENDS |= {
    "reduce_scatter",
    "all_to_all",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
}
PICKLES = {
    "gather_object",
    "all_gather_object",
    "broadcast_object_list",
    "send_object_list",
    "scatter_object_list",
}
MOVES = {"to", "cpu", "cuda"}
BOTH = "cpu:gloo"  # said by a program whose group also takes tensors of the CPU


def name_of(call) -> str:
    """Return the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def calls(tree) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def moved(tree) -> bool:
    return any(name_of(call) in MOVES for call in calls(tree))


def of_no_device(tree, names) -> bool:
    """Whether a tensor of the default device is in an expression: made there, or under one of these names."""
    made = [c for c in calls(tree) if ast.unparse(c.func) in {f"torch.{name}" for name in MAKES}]
    bare = any("device" not in {word.arg for word in call.keywords} for call in made)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return not moved(tree) and (bare or bool(used & names and not made))


def assigned(function, holds) -> set:
    """Return the names to which a function gives a value of a kind, until it gives nothing more to any."""
    names, before = set(), None
    while names != before:
        before = set(names)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.NamedExpr) and holds(node.value, names):
                targets = getattr(node, "targets", None) or [node.target]
                names |= {
                    part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
                }
    return names


def pickles_tensors(function, call) -> bool:
    """Whether a collective of objects is given the tensors of a model or of its caller."""
    asked = ast.unparse(function)
    # a dictionary, of tensors
    given = {word.arg for word in function.args.args if f"{word.arg}.items()" in asked}
    states = assigned(
        function, lambda value, names: "state_dict" in map(name_of, calls(value)) and not moved(value)
    )
    used = {node.id for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Name)}
    whole = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
    return not moved(call) and bool(
        "state_dict" in map(name_of, calls(call)) or used & states or whole & given
    )


def on_cpus_only(text) -> list:
    """Return what a program does that fails, or silently differs, on GPUs."""
    tree, found = ast.parse(text), []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        bare = assigned(function, of_no_device)
        for call in calls(function):
            name = name_of(call)
            if (
                name in SENDS
                and BOTH not in text
                and any(of_no_device(argument, bare) for argument in call.args)
            ):
                found.append(
                    f"{name} of a tensor that was made without a device: NCCL takes none of the CPU"
                )
            if name in PICKLES and pickles_tensors(function, call):
                found.append(
                    f"{name} pickles tensors: they come back on the GPU that sent them; copy them to the CPU"
                )
    whole = ast.unparse(tree)
    if "torch.get_rng_state" in whole and "torch.cuda.get_rng_state" not in whole:
        found.append("get_rng_state: a GPU draws dropout from its own generator, see torch.random.fork_rng")
    for call in calls(tree):
        if ast.unparse(call.func) == "torch.load" and "map_location" not in {
            word.arg for word in call.keywords
        }:
            found.append("torch.load without map_location: every rank loads onto the GPU that saved")
        if name_of(call) == "init_device_mesh" and ast.unparse(call.args[0]) == "'cpu'":
            found.append("a mesh of CPUs: take the type of the device that the model is on")
    return found


SOLVED = {number: source.partition("\n") for number, (source, _) in solved_cells().items()}
PROGRAMS = {number: text for number, (head, _, text) in SOLVED.items() if head == f"%%task {number}"}
SCRIPTS = {file.name: file.read_text() for file in (root() / "notebooks" / "scripts").glob("*.py")}


@pytest.mark.parametrize("name", [*PROGRAMS, *SCRIPTS])
def test_a_solution_or_script_does_nothing_that_fails_on_gpus(name):
    assert not on_cpus_only((PROGRAMS | SCRIPTS)[name])
