"""Sites of a source text, and what a mutation changes in it."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mutation.mutants import Kind, apply, sites

OPERATORS = ["==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"]


def mutants(source: str, kind: Kind) -> list[str]:
    text = dedent(source).strip("\n")
    return [apply(text, site) for site in sites(text) if site.kind is kind]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_comparison_becomes_its_opposite(operator: str) -> None:
    (mutant,) = mutants(f"if a {operator} b: c = 1", Kind.COMPARISON)
    before, after = (ast.unparse(ast.parse(text)) for text in (f"a {operator} b", mutant))
    assert after.startswith("if a ") and before not in after
    assert mutants(mutant, Kind.COMPARISON) == [f"if a {operator} b: c = 1"], "and back"


def test_a_boundary_moves_by_its_equal_case_or_by_one() -> None:
    assert mutants("x = a < b", Kind.BOUNDARY) == ["x = a <= b"]
    assert mutants("x = a >= 3", Kind.BOUNDARY) == ["x = a > 3", "x = a >= 2", "x = a >= 4"]
    assert mutants("x = a == -1", Kind.BOUNDARY) == ["x = a == -2", "x = a == 0"]
    assert mutants("x = a[1:n]", Kind.BOUNDARY) == ["x = a[0:n]", "x = a[2:n]"]
    assert mutants("x = range(0, n)", Kind.BOUNDARY) == ["x = range(1, n)"]
    assert mutants("x = a[1], f(1), a + 1, a == True, a < 0x10", Kind.BOUNDARY) == [
        "x = a[1], f(1), a + 1, a == True, a <= 0x10"
    ]


def test_the_last_instant_of_a_clock_is_no_boundary() -> None:
    assert mutants("x = now < deadline", Kind.BOUNDARY) == []
    assert mutants("x = took_s > self.limit", Kind.BOUNDARY) == []
    assert mutants("x = took_s > 0", Kind.BOUNDARY) == ["x = took_s >= 0", "x = took_s > 1"]


def test_a_call_whose_result_is_unused_is_dropped() -> None:
    source = """
    async def f(self):
        await self.close(
            1,  # a comment
        )
        x = g()
        super().__init__()
        time.sleep(1)
        return h()
    """
    (mutant,) = mutants(source, Kind.DROPPED_CALL)
    assert mutant.splitlines()[1] == "    pass"
    assert ast.unparse(ast.parse(mutant)).count("(") == source.count("(") - 1


def test_two_simple_arguments_of_a_call_are_swapped() -> None:
    assert mutants("x = f(a, b.c, 1)", Kind.SWAPPED_ARGUMENT) == ["x = f(b.c, a, 1)"]
    assert mutants("x = f(one=a, two=b)", Kind.SWAPPED_ARGUMENT) == ["x = f(one=b, two=a)"]
    assert len(mutants("x = f(a, b, c)", Kind.SWAPPED_ARGUMENT)) == 3
    for same in (
        "f(a, a)",
        "f(a, g())",
        "f(a, one=b)",
        "f(*a, **b)",
        "max(a, b)",
        "isinstance(a, b)",
    ):
        assert mutants(f"x = {same}", Kind.SWAPPED_ARGUMENT) == [], same


@pytest.mark.parametrize(
    "source",
    [
        '"""a == b"""',
        "x: f(a, b)",
        "def f(x: g(a, b)) -> h(a, b): return x",
        "@decorate(a, b)\ndef f(): return 1",
        "@decorate(a, b)\nclass C: y = 1",
        "if TYPE_CHECKING:\n    f()",
        "if device.startswith('cuda'):\n    f()",
        "assert a == b",
        "raise Wrong(a, b)",
        "def __repr__(self): return f(a, b)",
        "x = f'{a == b}'",
        "self._log.info(a, b)",
        "log.warning('text', old=a, new=b)",
        "report(a, b)",
        "rank_log.log_start(a, b)",
        "warnings.simplefilter(a, b)",
        "def on_device(): return f(a, b)",
    ],
)
def test_what_cannot_be_seen_has_no_sites(source: str) -> None:
    assert sites(source, without=frozenset({"on_device"})) == []
    assert sites(source + "\nx = a == b", without=frozenset({"on_device"})), "what follows has"


def test_a_call_is_no_log_because_it_reports_or_adds_to_a_log() -> None:
    for call in (
        "self._report(a)",
        "judgement.report(a)",
        "self._log.append(a)",
        "log_sums.copy_(a)",
    ):
        assert mutants(call, Kind.DROPPED_CALL) == ["pass"], call


def test_positions_count_characters_and_comments_are_no_operators() -> None:
    assert mutants('x = "äöü€😀" == (  # is not in\n  b)', Kind.COMPARISON) == [
        'x = "äöü€😀" != (  # is not in\n  b)'
    ]
    assert mutants('x = f("é", a,\n  # kept\n  ß)', Kind.SWAPPED_ARGUMENT) == [
        'x = f("é", ß,\n  # kept\n  a)'
    ]


NAMES = st.sampled_from(["a", "self.b", "größe"])
LITERALS = st.sampled_from(["-2", "0", "3", '"é"', "None"])
EXPRESSIONS = st.recursive(
    NAMES | LITERALS,
    lambda inner: st.one_of(
        st.builds("({} {} \\\n  {})".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("f({}, {},\n  key={}, other={})".format, inner, NAMES, inner, NAMES),
        st.builds("a[{}:{}]".format, inner, inner),
    ),
    max_leaves=6,
)
STATEMENTS = st.builds(
    str.format,
    st.sampled_from(["x = {}", "g({})", "if {}: g(a); h()\nelse:\n\tg()  # é"]),
    EXPRESSIONS,
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(max_examples=40)
@given(st.lists(STATEMENTS, min_size=1, max_size=2).map("\n".join))
def test_a_mutant_compiles_and_differs_in_the_span_of_its_site_alone(source: str) -> None:
    for site in sites(source):
        mutant = apply(source, site)
        assert source[site.start : site.end] == site.original != site.replacement
        assert mutant[: site.start] == source[: site.start]
        assert mutant[site.start :] == site.replacement + source[site.end :]
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(source))
        assert site.line == source[: site.start].count("\n") + 1


def test_a_site_of_another_text_is_refused() -> None:
    (site,) = (site for site in sites("x = a == b") if site.kind is Kind.COMPARISON)
    with pytest.raises(ValueError, match="line 1 has changed"):
        apply("y = f(a) == b", site)


def test_a_description_shows_the_expression_on_one_line_and_shortened() -> None:
    (site,) = sites("x = (a ==\n   b)")
    assert site.description == "a == b -> a != b"
    longest = max(len(site.description) for site in sites(f"f('{'x' * 500}', {'a' * 99} == b)"))
    assert longest < 200
