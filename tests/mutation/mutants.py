"""The places of a source text that can be mutated, and the text with one of them mutated. Pure.

A site is one span of characters and what replaces it; everything else keeps its formatting. A site
is left out where its mutation could not be seen: annotations, decorators, docstrings, messages
(logs, f-strings, raised errors, `__repr__`), asserts and blocks for type checkers; and where the
meaning would be the same: arguments of symmetric functions, the last instant of a clock, a pause.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, pairwise


class Kind(StrEnum):
    COMPARISON = "comparison"
    BOUNDARY = "boundary"
    DROPPED_CALL = "dropped call"
    SWAPPED_ARGUMENT = "swapped argument"


@dataclass(frozen=True)
class Site:
    """`original`, the characters from `start` to `end`, can become `replacement`."""

    kind: Kind
    line: int
    start: int
    end: int
    original: str
    replacement: str
    before: str
    """The expression around it, on one line and shortened."""
    after: str

    @property
    def description(self) -> str:
        return f"{self.before} -> {self.after}"


def sites(source: str, without: frozenset[str] = frozenset()) -> list[Site]:
    """All sites in the order of the text, none in a function whose name is in `without`."""
    finder = _Finder(_Text(source), without)
    finder.visit(ast.parse(source))
    return sorted(
        finder.found, key=lambda site: (site.start, site.end, site.kind, site.replacement)
    )


def apply(source: str, site: Site) -> str:
    """`source` with the mutation. Raises ValueError if the site is not of this text, SyntaxError if
    the result does not compile."""
    if source[site.start : site.end] != site.original:
        raise ValueError(f"line {site.line} has changed since the mutation was chosen")
    mutated = source[: site.start] + site.replacement + source[site.end :]
    compile(mutated, "<mutation>", "exec", dont_inherit=True)
    return mutated


OPPOSITES: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
NEIGHBOURS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
}
_NUMERIC: tuple[type[ast.cmpop], ...] = (ast.Eq, ast.NotEq, *NEIGHBOURS)

SYMMETRIC = frozenset(
    {"and_", "compare_digest", "gcd", "hypot", "isclose", "lcm", "logaddexp"}
    | {"max", "maximum", "min", "minimum", "or_", "suppress"}
)
"""Functions to which the order of arguments means nothing, by their last name."""
_TYPED = frozenset({"cast", "isinstance", "issubclass"})
"""Of whose arguments one is a type: the type checker sees them swapped, and nobody swaps them."""
_LOGS = frozenset({"log", "logger"})
_LOG_METHODS = frozenset(
    {"critical", "debug", "error", "exception", "info", "log", "setLevel", "warning"}
)
_PRINTERS = frozenset({"_print", "log", "print", "print_exc", "report"})
_NEVER_DROPPED = frozenset({"assert_never", "super().__init__", "time.sleep"})
"""Calls that are never made, whose absence breaks everything, or shows only in the machine's load.
(`asyncio.sleep` is no such call: it lets others run.)"""
_CLOCKS = frozenset({"deadline", "monotonic", "now", "perf_counter", "time", "until"})
_TEXT_METHODS = frozenset({"__repr__", "__str__"})

_OPERATOR = re.compile(
    r"#[^\n]*|(?P<operator>is\s+not\b|not\s+in\b|is\b|in\b|==|!=|<=|>=|<|>)", re.ASCII
)
_CONTEXT = 32
_LONGEST = 72


class _Text:
    """Offsets of the positions that ast gives, which count bytes of UTF-8."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def of(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def line_of(self, offset: int) -> int:
        return self.source.count("\n", 0, offset) + 1

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        in_line = column if text.isascii() else len(text.encode()[:column].decode())
        return self._starts[line - 1] + in_line


