"""Delete dimensions from train_gpt.py: what is left is what it does where each of them is 1.

Whole sections go, which a comment names, such as "# --- mesh: --tp". In the rest `args.tp` is 1, which is computed away
together with the branches that it decides. What mentions something that is gone goes as well: an element, an argument
or a branch, else the statement.
"""

import ast
from collections import Counter

GONE = ast.Name("GONE")
# what loses all of them goes
LISTS = {ast.Tuple: "elts", ast.List: "elts", ast.Assign: "targets", ast.Call: "args"}


def without(source, flags, names) -> str:
    """Return a script without the dimensions of some flags, and without names that only they need; no docstrings."""
    begins = {0: ""} | {
        k: line for k, line in enumerate(source.splitlines(), 1) if line.startswith("# --- ")
    }
    tree, kept = ast.parse(source), []
    for node in tree.body:
        if begins[max(k for k in begins if k < node.lineno)].endswith(tuple(f"--{flag}" for flag in flags)):
            names = names | (
                {node.name} if hasattr(node, "name") else {ast.unparse(target) for target in node.targets}
            )
        else:
            kept.append(node)
    tree.body = kept
    return clean(Delete(flags, names).visit(tree))


def clean(tree) -> str:
    """Return a program without docstrings, and without parameters, functions and imports that nothing uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            del node.body[0]
        match getattr(node, "body", None):
            case [*_, ast.Assign([ast.Name(name)]), ast.Return(ast.Name(same))] if name == same:
                node.body[-2:] = [ast.Return(node.body[-2].value)]
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        for place, arg in reversed([*enumerate(function.args.args)]):
            if not uses(function.body)[arg.arg]:
                del function.args.args[place]
                for call in ast.walk(tree):
                    if (
                        isinstance(call, ast.Call)
                        and ast.unparse(call.func) == function.name
                        and call.args[place:]
                    ):
                        del call.args[place]
    used = uses(tree.body)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [name for name in node.names if used[(name.asname or name.name).split(".")[0]]]
    left = [
        node for node in tree.body if getattr(node, "names", True) and used[getattr(node, "name", "main")]
    ]
    return ast.unparse(ast.fix_missing_locations(ast.Module(left, [])))


def uses(nodes) -> Counter:
    """Return how often each name is used."""
    return Counter(name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name))


class Delete(ast.NodeTransformer):
    """Deletes flags, of which each is 1, and names."""

    def __init__(self, flags, names):
        self.flags, self.names = flags, names
        self.texts = flags | {f"--{name}" for name in flags | names}

    def visit(self, node):
        """Visit a node's parts, then return what is left of it."""
        listed = LISTS.get(type(node))
        had = listed and getattr(node, listed)
        for field, part in ast.iter_fields(node):
            if isinstance(part, list):
                # else, of sizes or arguments, `args.tp` goes and no 1 stays
                whole = isinstance(node, ast.BoolOp)
                parts = [self.visit(x) for x in part if whole or not self.is_flag(x)]
                parts = [y for x in parts for y in (x if isinstance(x, list) else [x])]
                setattr(node, field, [x for x in parts if x is not GONE])
            elif isinstance(part, ast.AST):
                setattr(node, field, self.visit(part))
        if had and not getattr(node, listed):
            return GONE
        return getattr(self, f"left_of_{type(node).__name__}", self.left)(node)

    def is_flag(self, node):
        """Whether this is `args.tp`, or a keyword argument with this value."""
        node = getattr(node, "value", node) if isinstance(node, ast.keyword) else node
        return isinstance(node, ast.Attribute) and ast.unparse(node) in {
            f"args.{flag}" for flag in self.flags
        }

    def left(self, node):
        """Return a node if all of its single parts are there."""
        return GONE if any(part is GONE for _, part in ast.iter_fields(node)) else node

    def left_of_Name(self, node):
        return GONE if node.id in self.names else node

    def left_of_arg(self, node):
        return GONE if node.arg in self.names else node

    def left_of_Constant(self, node):
        return GONE if node.value in self.texts else node

    def left_of_Attribute(self, node):
        if self.is_flag(node):
            return ast.Constant(1) if isinstance(node.ctx, ast.Load) else GONE
        return GONE if ast.unparse(node.value) == "args" and node.attr in self.names else self.left(node)

    def left_of_Tuple(self, node):
        return node.elts[0] if len(node.elts) == 1 else node

    def left_of_BinOp(self, node):
        if isinstance(node.op, ast.Mod) and of(node.right) == 1:
            return ast.Constant(0)
        if isinstance(node.op, ast.Mult | ast.FloorDiv) and of(node.right) == 1:
            return node.left
        return node.right if isinstance(node.op, ast.Mult) and of(node.left) == 1 else self.left(node)

    def left_of_Compare(self, node):
        if of(node.left) == 1 == of(node.comparators[0] if node.comparators else GONE):
            return ast.Constant(isinstance(node.ops[0], ast.Eq))
        return self.left(node) if node.comparators else GONE

    def left_of_BoolOp(self, node):
        if isinstance(node.op, ast.And) and any(of(part) in (0, False) for part in node.values):
            return ast.Constant(False)
        return node.values[0] if len(node.values) == 1 else node

    def left_of_IfExp(self, node):
        return self.branch(node)

    def left_of_If(self, node):
        return self.branch(node)

    def branch(self, node):
        """Return the branch that a test decides for, or both."""
        if of(node.test) in (0, False) or node.test is GONE:
            return node.orelse
        return node.body if of(node.test) is True else node


def of(node):
    """Return the value of a constant."""
    return node.value if isinstance(node, ast.Constant) else None
