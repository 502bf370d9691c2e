"""The pages on brought programs show code of the examples, and valid jobs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from holdfast_service.job_model.job_spec import parse

ROOT = Path(__file__).parents[2]
PAGES = {
    "torchrun-scripts": ("ddp.py", "fsdp2.py", "failing.py"),
    "lightning": ("lightning_fit.py",),
    "transformers": ("transformers_fit.py",),
    "accelerate": ("accelerate_fit.py",),
}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / "bring" / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_is_that_of_its_example(page: str) -> None:
    scripts = [(ROOT / "examples" / "bring" / name).read_text() for name in PAGES[page]]
    shown = blocks(page, "python")
    assert shown
    assert [
        block for block in shown if not any(contains(script, block) for script in scripts)
    ] == []


def contains(script: str, block: str) -> bool:
    """Whether the lines are in the script, at any depth."""
    return any(textwrap.indent(block, " " * 4 * depth) in script for depth in range(4))


@pytest.mark.parametrize("page", PAGES)
def test_the_job_of_a_page_is_valid_and_runs_its_example(page: str) -> None:
    document, *further = (yaml.safe_load(block) for block in blocks(page, "yaml"))
    assert document.pop("code") == "examples/bring"
    for fields in ({}, *further):
        spec = parse({**document, **fields, "code": "sha256:" + "0" * 64}, None)
        assert spec.script is not None
        assert spec.script[0] in PAGES[page]


@pytest.mark.parametrize("name", sorted({name for names in PAGES.values() for name in names}))
def test_an_example_is_short_and_says_what_it_is(name: str) -> None:
    text = (ROOT / "examples" / "bring" / name).read_text()
    assert len(text.splitlines()) < 110
    assert textwrap.dedent(text).startswith('"""A script')
