"""What `mpdemo.PUBLIC` promises: it has all that the notebooks import, with complete type hints and docstrings."""

import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
from project import text_of

import mpdemo
from mpdemo.paths import root
from mpdemo.settings import Settings

KEPT = {  # options that no cell uses, and why they stay
    "form": "a cut model in one process, as one writes it first",
    "replicas": "the shape of a hybrid",
    "sharded": "the shape of a hybrid",
    "dataset": "data of your own",
    "data": "data of your own",
}
OF_SUPPORT = {"load_site", "spec_of"}  # what a cluster's support may call
PAGES = [*root().glob("notebooks/*.ipynb"), *root().glob("notebooks/solutions/*.ipynb")]
NAMES = [(module, name) for module, names in mpdemo.PUBLIC.items() for name in names.split()]


def public(module, name):
    return getattr(import_module(f"mpdemo.{module}"), name)


def code_of(notebook) -> ast.Module:
    """Return the Python of a notebook: its cells without magics; a cell in another language is left out."""
    lines = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and not text.startswith("%%"):
            lines += [line for line in text.splitlines() if not line.lstrip().startswith(("%", "!"))]
    return ast.parse("\n".join(lines), type_comments=False)


def used_in(notebook) -> set:
    """Return the names of mpdemo that a notebook imports, or reads from a module that it imports: (module, name)."""
    used, modules = set(), {}
    tree = code_of(notebook)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mpdemo":
            for alias in node.names:
                module, inner = node.module[7:], f"{node.module}.{alias.name}"[7:]
                if inner in mpdemo.PUBLIC or inner == "labs":
                    modules[alias.asname or alias.name] = inner
                elif module.partition(".")[0] != "labs":
                    used.add((module, alias.name))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            used.add((modules[node.value.id], node.attr))
    return used


def test_every_name_that_a_notebook_imports_is_public():
    assert len(PAGES) > 20
    used = {name: page.name for page in PAGES for name in used_in(page)}
    assert len(used) > 15
    assert {name: notebook for name, notebook in used.items() if name not in NAMES} == {}


def test_every_public_function_and_every_option_has_a_user():
    """A cell, a lab, a check or the list of jobs: what only tests use leaves the package."""
    programs = [*root().glob("notebooks/labs/**/*.py"), *root().glob("notebooks/checks/*.py")]
    files = [*programs, root() / "slurm/course.toml"]
    used = "\n".join([*map(text_of, PAGES), *(file.read_text() for file in files)])
    functions = [name for module, name in NAMES if inspect.isfunction(public(module, name))]
    ways = {name: rf"\b{name}\b" for name in {*functions} - OF_SUPPORT}
    options = {field.name for field in fields(Settings)} - KEPT.keys()
    ways |= {name: rf"--{name.replace('_', '-')}\b|\b{name}=" for name in options}
    nobody = [name for name, way in ways.items() if not re.search(way, used)]
    assert not nobody, f"{nobody}: no cell, lab or check uses them; take them out"


def callables_of(thing) -> list:
    """Return a function, or a class's constructor, methods and properties, those that it defines itself."""
    if not inspect.isclass(thing):
        return [thing] if callable(thing) else []
    own = [member for name, member in vars(thing).items() if not name.startswith("_") or name == "__init__"]
    own = [member.fget if isinstance(member, property) else member for member in own]
    return [
        member for member in own if inspect.isfunction(member) and member.__module__ == thing.__module__
    ]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_has_type_hints_and_its_docstring_names_every_parameter(module, name):
    thing = public(module, name)
    if not callable(thing):
        return
    about = inspect.getdoc(thing)
    assert about, f"{module}.{name} has no docstring"
    for function in callables_of(thing):
        signature = inspect.signature(function)
        given = {key: value for key, value in signature.parameters.items() if key != "self"}
        untyped = [key for key, value in given.items() if value.annotation is value.empty]
        if function.__name__ != "__init__" and signature.return_annotation is signature.empty:
            untyped.append("return")
        assert untyped == [], f"{module}.{function.__qualname__} has no type hint for {', '.join(untyped)}"
        if function is thing:
            missing = [key for key in given if key not in about]
            assert missing == [], f"the docstring of {module}.{name} says nothing of {', '.join(missing)}"


def test_importing_mpdemo_loads_no_other_module_of_it():
    code = "import sys, mpdemo; print(*[name for name in sys.modules if name.startswith(('mpdemo.', 'torch'))])"
    code += "; mpdemo.predict.simulate; assert 'torch' not in sys.modules; mpdemo.nothing"
    done = subprocess.run(
        [sys.executable, "-E", "-c", code], cwd=root(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "\n" and "module 'mpdemo' has no attribute 'nothing'" in done.stderr, done.stderr
