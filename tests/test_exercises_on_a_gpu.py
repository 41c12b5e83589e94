"""What works on CPU ranks and fails on GPUs, found by reading: no check of ours runs a solution on two GPUs."""

import ast
import re

import pytest
from test_exercises import solved_cells

from mpdemo.paths import root

MAKES = re.compile(r"torch\.(tensor|zeros|ones|empty|full|arange|rand|randn|randint)")
SENDS = re.compile(
    r"broadcast|scatter|i?(send|recv)|(all_)?(reduce|gather|to_all)|\w+_(tensor|single|scatter)"
)
MOVES = {"to", "cpu", "cuda"}
BOTH = "cpu:gloo"  # said by a program whose group also takes tensors of the CPU


def name_of(call) -> str:
    """Return the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def nodes(tree, kind) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def lacks(call, word) -> bool:
    return word not in {keyword.arg for keyword in call.keywords}


def of_no_device(tree) -> bool:
    """Whether an expression makes a tensor of the default device, and doesn't move it."""
    calls = nodes(tree, ast.Call)
    made = any(MAKES.fullmatch(ast.unparse(call.func)) and lacks(call, "device") for call in calls)
    return made and not any(name_of(call) in MOVES for call in calls)


def on_cpus_only(text) -> list:
    """Return what a program does that fails, or silently differs, on GPUs."""
    tree, found = ast.parse(text), []
    for function in nodes(tree, ast.FunctionDef):
        code = ast.unparse(function)
        values = [(node.targets, node.value) for node in nodes(function, ast.Assign)]
        values += [([node.target], node.value) for node in nodes(function, ast.NamedExpr)]
        bare = {
            ast.unparse(target) for targets, value in values if of_no_device(value) for target in targets
        }
        for call in nodes(function, ast.Call):
            given = {name.id for argument in call.args for name in nodes(argument, ast.Name)}
            sent = given & bare or any(map(of_no_device, call.args))
            if SENDS.fullmatch(name_of(call)) and sent and BOTH not in text:
                found.append(
                    f"{name_of(call)} of a tensor that was made without a device: NCCL takes none of the CPU"
                )
            holds = re.search(r"state_dict\(|\.items\(\)", code)
            if "_object" in name_of(call) and holds and ".cpu()" not in code:
                found.append(
                    f"{name_of(call)} pickles tensors: they come back on the GPU that sent them; copy them to the CPU"
                )
    if "torch.get_rng_state" in text and "torch.cuda.get_rng_state" not in text:
        found.append("get_rng_state: a GPU draws dropout from its own generator, see torch.random.fork_rng")
    for call in nodes(tree, ast.Call):
        if ast.unparse(call.func) == "torch.load" and lacks(call, "map_location"):
            found.append("torch.load without map_location: every rank loads onto the GPU that saved")
        if name_of(call) == "init_device_mesh" and ast.unparse(call.args[0]) == "'cpu'":
            found.append("a mesh of CPUs: take the type of the device that the model is on")
    return found


SOLVED = {number: source.partition("\n") for number, (source, _) in solved_cells().items()}
PROGRAMS = {number: text for number, (head, _, text) in SOLVED.items() if head == f"%%task {number}"}
SCRIPTS = {file.name: file.read_text() for file in (root() / "notebooks" / "scripts").glob("*.py")}


def test_a_solution_or_script_does_nothing_that_fails_on_gpus():
    problems = {name: on_cpus_only(text) for name, text in (PROGRAMS | SCRIPTS).items()}
    assert not {name: found for name, found in problems.items() if found}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("total = torch.tensor(loss); dist.all_reduce(total)", "made without a device"),
        ("dist.send(torch.zeros(3), 1)", "made without a device"),
        ("dist.gather_object(model.state_dict(), parts)", "pickles tensors"),
        ("state = torch.get_rng_state()", "get_rng_state"),
        ("torch.load(file)", "map_location"),
        ("mesh = init_device_mesh('cpu', (2,))", "a mesh of CPUs"),
    ],
)
def test_what_fails_on_gpus_is_found(line, said):
    (found,) = on_cpus_only(f"def solution():\n    {line}")
    assert said in found
