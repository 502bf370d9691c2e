"""User documents: JSON and YAML that is refused with its place, fuzz, and assignments."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from tests.support.service.valid_specs import OWN_SETTINGS, TEXT

from holdfast.formats import documents
from holdfast.formats.documents import DocumentError
from holdfast_service.job_model.spec_document import MAX_DEPTH, MAX_VALUES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "line 2: key 'c' is given twice"),
        ("a: &x [1]\nb: [*x, *x]", r"line 2: aliases \(\*x\)"),
        ("a:\n  - b\n c: 1", "line 3, column"),
        ("- a", "mapping"),
        ("1: a", "line 1: key 1 is not text: write '1'"),
        ("a: {yes: 1}", "line 1: key yes is not text"),
        ("a: {1: b, c: d}", "line 1: key 1 is not text"),
        ("a:\n  ? [b]\n  : 1", "line 2: a key must be text"),
        ("a: {: 1}", "line 1"),
        ("", "mapping"),
        ("a: !!python/object/apply:os.system ['true']", "line 1: tags"),
        ("a: !!bool x", "line 1: tags"),
        ("a: !!timestamp x", "line 1: tags"),
        ('a: !!int ""', "line 1: tags"),
        ("a: !!map [1]", "line 1: tags"),
        ("a: !!set [1]", "line 1: tags"),
        ("! a: 1", "line 1: tags"),
        ("a: 0b_", "line 1: a number with too many digits, or none"),
        ("a: " + "9" * 5_000, "line 1: a number with too many digits"),
        ("a: 0x" + "f" * 100_000, "line 1: a number with too many digits"),
        ('a: "\\UFFFFFFFF"', "not YAML"),
        ('a: "\\U80000000"', "not YAML"),
        ("a: " + "[" * 1_000, f"deeper than {MAX_DEPTH}"),
        ("a: [" + "1, " * MAX_VALUES + "]", f"more than {MAX_VALUES}"),
        (b"\xff\xff", "not YAML"),
    ],
)
def test_invalid_yaml_is_refused_with_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        documents.read_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6: not JSON"),
        ("{a: 1}", "line 1, column 2: not JSON"),
        ("[]", "mapping"),
        ("", "line 1, column 1: not JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "not JSON"),
        ('{"a": ' * 60 + "1" + "}" * 60, f"deeper than {MAX_DEPTH}"),
        ('{"a": ' + "[" * 100_000, f"deeper than {MAX_DEPTH}"),
        (json.dumps({"a": [1] * MAX_VALUES}), f"more than {MAX_VALUES}"),
        (b"\xff\xff", "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
    ],
)
def test_invalid_json_is_refused_with_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        documents.read_json(text)


def test_only_plain_types_are_read_from_yaml() -> None:
    read = documents.read_yaml(
        "{a: 1:30, b: 1:1.5, c: 2001-12-14, d: 9999-12-31 23:59:59 -23:59, e: =, <<: {f: 0x1F}}"
    )
    assert read.pop("<<") == {"f": 31}
    assert list(read.values()) == ["1:30", "1:1.5", "2001-12-14", "9999-12-31 23:59:59 -23:59", "="]


def test_a_number_in_base_60_costs_no_more_than_its_length() -> None:
    text = "1" + ":1" * 100_000
    assert documents.read_yaml(f"a: {text}") == {"a": text}
    assert documents.read_yaml(f"a: {text}.5") == {"a": f"{text}.5"}


def test_both_formats_have_the_same_limits() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels > 1 else 1

    for accepted in (nested(MAX_DEPTH), {"a": [1] * (MAX_VALUES - 3)}):
        assert documents.read_json(json.dumps(accepted)) == accepted
        assert documents.read_yaml(json.dumps(accepted)) == accepted
    for refused in (nested(MAX_DEPTH + 1), {"a": [1] * (MAX_VALUES - 2)}):
        for read in (documents.read_json, documents.read_yaml):
            with pytest.raises(DocumentError):
                read(json.dumps(refused))


@given(OWN_SETTINGS, TEXT)
@example(1e-05, "1e5")
@example("a\u2028b", "\x85")
def test_any_value_survives_both_formats(value: Any, key: str) -> None:
    document = {"config": {key: value}}
    for written in (json.dumps(document), json.dumps(document, ensure_ascii=False)):
        assert documents.read_json(written) == document
        assert documents.read(written.encode()) == document
    for written in (yaml.safe_dump(document), documents.write_yaml(document)):
        assert documents.read_yaml(written) == document
        assert documents.read(written.encode()) == document


PIECES = [
    *"{}[]:,-?&*!|>'\"%@`#~<=._\\ \n\t\r\0\x85\ufeff\u2028\U0001f600",
    *(
        "a",
        "0",
        "9",
        "e",
        ": ",
        "- ",
        "? ",
        "\n  ",
        "\n---\n",
        "...\n",
        "%YAML 1.1\n",
        "%TAG ! !a\n",
    ),
    *(
        "!!bool ",
        "!!int ",
        "!!map ",
        "!!timestamp ",
        "!!omap ",
        "!<x> ",
        "&a ",
        "*a",
        "<<: ",
        "1:1",
    ),
    *(
        "yes",
        "null",
        ".inf",
        ".nan",
        "0x",
        "0b_",
        "0o7",
        "1_0",
        "-0.0",
        "1e999",
        "2001-01-01 1:1:1",
    ),
    *("\\u12", "\\UFFFFFFFF", "\\x", "\\ud800", "|-\n a", ">9\n", '{"a":', "true", "NaN", "1E5"),
]


@pytest.mark.parametrize("read", [documents.read_json, documents.read_yaml])
@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_read_or_refused(read: Callable[[bytes], Any], seed: int) -> None:
    chance = random.Random(seed)
    texts = [
        json.dumps({"a": [1, {"b": None}], "c": "\ud83d\ude00"}),
        "a: {b: [1, 'c']}\nd: |\n e\n",
    ]
    for _ in range(1_500):
        if chance.random() < 0.5:
            text = "".join(chance.choices(PIECES, k=chance.randint(1, 24)))
        else:
            cut = sorted(chance.choices(range(30), k=2))
            base = chance.choice(texts)
            text = base[: cut[0]] + "".join(chance.choices(PIECES, k=2)) + base[cut[1] :]
        raw = bytearray(text.encode("utf-8", "surrogatepass"))
        if chance.random() < 0.2:
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        try:
            found = read(bytes(raw))
        except DocumentError as error:
            assert str(error), f"seed {seed}: {raw!r}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {raw!r}") from error
        else:
            assert plain(found), f"seed {seed}: {raw!r}"


def plain(value: Any) -> bool:
    """Whether JSON can express the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or isinstance(value, str | bool | int | float) or math.isnan(value)


