"""Small wrong changes of a source file, made systematically from its syntax tree. Pure text, no JAX.

A mutant changes one place: a literal, an operator, an index or a slice, the order of two neighbours, a name for its
twin (source for target), a call, a condition or a statement. Left alone is what no value depends on: docstrings,
annotations, imports, assertions, the messages of errors, names of programs (which are only shown), ``strict=`` of
``zip`` (a guard that correct code never trips), the order of what is only searched, counted or put into a dict, of the
arguments of symmetric functions, of equal ones and of a slice of one element, and what stands inside the braces of an
f-string, and the examples of settings (``metadata={"example": …}``), which stand in messages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Edit = tuple[int, int, bytes]
"""Bytes ``[start, stop)`` of the source and what takes their place."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("//",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*", "%")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift)
"""Operators whose operands may not change places."""

CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "psum": "pmean",
    "pmean": "psum",
    "sum": "max",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "ones": "zeros",
    "lcm": "gcd",
    "prod": "sum",
    "sqrt": "square",
}
IDENTITIES = frozenset(
    (
        *("reversed", "psum", "pmean", "psum_scatter", "all_gather", "ppermute", "pcast", "square", "pad", "unpad"),
        *("to_varying", "tree_to_varying", "with_sharding_constraint", "broadcast_from_leader"),
    )
)
"""Calls that become their first argument."""

SYMMETRIC = frozenset(("min", "max", "lcm", "between", "isinstance", "add", "where"))
"""Calls whose neighbours are not swapped: equal either way, or ill-typed. ``where`` swaps its branches alone."""

UNORDERED = frozenset(("any", "all", "set", "frozenset", "sum", "len", "min", "max", "prod", "lcm", "sorted"))
"""Calls that give the same whatever the order of what they are given."""

TWINS = ("source", "target"), ("src", "dst"), ("start", "stop"), ("forward", "backward"), ("keep", "send")
ATTRIBUTE_TWINS = {
    "dp": "tp",
    "tp": "cp",
    "cp": "tp",
    "all": "replica",
    "replica": "all",
    "shard": "dp",
    "instance": "shard",
}

