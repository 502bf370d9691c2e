"""A requirements file on the user's machine becomes the list in the spec."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from holdfast.cli.submission.submit import read_spec
from holdfast.formats.requirements_file import (
    RequirementsUnusable,
    file_of_spec,
    read,
    with_requirements,
)

FILE = """\
# what the model needs
einops>=0.8  # for the attention
timm == 1.0.11 \\
    ; python_version > "3"

extra @ https://example.org/extra.whl#sha256=1
"""
READ = [
    "einops>=0.8",
    'timm == 1.0.11      ; python_version > "3"',
    "extra @ https://example.org/extra.whl#sha256=1",
]


def test_comments_and_empty_lines_are_left_out_and_lines_joined(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(FILE)
    assert read(tmp_path / "requirements.txt") == READ


@pytest.mark.parametrize("line", ["-r other.txt", "--index-url https://example.org"])
def test_an_option_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "wanted.txt").write_text(f"einops\n{line}\n")
    with pytest.raises(RequirementsUnusable, match=r"wanted.txt:2: .*PIP_INDEX_URL"):
        read(tmp_path / "wanted.txt")


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none.txt", "No such file"), ("binary", "is not text")):
        with pytest.raises(RequirementsUnusable, match=rf"runtime_env.pip: .*{name}: .*{why}"):
            read(tmp_path / name)


def test_the_command_line_reads_a_file_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("einops\n")
    spec = {"name": "x", "runtime_env": {"pip": "requirements.txt"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    found = read_spec(str(tmp_path / "job.yaml"), [])
    assert found["runtime_env"] == {"pip": ["einops"]}


def test_a_list_is_left_as_it_is() -> None:
    assert file_of_spec({"runtime_env": {"pip": ["einops"]}}) is None
    assert file_of_spec({}) is None
    spec = {"name": "x", "runtime_env": {"pip": "a.txt"}}
    assert file_of_spec(spec) == Path("a.txt")
    assert with_requirements(spec, ["b"]) == {"name": "x", "runtime_env": {"pip": ["b"]}}
    assert spec["runtime_env"] == {"pip": "a.txt"}
