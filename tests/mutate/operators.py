"""Small, plausible mistakes: where a file can have them, and what it says then."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

OPERATORS = (
    "sign",
    "constant",
    "comparison",
    "dropped term",
    "swapped arguments",
    "dropped call",
    "other index",
    "stale value",
)
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SIGN: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_AXES = {"dim", "axis"}
_OVER_AXES = {"sum", "mean", "argmax", "argmin", "amax", "amin", "cumsum", "softmax", "log_softmax", "logsumexp"}
_KEPT_ORDER = {"isinstance", "getattr", "hasattr", "issubclass", "replace", "zip", "range"}
# without these calls the next line fails at once, which no test is needed for
_NEEDED = {
    "ask",
    "items",
    "keys",
    "values",
    "encode",
    "decode",
    "to_numpy",
    "tolist",
    "item",
    "nonzero",
    "get",
    "split",
}
_NEEDED |= {"join", "pop", "startswith", "endswith", "read_text", "read_bytes", "rpartition", "partition", "model_dump"}
_SILENT = {"cast", "isinstance", "print", "super", "partial", "field", "TypeVar", "Literal", "len", "getattr"}


@dataclass(frozen=True)
class Mutant:
    """One mistake: a stretch of a file and what stands there instead."""

    path: str
    function: str  # the qualified name, or that of the class, or nothing
    operator: str
    line: int
    offset: int  # of the line in the function's body
    start: int  # in characters of the file
    end: int
    before: str
    after: str
    repeat: int  # how many like it are above it in the function
    inside: bool  # is it in a function's body? Else it is read when the module is

    @cached_property
    def id(self) -> str:
        """The same as long as the function and the stretch are, wherever they stand."""
        named = "\0".join([self.path, self.function, self.operator, self.before, self.after, str(self.repeat)])
        return hashlib.sha256(named.encode()).hexdigest()[:12]

    def told(self) -> dict[str, str]:
        """Its beginning of a line of the table."""
        told = {"id": self.id, "path": self.path, "function": self.function, "operator": self.operator}
        return told | {"before": self.before, "after": self.after}

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


def places(source: str) -> dict[int, tuple[str, int]]:
    """For each line the innermost function whose body it is in, and how far below the body's beginning it is."""
    found: dict[int, tuple[str, int]] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                whole = f"{name}.{child.name}" if name else child.name
                first = child.body[0].lineno
                if not isinstance(child, ast.ClassDef):
                    found.update({line: (whole, line - first) for line in range(first, (child.end_lineno or 0) + 1)})
                visit(child, whole)
            else:
                visit(child, name)

    visit(ast.parse(source), "")
    return found


def mutants(root: Path, path: str) -> list[Mutant]:
    """All that a file can have."""
    source = (root / path).read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def character(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    found: list[Mutant] = []
    bodies = places(source)
    seen: dict[tuple[str, ...], int] = {}
    for node, function, offset, operator, after in _sites(ast.parse(source)):
        start, end = character(node.lineno, node.col_offset), character(node.end_lineno, node.end_col_offset)
        before = source[start:end]
        if before == after:
            continue
        key = (function, operator, before, after)
        seen[key] = seen.get(key, 0) + 1
        found.append(
            Mutant(
                path,
                function,
                operator,
                node.lineno,
                offset,
                start,
                end,
                before,
                after,
                seen[key] - 1,
                node.lineno in bodies,
            )
        )
    return found


def thought_up(root: Path, mistake: dict[str, str]) -> Mutant:
    """A mistake that somebody wrote down; the stretch that it changes stands once in its file."""
    path, before = mistake["path"], mistake["before"]
    source = (root / path).read_text()
    if source.count(before) != 1:
        raise ValueError(f"{mistake['name']}: {path} holds {source.count(before)} times {before!r}; expected once")
    start = source.index(before)
    line = source[:start].count("\n") + 1
    bodies, end = places(source), start + len(before)
    function, offset = bodies.get(line, ("", line))
    inside, after = line in bodies, mistake["after"]
    return Mutant(path, function, mistake["name"], line, offset, start, end, before, after, 0, inside)


def _sites(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, int, str, str]]:
    yield from _walk(tree, "", 0, set())


