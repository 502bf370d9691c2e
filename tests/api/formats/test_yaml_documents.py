"""User documents: YAML that is refused with its place, and assignments."""

from __future__ import annotations

import pytest

from holdfast.formats import yaml_documents
from holdfast.formats.yaml_documents import DocumentError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "line 2: key 'c' is given twice"),
        ("a: &x [1]\nb: [*x, *x]", r"line 2: aliases \(\*x\)"),
        ("a:\n  - b\n c: 1", "line 3, column"),
        ("- a", "mapping"),
        ("1: a", "mapping"),
        ("", "mapping"),
        ("a: !!python/object/apply:os.system ['true']", "line 1"),
        ('{"a": ' * 60 + "1" + "}" * 60, "deeper than 50"),
        ("a: 2001-99-99", "not YAML"),
        (b"\xff\xff", "not YAML"),
    ],
)
def test_an_invalid_document_is_refused_with_its_place(text: str | bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        yaml_documents.read(text)


def test_assignments_override_and_create_sections() -> None:
    document = yaml_documents.read("train: {steps: 300}\nname: a")
    yaml_documents.set_path(document, "train.steps=60")
    yaml_documents.set_path(document, "train.optimizer.lr=3.0e-4")
    yaml_documents.set_path(document, "parallel={dp_shard: 2}")
    yaml_documents.set_path(document, "checkpoint.remote.uri=null")
    assert document == {
        "name": "a",
        "train": {"steps": 60, "optimizer": {"lr": 3.0e-4}},
        "parallel": {"dp_shard": 2},
        "checkpoint": {"remote": {"uri": None}},
    }
    for wrong in ("train.steps", "=1", "a..b=1", "name.x=1", "a=[1"):
        with pytest.raises(DocumentError):
            yaml_documents.set_path(document, wrong)
