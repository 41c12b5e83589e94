"""Where a rank is inside a reader's program or cell, in words: from the stack that Python's faulthandler wrote.

A rank that waits in gloo runs C++: no Python code of its own could answer. faulthandler's signal handler is C.
Source: https://docs.python.org/3/library/faulthandler.html#dumping-the-tracebacks-on-a-user-signal.
"""

import ast
import re

THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.M)
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
# what waits though it is no function of torch.distributed
WAITING = {"wait", "join", "sleep", "synchronize"}


def place_in_program(report, filename, source) -> str:
    """Return where a rank is, as ``still waits in recv, line 4``, from its threads' stacks, innermost frame first."""
    for thread in THREAD.split(report):
        frames = FRAME.findall(thread)
        for depth, (file, line, _) in enumerate(frames):
            if file == filename:
                return _in_words(frames[:depth], int(line), source)
    return "still runs"


def _in_words(inner, line, source) -> str:
    """Name the function that the program's line called: the frames inside the program's own are `inner`."""
    called = called_names(source, line)
    entered = [function for _, _, function in inner]
    # A wrapper's frame may lie between the program and the function that it called; C functions have no frame.
    names = [name for name in called if name in entered] or called[:1]
    if not names:
        return f"still runs line {line}"
    waits = names[0] in WAITING or any("torch/distributed" in file for file, _, _ in inner)
    return f"{'still waits in' if waits else 'is still in'} {names[0]}, line {line}"


def called_names(source, line) -> list:
    """Return the names of the functions called on a line of the source, the outermost call first."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    functions = [node.func for node in calls if node.lineno <= line <= node.end_lineno]
    names = [getattr(function, "attr", None) or getattr(function, "id", None) for function in functions]
    return [name for name in names if name]