def _walk(
    node: ast.AST, function: str, first: int, known: set[str]
) -> Iterator[tuple[ast.expr | ast.stmt, str, int, str, str]]:
    """Nothing in annotations, docstrings, messages and guards that do nothing but raise."""
    for child in _children(node):
        if isinstance(child, ast.ClassDef):
            whole = f"{function}.{child.name}" if function else child.name
            yield from _walk(child, whole, child.lineno, set())
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in [*child.args.defaults, *(d for d in child.args.kw_defaults if d is not None)]:
                yield from _expression(default, function, first)
            whole = f"{function}.{child.name}" if function else child.name
            every = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            yield from _walk(child, whole, child.body[0].lineno, {arg.arg for arg in every})
            continue
        if isinstance(child, ast.stmt):
            if isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
                continue
            if isinstance(child, ast.If) and all(isinstance(one, ast.Raise) for one in child.body) and not child.orelse:
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            for operator, after in _statement(child, known, inside=isinstance(node, ast.FunctionDef) or first > 0):
                yield child, function, child.lineno - first, operator, after
            for target in ast.walk(child) if isinstance(child, ast.Assign | ast.AnnAssign | ast.For) else ():
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    known.add(target.id)
            yield from _walk(child, function, first, known)
        elif isinstance(child, ast.expr):
            yield from _expression(child, function, first)
        else:
            yield from _walk(child, function, first, known)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped = [node.args, node.returns, *node.decorator_list]
    elif isinstance(node, ast.ClassDef):
        skipped = [*node.bases, *node.keywords, *node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        skipped = [node.annotation, node.target]
    elif isinstance(node, ast.Assign):
        skipped = [target for target in node.targets if isinstance(target, ast.Name)]
    return (child for child in ast.iter_child_nodes(node) if not any(child is one for one in skipped))


def _statement(node: ast.stmt, known: set[str], inside: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.AugAssign):
        yield "stale value", "pass"
        if type(node.op) in _SIGN:
            changed = ast.AugAssign(node.target, _SIGN[type(node.op)](), node.value)
            yield "sign", ast.unparse(changed)
    elif inside and isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if all(isinstance(name, ast.Name) and name.id in known for name in names) or (
            isinstance(target, ast.Subscript | ast.Attribute)
        ):
            yield "stale value", "pass"
    elif inside and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", "pass"


def _expression(node: ast.expr, function: str, first: int) -> Iterator[tuple[ast.expr, str, int, str, str]]:
    if isinstance(node, ast.JoinedStr | ast.Lambda) and isinstance(node, ast.JoinedStr):
        return
    for operator, changed in _changes(node):
        after = ast.unparse(changed)
        if isinstance(changed, ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.Compare | ast.IfExp | ast.Lambda):
            after = f"({after})"
        yield node, function, node.lineno - first, operator, after
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _expression(child, function, first)
        elif isinstance(child, ast.keyword | ast.comprehension):
            for inner in ast.iter_child_nodes(child):
                if isinstance(inner, ast.expr):
                    yield from _expression(inner, function, first)


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.BinOp):
        yield from _of_terms(node)
    elif isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub):
            yield "sign", node.operand
        elif isinstance(node.op, ast.Not | ast.Invert):
            yield "comparison", node.operand
    elif isinstance(node, ast.BoolOp):
        yield "comparison", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for value in node.values if len(node.values) == 2 else ():
            yield "dropped term", value
    elif isinstance(node, ast.Compare):
        for place, kind in enumerate(node.ops):
            ops = [*node.ops[:place], _COMPARED[type(kind)](), *node.ops[place + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.Constant):
        changed = _other_constant(node.value)
        if changed is not None:
            yield "constant", ast.Constant(changed)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Subscript):
        yield from _other_index(node)