class _Finder(ast.NodeVisitor):
    def __init__(self, text: _Text, without: frozenset[str]) -> None:
        self.found: list[Site] = []
        self._text = text
        self._without = without

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in self._without | _TEXT_METHODS:
            return
        defaults = [default for default in node.args.kw_defaults if default is not None]
        self._visit_all([*node.args.defaults, *defaults, *node.body])

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Nothing: what is raised is a message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nothing: what it checks always holds."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nothing: a text, and before Python 3.12 its parts have no reliable positions."""

    def visit_If(self, node: ast.If) -> None:
        if _last_name(node.test) == "TYPE_CHECKING" or _asks_for_cuda(node.test):
            self._visit_all(node.orelse)
            return
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _is_message(call):
            if ast.unparse(call.func) not in _NEVER_DROPPED:
                self._add(Kind.DROPPED_CALL, self._text.span(node), "pass", node)
            self.visit(call)
        elif not isinstance(call, ast.Call):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_message(node):
            return
        name = _last_name(node.func)
        if name not in SYMMETRIC | _TYPED:
            self._add_swaps(node.args, node)
        self._add_swaps([keyword.value for keyword in node.keywords if keyword.arg], node)
        if name == "range":
            self._add_constants(node.args, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            self._add_constants([node.slice.lower, node.slice.upper], node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for (left, right), operator in zip(pairwise(operands), node.ops, strict=True):
            span = self._operator(left, right)
            self._add(Kind.COMPARISON, span, OPPOSITES[type(operator)], node)
            if type(operator) in NEIGHBOURS and not _is_of_clock(left, right):
                self._add(Kind.BOUNDARY, span, NEIGHBOURS[type(operator)], node)
        if all(isinstance(operator, _NUMERIC) for operator in node.ops):
            self._add_constants(operands, node)
        self.generic_visit(node)

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _operator(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """The span of the operator: between the operands are also parentheses and comments."""
        begin, end = self._text.span(left)[1], self._text.span(right)[0]
        for match in _OPERATOR.finditer(self._text.source, begin, end):
            if match["operator"]:
                return match.span()
        raise ValueError(f"line {left.lineno}: no operator between the operands")

    def _add_swaps(self, arguments: Sequence[ast.expr], call: ast.Call) -> None:
        simple = [argument for argument in arguments if _is_simple(argument)]
        for first, second in combinations(simple, 2):
            one, other = self._text.of(first), self._text.of(second)
            if ast.dump(first) == ast.dump(second):
                continue
            (start, first_end), (second_start, end) = map(self._text.span, (first, second))
            between = self._text.source[first_end:second_start]
            self._add(Kind.SWAPPED_ARGUMENT, (start, end), other + between + one, call)

    def _add_constants(self, operands: Sequence[ast.expr | None], shown: ast.expr) -> None:
        for operand in operands:
            value = _integer(operand)
            if operand is None or value is None or str(value) != self._text.of(operand):
                continue
            # From zero only upwards: one below is another sign, which few programs can meet.
            for changed in (value - 1, value + 1) if value else (1,):
                self._add(Kind.BOUNDARY, self._text.span(operand), str(changed), shown)

    def _add(
        self, kind: Kind, span: tuple[int, int], replacement: str, shown: ast.expr | ast.stmt
    ) -> None:
        start, end = span
        original = self._text.source[start:end]
        shown_start, shown_end = self._text.span(shown)
        prefix = _end_of(self._text.source[shown_start:start])
        suffix = _begin_of(self._text.source[end:shown_end], _CONTEXT)
        self.found.append(
            Site(
                kind,
                self._text.line_of(start),
                start,
                end,
                original,
                replacement,
                prefix + _begin_of(original, _LONGEST) + suffix,
                prefix + _begin_of(replacement, _LONGEST) + suffix,
            )
        )


def _place(site: Site) -> tuple[int, int, str, str]:
    return site.start, site.end, site.kind, site.replacement


def _last_name(node: ast.expr) -> str:
    """`c` of `c` and of `a.b.c`; "" for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _asks_for_cuda(test: ast.expr) -> bool:
    """Whether it is a test such as `device.startswith("cuda")`, false where the suites run."""
    return any(isinstance(node, ast.Constant) and node.value == "cuda" for node in ast.walk(test))


def _is_message(call: ast.Call) -> bool:
    """Whether the call writes a log, a warning or other output: by its name and its owner's."""
    name = _last_name(call.func)
    if name.startswith("log_"):
        return True
    if not isinstance(call.func, ast.Attribute):
        return name in _PRINTERS
    owner = _last_name(call.func.value).strip("_")
    if owner in {"logging", "traceback", "warnings"}:
        return True
    return owner in _LOGS and name in _LOG_METHODS


def _is_simple(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _integer(node: ast.expr | None) -> int | None:
    """The value of a literal whole number, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _is_of_clock(left: ast.expr, right: ast.expr) -> bool:
    """Whether two times are compared: that they are equal is a chance of one in millions. A literal
    can well be equal to a setting."""
    if isinstance(left, ast.Constant) or isinstance(right, ast.Constant):
        return False
    names = {
        _last_name(node)
        for side in (left, right)
        for node in ast.walk(side)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return any(name in _CLOCKS or name.endswith(("_s", "_at")) for name in names)


def _begin_of(text: str, longest: int) -> str:
    line = _on_one_line(text)
    return line if len(line) <= longest else line[: longest - 3] + "..."


def _end_of(text: str) -> str:
    line = _on_one_line(text)
    return line if len(line) <= _CONTEXT else "..." + line[3 - _CONTEXT :]


def _on_one_line(text: str) -> str:
    """With single spaces, also at its ends, where the text has spaces."""
    return re.sub(r"\s+", " ", text)