def test_assignments_override_and_create_sections() -> None:
    document = documents.read_yaml("train: {steps: 300}\nname: a")
    documents.set_path(document, "train.steps=60")
    documents.set_path(document, "train.optimizer.lr=3.0e-4")
    documents.set_path(document, "parallel={dp_shard: 2}")
    documents.set_path(document, "checkpoint.remote.uri=null")
    assert document == {
        "name": "a",
        "train": {"steps": 60, "optimizer": {"lr": 3.0e-4}},
        "parallel": {"dp_shard": 2},
        "checkpoint": {"remote": {"uri": None}},
    }
    for wrong in ("train.steps", "=1", "a..b=1", "name.x=1"):
        with pytest.raises(DocumentError):
            documents.set_path(document, wrong)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        *(("a: b", "a: b"), ("*x", "*x"), ("[1", "[1"), ("@x", "@x"), ("%d", "%d"), ("!a", "!a")),
        *(("#5", "#5"), ("a #5", "a #5"), ("a#5", "a#5"), ("1\nb: 2", "1\nb: 2")),
        *(("'a #5'", "a #5"), ("[1, 2] # two", [1, 2]), ("{a: '#'}", {"a": "#"})),
        *(("", None), ("3.0e-4", 3.0e-4), ("'5'", "5"), ("true", True)),
    ],
)
def test_an_assigned_value_is_read_whole_or_is_text(given: str, value: object) -> None:
    document: dict[str, object] = {}
    documents.set_path(document, f"value={given}")
    assert document == {"value": value}