def _of_terms(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    text = any(_is_text(part) for part in (node.left, node.right))
    if type(node.op) in _SIGN and not text:
        yield "sign", ast.BinOp(node.left, _SIGN[type(node.op)](), node.right)
    if isinstance(node.op, ast.Sub | ast.Div | ast.Pow | ast.MatMult) and not text:
        yield "swapped arguments", ast.BinOp(node.right, node.op, node.left)
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow | ast.BitAnd | ast.BitOr) and not text:
        yield "dropped term", node.left
        if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
            yield "dropped term", node.right


def _is_text(node: ast.expr) -> bool:
    """Text, bytes, a list, or a name of a file or folder: what is added to these is no number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (isinstance(node, ast.Name) and node.id.isupper())


def _other_constant(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 2 * value if value else 1.0
    return None


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    plain = not any(isinstance(arg, ast.Starred) for arg in node.args)
    first = 1 if name == "where" else 0
    pair = node.args[first : first + 2]
    if plain and len(pair) == 2 and name not in _KEPT_ORDER and ast.dump(pair[0]) != ast.dump(pair[1]):
        swapped = [*node.args[:first], pair[1], pair[0], *node.args[first + 2 :]]
        yield "swapped arguments", ast.Call(node.func, swapped, node.keywords)
    for one in node.keywords:
        if one.arg is not None:
            kept = [other for other in node.keywords if other is not one]
            yield "dropped term", ast.Call(node.func, node.args, kept)
            other = _other_axis(one.value) if one.arg in _AXES else None
            if other is not None:
                kept = [ast.keyword(one.arg, other) if other_ is one else other_ for other_ in node.keywords]
                yield "other index", ast.Call(node.func, node.args, kept)
    if name in _OVER_AXES and len(node.args) == 1 and isinstance(node.func, ast.Attribute):
        other = _other_axis(node.args[0])
        if other is not None:
            yield "other index", ast.Call(node.func, [other], node.keywords)
    if name in _SILENT or name[:1].isupper():
        return
    if name in _NEEDED or (len(node.args) == 1 and (_is_text(node.args[0]) or isinstance(node.args[0], ast.Constant))):
        return
    if plain and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.GeneratorExp):
        yield "dropped call", node.args[0]
    if isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name)
        and node.func.value.id in {"torch", "np", "math", "F", "self", "json", "os"}
    ):
        yield "dropped call", node.func.value


def _other_axis(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return ast.Constant(1 if node.value == 0 else 0)
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return ast.Constant(0)
    return None


def _other_index(node: ast.Subscript) -> Iterator[tuple[str, ast.expr]]:
    def indexed(index: ast.expr) -> tuple[str, ast.expr]:
        return "other index", ast.Subscript(node.value, index, node.ctx)

    index = node.slice
    if isinstance(node.ctx, ast.Store):
        return
    if isinstance(index, ast.Constant) and isinstance(index.value, int):
        yield indexed(ast.Constant(index.value + 1 if index.value == 0 else index.value - 1))
    elif isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        yield indexed(ast.Constant(0))
    elif isinstance(index, ast.Slice) and (index.lower or index.upper):
        if index.lower:
            yield indexed(ast.Slice(None, index.upper, index.step))
        if index.upper:
            yield indexed(ast.Slice(index.lower, None, index.step))
        one = ast.Constant(1)
        if index.lower:
            yield indexed(ast.Slice(ast.BinOp(index.lower, ast.Add(), one), index.upper, index.step))
        elif index.upper:
            yield indexed(ast.Slice(index.lower, ast.BinOp(index.upper, ast.Sub(), one), index.step))
    elif isinstance(index, ast.Tuple) and len(index.elts) == 2 and ast.dump(index.elts[0]) != ast.dump(index.elts[1]):
        yield indexed(ast.Tuple([index.elts[1], index.elts[0]], ast.Load()))
