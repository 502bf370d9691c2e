"""Text of users keeps its letters and loses what a terminal would obey."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.printing.terminal_text import coloured, harmless, one_line
from holdfast.formats import documents

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
STRINGS = (*(f"\x1b{letter}" for letter in "]PX^_"), *"\x9d\x90\x98\x9e\x9f")
SEQUENCES = {
    **dict.fromkeys(STRINGS, ("0;title", "\x9c")),
    **dict.fromkeys(("\x1b[", "\x9b"), ("0;1 ", "q")),
    "\x1b(": ("((", "B"),
}
"""Opener -> what may follow, and the end."""
TEXTS = st.text(
    st.one_of(st.characters(), st.sampled_from("\x1b\x9b\x9d\x90\x07[]m;0(\\\u202e\n\t\r"))
)


@given(TEXTS)
def test_no_text_reaches_the_terminal_as_an_order(text: str) -> None:
    assert not OBEYED.search(harmless(text))
    assert not re.search(f"{OBEYED.pattern}|[\n\t]", one_line(text))
    assert not OBEYED.search(COLOUR.sub("", coloured(text)))
    assert harmless(harmless(text)) == harmless(text)


@given(TEXTS)
def test_other_text_is_unchanged(text: str) -> None:
    plain = OBEYED.sub("", text)
    assert harmless(plain) == plain
    assert coloured(plain) == plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x07x", "x"),
        ("\x1bP1;2q\x1b\\x\x9b31my\x9d0;t\x9cz", "xyz"),
        ("\x1b]0;without an end", "]0;without an end"),
        ("10%\x1b[A\x1b[2K20%\r", "10%20%"),
        ("two\n\tlines, ü ☃ 👩‍🔧", "two\n\tlines, ü ☃ 👩‍🔧"),
    ],
)
def test_whole_sequences_are_removed(text: str, shown: str) -> None:
    assert harmless(text) == shown


@pytest.mark.parametrize("opener", SEQUENCES)
def test_a_sequence_without_an_end_is_over_at_the_next_opener(opener: str) -> None:
    """So that a search for its end is: many openers take no quadratic time."""
    body, _ = SEQUENCES[opener]
    for after, (inner, end) in SEQUENCES.items():
        assert harmless(opener + body + after + inner + end).endswith(body)


def test_colours_of_a_program_end_with_its_line() -> None:
    assert coloured("a\x1b[8mb\x1b[2Jc") == "a\x1b[8mbc\x1b[0m"
    assert coloured("plain") == "plain"


@given(st.dictionaries(TEXTS, TEXTS))
def test_yaml_escapes_what_a_terminal_would_obey(document: dict[str, str]) -> None:
    readable = {
        re.sub("[\ud800-\udfff]", "", key): re.sub("[\ud800-\udfff]", "", text)
        for key, text in document.items()
    }
    text = documents.write_yaml(readable)
    assert not OBEYED.search(text)
    assert documents.read_yaml(text) == readable