NAMED_CALLS = frozenset(("Program", "of", "Boundary", "_transfer", "ThreadPoolExecutor", "ContextVar"))
"""Their first argument is a name that is only shown."""
NAME_VARIABLES = frozenset(("label",))
GUARDS = frozenset(("strict",))
GENERICS = frozenset(
    ("dict", "tuple", "list", "set", "frozenset", "Callable", "Mapping", "Sequence", "defaultdict", "Literal")
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong change.

    Attributes:
      file: path from the repository's root.
      line, column: where, from 1 and from 0.
      kind: what was done, such as ``int+1``.
      scope: the function or class around it, or the constant that it is part of.
      source: the whole file, before.
      edits: what changes, in order.
    """

    file: str
    line: int
    column: int
    kind: str
    scope: str
    source: bytes
    edits: tuple[Edit, ...]

    @property
    def id(self) -> str:
        """Such as ``mmjax/mesh/routes.py:41:15:int+1``."""
        return f"{self.file}:{self.line}:{self.column}:{self.kind}"

    @cached_property
    def mutated(self) -> bytes:
        """The whole file, after."""
        result = self.source
        for start, stop, text in sorted(self.edits, reverse=True):
            result = result[:start] + text + result[stop:]
        return result

    @cached_property
    def lines(self) -> tuple[str, str]:
        """The changed lines before and after, on one line each: what a person reads, and what survives line numbers."""
        first = min(start for start, _, _ in self.edits)
        last = max(stop for _, stop, _ in self.edits)
        begin = self.source.rfind(b"\n", 0, first) + 1
        end = self.source.find(b"\n", last)
        end = len(self.source) if end < 0 else end
        grown = len(self.mutated) - len(self.source)
        before, after = self.source[begin:end], self.mutated[begin : end + grown]
        return " ".join(before.decode().split()), " ".join(after.decode().split())

    @property
    def key(self) -> str:
        """Names the mutant in ``docs/mutants.md``."""
        return f"`{self.lines[0]}` → `{self.lines[1]}`"


def _is_example(keyword: ast.keyword) -> bool:
    """Whether a keyword gives the example of a setting."""
    keys = keyword.value.keys if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict) else ()
    return any(isinstance(key, ast.Constant) and key.value == "example" for key in keys)


def mutants(file: str, source: bytes, left_out: Collection[str] = ()) -> list[Mutant]:
    """All mutants of a file, in order of place; those that do not parse or change nothing are left out.

    ``left_out`` are names of the module whose definitions are no targets.
    """
    found: dict[bytes, Mutant] = {source: _Generator(file, source).nothing}
    for mutant in _Generator(file, source).all():
        if mutant.mutated not in found and mutant.scope.split(".")[0] not in left_out:
            try:
                ast.parse(mutant.mutated)
            except SyntaxError:
                continue
            found[mutant.mutated] = mutant
    del found[source]
    result = sorted(found.values(), key=lambda m: (m.line, m.column, m.kind))
    assert len({m.id for m in result}) == len(result), "two mutants share an id"
    return result


class _Generator:
    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.tree = file, source, ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._words = {n.attr for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        self._scopes: list[str] = []
        self._unordered = {id(node) for node in _unordered(self.tree)}
        self._integers: list[set[str]] = [set()]
        self._names: list[set[str]] = [{n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}]

    def all(self) -> Iterator[Mutant]:
        yield from self._body(self.tree.body)

    @property
    def nothing(self) -> Mutant:
        return self._mutant("nothing", (0, 0, b""))

    # ---- places ------------------------------------------------------------------------------------------------------

    def _start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _stop(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> bytes:
        return self.source[self._start(node) : self._stop(node)]

    def _mutant(self, kind: str, *edits: Edit, place: int | None = None) -> Mutant:
        place = min(start for start, _, _ in edits) if place is None else place
        line = self.source.count(b"\n", 0, place) + 1
        return Mutant(
            file=self.file,
            line=line,
            column=place - self._starts[line - 1],
            kind=kind,
            scope=".".join(self._scopes),
            source=self.source,
            edits=edits,
        )

    def _replace(self, kind: str, node: ast.AST, text: bytes | str) -> Mutant:
        text = text.encode() if isinstance(text, str) else text
        return self._mutant(kind, (self._start(node), self._stop(node), text))

    def _swap(self, kind: str, a: ast.AST, b: ast.AST) -> Mutant:
        edits = (self._start(a), self._stop(a), self._text(b)), (self._start(b), self._stop(b), self._text(a))
        return self._mutant(kind, *edits, place=self._stop(a))

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, pattern: str, text: str) -> Iterator[Mutant]:
        """Replaces the operator that stands between two operands."""
        begin, end = self._stop(left), self._start(right)
        match = re.search(pattern.encode(), self.source[begin:end])
        if match:
            yield self._mutant(kind, (begin + match.start(), begin + match.end(), text.encode()))

    # ---- statements --------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.stmt]) -> Iterator[Mutant]:
        for node in body:
            yield from self._statement(node)

    def _statement(self, node: ast.stmt) -> Iterator[Mutant]:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise() | ast.Pass():
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.ClassDef():
                self._scopes.append(node.name)
                for decorator in node.decorator_list:
                    yield from self._decorator(decorator)
                yield from self._body(node.body)
                self._scopes.pop()
            case ast.FunctionDef():
                yield from self._function(node)
            case ast.Expr(value=ast.Constant()):
                return  # docstrings
            case ast.Expr():
                yield self._replace("drop", node, "pass")
                yield from self._expression(node.value)
            case ast.Return(value=ast.expr() as value):
                if not (isinstance(value, ast.Constant) and value.value is None):
                    yield self._replace("return", node, "return None")
                yield from self._expression(value)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                constant = isinstance(target, ast.Name) and not self._scopes
                self._scopes += [target.id] if constant and isinstance(target, ast.Name) else []
                yield from self._assignment(node)
                del self._scopes[len(self._scopes) - constant :]
            case ast.If() | ast.While():
                yield from self._condition(node.test, loop=isinstance(node, ast.While))
                yield from self._body(node.body)
                yield from self._body(node.orelse)
            case ast.For():
                yield self._replace("never", node.iter, "()")
                yield from self._unpacking(node.target)
                yield from self._expression(node.iter)
                yield from self._body(node.body)
            case ast.Try():
                yield from self._body([*node.body, *(s for h in node.handlers for s in h.body)])
                yield from self._body([*node.orelse, *node.finalbody])
            case ast.With():
                for item in node.items:
                    yield from self._expression(item.context_expr)
                yield from self._body(node.body)
            case ast.Continue():
                yield self._replace("continue", node, "break")
                yield self._replace("pass", node, "pass")
            case ast.Break():
                yield self._replace("break", node, "continue")

    def _decorator(self, node: ast.expr) -> Iterator[Mutant]:
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                yield from self._expression(keyword.value)

    def _function(self, node: ast.FunctionDef) -> Iterator[Mutant]:
        self._scopes.append(node.name)
        self._integers.append(self._integers[-1] | _integer_names(node))
        self._names.append({n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | _arguments(node))
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            yield from self._expression(default)
        yield from self._body(node.body)
        self._scopes.pop()
        self._integers.pop()
        self._names.pop()

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[Mutant]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None or any(isinstance(t, ast.Name) and t.id in NAME_VARIABLES for t in targets):
            return
        assigned = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        stored = isinstance(targets[0], (ast.Subscript, ast.Attribute)) and self._scopes[-1:] != ["__init__"]
        if isinstance(node, ast.AugAssign) or assigned & read or (stored and isinstance(node, ast.Assign)):
            yield self._replace("drop", node, "pass")
        if isinstance(node, ast.AugAssign):
            name, others = ARITHMETIC[type(node.op)]
            for other in others:
                yield from self._operator(
                    f"{name}=to{other}", node.target, node.value, re.escape(name) + "=", other + "="
                )
        for target in targets:
            if isinstance(target, ast.Tuple) and not isinstance(node.value, ast.Tuple):
                yield from self._unpacking(target)
            yield from self._places(target)
        yield from self._expression(node.value)

    def _places(self, target: ast.expr) -> Iterator[Mutant]:
        """Indices of what is assigned to."""
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Subscript):
                yield from self._expression(part)

    def _unpacking(self, target: ast.expr) -> Iterator[Mutant]:
        if isinstance(target, ast.Tuple):
            yield from self._neighbours(target.elts)
            for part in target.elts:
                yield from self._unpacking(part)

    def _condition(self, test: ast.expr, loop: bool = False) -> Iterator[Mutant]:
        if not isinstance(test, ast.Constant):
            if not loop:  # a loop that never ends says nothing
                yield self._replace("true", test, "True")
            yield self._replace("false", test, "False")
        yield from self._expression(test)

    # ---- expressions -------------------------------------------------------------------------------------------------

    def _expression(self, node: ast.expr | None) -> Iterator[Mutant]:
        match node:
            case None:
                return
            case ast.Constant():
                yield from self._literal(node)
            case ast.JoinedStr():
                yield self._mutant("str", (self._stop(node) - 1, self._stop(node) - 1, b"_"))
            case ast.UnaryOp():
                yield from self._unary(node)
            case ast.BinOp():
                yield from self._binary(node)
            case ast.BoolOp():
                yield from self._boolean(node)
            case ast.Compare():
                yield from self._comparison(node)
            case ast.Subscript():
                yield from self._subscript(node)
            case ast.Call():
                yield from self._call(node)
            case ast.Tuple() | ast.List():
                if id(node) not in self._unordered:
                    yield from self._neighbours(node.elts)
                for element in node.elts:
                    yield from self._expression(element)
            case ast.IfExp():
                yield from self._condition(node.test)
                yield from self._expression(node.body)
                yield from self._expression(node.orelse)
            case ast.Name():
                yield from self._twins(node, node.id, self._start(node), self._names[-1])
            case ast.Attribute():
                place = self._stop(node) - len(node.attr)
                yield from self._twins(node, node.attr, place, self._words)
                yield from self._expression(node.value)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                yield from self._comprehensions(node.generators)
                yield from self._expression(node.elt)
            case ast.DictComp():
                yield from self._comprehensions(node.generators)
                yield from self._expression(node.key)
                yield from self._expression(node.value)
            case ast.Lambda():
                self._names.append(self._names[-1] | _arguments(node))
                for default in node.args.defaults:
                    yield from self._expression(default)
                yield from self._expression(node.body)
                self._names.pop()
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        yield from self._expression(child)

    def _literal(self, node: ast.Constant) -> Iterator[Mutant]:
        value = node.value
        if isinstance(value, bool):
            yield self._replace("bool", node, str(not value))
        elif isinstance(value, int):
            yield self._replace("int+1", node, str(value + 1))
            yield self._replace("int-1", node, f"({value - 1})" if value < 1 else str(value - 1))
        elif isinstance(value, float):
            yield self._replace("float+1", node, repr(value + 1))
            yield self._replace("float-1", node, f"({value - 1!r})")
        elif value is None:
            yield self._replace("none", node, "1")  # neither None nor false
        elif isinstance(value, str):
            yield self._replace("str", node, repr(value + "_"))

    def _unary(self, node: ast.UnaryOp) -> Iterator[Mutant]:
        match node.op, node.operand:
            case ast.USub(), ast.Constant(value=int() as value):
                yield self._replace("int+1", node, f"({1 - value})" if value > 1 else "0")
                yield self._replace("int-1", node, f"({-value - 1})")
            case ((ast.USub() | ast.Not() | ast.Invert()), operand):
                name = "not" if isinstance(node.op, ast.Not) else "sign"
                yield self._replace(name, node, b"(" + self._text(operand) + b")")
                yield from self._expression(operand)

    def _binary(self, node: ast.BinOp) -> Iterator[Mutant]:
        if type(node.op) in ARITHMETIC:
            name, others = ARITHMETIC[type(node.op)]
            for other in others:
                yield from self._operator(f"{name}to{other}", node.left, node.right, re.escape(name), other)
        sequences = isinstance(node.op, ast.Add) and not (self._is_integer(node.left) or self._is_integer(node.right))
        literal = any(isinstance(side, (ast.Tuple, ast.List)) for side in (node.left, node.right))
        attributes = all(isinstance(side, ast.Attribute) for side in (node.left, node.right))
        if isinstance(node.op, ORDERED) or (sequences and (literal or attributes)):
            yield self._swap(f"swap{ARITHMETIC[type(node.op)][0]}", node.left, node.right)
        yield from self._expression(node.left)
        yield from self._expression(node.right)

    def _boolean(self, node: ast.BoolOp) -> Iterator[Mutant]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in pairwise(node.values):
            yield from self._operator(f"{old}to{new}", left, right, rf"\b{old}\b", new)
            begin, end = self._start(left), self._stop(right)
            if len(node.values) == 2:
                yield self._mutant("first", (begin, end, self._text(left)), place=self._stop(left))
                yield self._mutant("second", (begin, end, self._text(right)), place=self._stop(left))
        for value in node.values:
            yield from self._expression(value)

    def _comparison(self, node: ast.Compare) -> Iterator[Mutant]:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, node.comparators, strict=False):
            pattern, others = COMPARISONS[type(op)]
            for other in others:
                yield from self._operator(f"to{other.replace(' ', '')}", left, right, pattern, other)
        identity = any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        for side in sides:
            if not (identity and isinstance(side, ast.Constant)):
                yield from self._expression(side)

    def _subscript(self, node: ast.Subscript) -> Iterator[Mutant]:
        if isinstance(node.value, ast.Name) and node.value.id in GENERICS:
            return
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            if isinstance(index, ast.Slice):
                yield from self._slice(index)
            elif self._is_integer(index) and not isinstance(index, (ast.Constant, ast.UnaryOp)):
                text = self._text(index)
                yield self._replace("index+1", index, b"(" + text + b") + 1")
                yield self._replace("index-1", index, b"(" + text + b") - 1")
                yield self._replace("mirror", index, b"-1 - (" + text + b")")
        ordered = id(node) not in self._unordered and isinstance(node.ctx, ast.Load)
        if isinstance(node.slice, ast.Slice) and ordered and not _one_at_most(node.slice):
            yield self._mutant("reverse", (self._stop(node), self._stop(node), b"[::-1]"))
        yield from self._expression(node.value)
        if isinstance(node.slice, ast.Tuple):
            yield from self._neighbours(node.slice.elts)
            for index in node.slice.elts:
                yield from self._expression(index)
        elif not isinstance(node.slice, ast.Slice):
            yield from self._expression(node.slice)

    def _slice(self, node: ast.Slice) -> Iterator[Mutant]:
        for name, bound in (("lower", node.lower), ("upper", node.upper)):
            if bound is None:
                continue
            text = self._text(bound)
            yield self._replace(f"no{name}", bound, "")
            if not isinstance(bound, ast.Constant):
                yield self._replace(f"{name}+1", bound, b"(" + text + b") + 1")
                yield self._replace(f"{name}-1", bound, b"(" + text + b") - 1")
            yield from self._expression(bound)
        yield from self._expression(node.step)

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        place = self._stop(node.func) - len(name)
        if name in CALLS and node.args:
            yield self._mutant(CALLS[name], (place, place + len(name), CALLS[name].encode()))
        if name in IDENTITIES and node.args and not isinstance(node.args[0], ast.Starred):
            yield self._replace("identity", node, b"(" + self._text(node.args[0]) + b")")
        if name == "sorted" and id(node) not in self._unordered:
            yield self._mutant("reverse", (self._stop(node), self._stop(node), b"[::-1]"))
        if name == "enumerate" and len(node.args) == 1:
            yield self._mutant("from1", (self._stop(node.args[0]), self._stop(node.args[0]), b", 1"))
        if name not in SYMMETRIC:
            yield from self._neighbours(node.args)
        elif name == "where":
            yield from self._neighbours(node.args[1:])
        yield from self._expression(node.func)
        for i, argument in enumerate(node.args):
            if i or name not in NAMED_CALLS or not isinstance(argument, (ast.Constant, ast.JoinedStr, ast.Call)):
                yield from self._expression(argument)
        yield from self._keywords(node)

    def _keywords(self, node: ast.Call) -> Iterator[Mutant]:
        own = [k for k in node.keywords if k.arg is not None and k.arg not in GUARDS and not _is_example(k)]
        for keyword in own:
            start, stop = self._start(keyword), self._stop(keyword)
            before = [self._stop(a) for a in (*node.args, *node.keywords) if self._stop(a) <= start]
            if before:
                comma = self.source.rfind(b",", max(before), start)
                yield self._mutant("keyword", (comma, stop, b""))
            else:
                after = [self._start(k) for k in node.keywords if self._start(k) > start]
                yield self._mutant("keyword", (start, min(after, default=stop), b""))
        for first, second in pairwise(own):
            if not _equal(first.value, second.value):
                yield self._swap("keywords", first.value, second.value)
        for keyword in own:
            yield from self._expression(keyword.value)

    def _comprehensions(self, generators: Sequence[ast.comprehension]) -> Iterator[Mutant]:
        for generator in generators:
            yield from self._unpacking(generator.target)
            yield from self._expression(generator.iter)
            for test in generator.ifs:
                yield from self._condition(test)

    # ---- neighbours and twins ----------------------------------------------------------------------------------------

    def _neighbours(self, elements: Sequence[ast.expr]) -> Iterator[Mutant]:
        for a, b in pairwise(elements):
            yield self._swap("swap", a, b)

    def _twins(self, node: ast.expr, name: str, place: int, known: set[str]) -> Iterator[Mutant]:
        twins = [name.replace(a, b) for one in TWINS for a, b in (one, one[::-1]) if a in name]
        if isinstance(node, ast.Attribute) and name in ATTRIBUTE_TWINS:
            twins.append(ATTRIBUTE_TWINS[name])
        for twin in twins:
            if twin in known and isinstance(getattr(node, "ctx", None), ast.Load):
                yield self._mutant(f"twin:{twin}", (place, place + len(name), twin.encode()))

    def _is_integer(self, node: ast.expr) -> bool:
        return _integer(node, self._integers[-1])


def _unordered(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions whose order nobody sees: searched with ``in``, put into a set or a dict, counted or summed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (side for op, side in zip(node.ops, node.comparators, strict=True) if isinstance(op, ast.In))
        elif isinstance(node, (ast.DictComp, ast.SetComp)):
            yield from (generator.iter for generator in node.generators)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in UNORDERED and node.args:
                yield node.args[0]
                if isinstance(node.args[0], ast.GeneratorExp):
                    yield from (generator.iter for generator in node.args[0].generators)


def _one_at_most(node: ast.Slice) -> bool:
    """Whether a slice is the first element, if there is one."""
    return node.lower is None and isinstance(node.upper, ast.Constant) and node.upper.value == 1


def _equal(one: ast.expr, other: ast.expr) -> bool:
    """Whether two literals are equal, as ``1`` and ``True`` are."""
    return isinstance(one, ast.Constant) and isinstance(other, ast.Constant) and one.value == other.value


def _arguments(node: ast.FunctionDef | ast.Lambda) -> set[str]:
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _integer(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is plainly an integer."""
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.Name(id=name):
            return name in names
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _integer(operand, names)
        case ast.BinOp(op=op, left=left, right=right):
            arithmetic = isinstance(op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod))
            return arithmetic and (_integer(left, names) or _integer(right, names))
        case ast.Call(func=ast.Name(id="len")):
            return True
    return False


def _integer_names(node: ast.FunctionDef) -> set[str]:
    """Names that hold integers: so annotated, counted by ``range`` or ``enumerate``, or computed from such."""
    names = {a.arg for a in node.args.args if isinstance(a.annotation, ast.Name) and a.annotation.id == "int"}
    counted: Callable[[ast.expr], str] = lambda it: (  # noqa: E731
        it.func.id if isinstance(it, ast.Call) and isinstance(it.func, ast.Name) else ""
    )
    for child in ast.walk(node):
        if isinstance(child, (ast.For, ast.comprehension)):
            called, target = counted(child.iter), child.target
            if called == "enumerate" and isinstance(target, ast.Tuple):
                target = target.elts[0]
            if called in ("range", "enumerate") and isinstance(target, ast.Name):
                names.add(target.id)
        elif isinstance(child, ast.Assign):
            pairs = [(child.targets[0], child.value)]
            if isinstance(child.targets[0], ast.Tuple) and isinstance(child.value, ast.Tuple):
                pairs = list(zip(child.targets[0].elts, child.value.elts, strict=False))
            names |= {t.id for t, v in pairs if isinstance(t, ast.Name) and _integer(v, names)}
    return names
