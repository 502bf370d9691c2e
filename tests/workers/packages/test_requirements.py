"""What pip is told, and what is read from its answers."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.packages.requirements import (
    MAX_LINES,
    cause_of,
    fault_of,
    fixed_versions,
    folder_name,
    pins_of,
)


class Installed(metadata.Distribution):
    """A distribution by its name, version and needs."""

    def __init__(self, name: str, version: str, *needs: str) -> None:
        self._message = Message()
        self._message["Name"], self._message["Version"] = name, version
        self._needs = needs

    @property
    def metadata(self) -> Any:
        return self._message

    @property
    def requires(self) -> list[str]:
        return list(self._needs)

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


NODE = [
    Installed("Holdfast_Train", "0.2", "pydantic>=2", "torch ; extra == 'workers'", "mlflow"),
    Installed("pydantic", "2.9", "pydantic-core==2.1", "email-validator; extra == 'email'"),
    Installed("pydantic_core", "2.1"),
    Installed("torch", "2.13+cpu", "sympy", "colorama; sys_platform == 'win32'"),
    Installed("sympy", "1.13", "torch"),
    Installed("email-validator", "2.0"),
    Installed("transformers", "4.40"),
]


def test_what_holdfast_and_torch_need_stays_as_it_is_and_the_rest_may_change() -> None:
    assert fixed_versions(NODE) == {
        "holdfast-train": "0.2",
        "pydantic": "2.9",
        "pydantic-core": "2.1",
        "sympy": "1.13",
        "torch": "2.13+cpu",
    }


def test_where_holdfast_lies_as_files_everything_stays_as_it_is() -> None:
    assert set(fixed_versions(NODE[1:])) == {
        *("pydantic", "pydantic-core", "torch", "sympy", "email-validator", "transformers"),
    }


@pytest.mark.parametrize("good", ["einops", "einops>=0.8,<1", "x[y]==1; python_version>'3'"])
def test_a_requirement_is_accepted(good: str) -> None:
    assert fault_of(good) is None


@pytest.mark.parametrize("bad", ["", "-r other.txt", "--index-url x", "einops>>1", "a b", "a\nb"])
def test_what_is_no_requirement_is_named_with_an_example(bad: str) -> None:
    assert "is not a requirement such as 'einops>=0.8'" in (fault_of(bad) or "")


def entry(name: str, version: str, url: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {"name": name, "version": version}, "is_direct": bool(url)}
    return {**found, "download_info": {"url": url}} if url else found


def test_pins_are_exact_and_keep_direct_addresses() -> None:
    report = {"install": [entry("b", "2"), entry("A", "1.0"), entry("c", "3", "file:///c.whl")]}
    assert pins_of(report) == ("A==1.0", "b==2", "c @ file:///c.whl")
    assert pins_of({}) == ()


@given(st.dictionaries(st.from_regex(r"[a-zA-Z]{1,8}", fullmatch=True), st.just("1")), st.data())
def test_the_order_of_a_report_changes_no_folder(
    found: dict[str, str], data: st.DataObject
) -> None:
    entries = [entry(name, version) for name, version in found.items()]
    other = data.draw(st.permutations(entries))
    pins = [pins_of({"install": each}) for each in (entries, other)]
    assert {folder_name(each) for each in pins} == {folder_name(pins[0])}
    assert folder_name((*pins[0], "more==1")) != folder_name(pins[0])


CONFLICT = """Collecting torch==2.9.0
ERROR: Cannot install torch==2.9.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.9.0
    The user requested (constraint) torch==2.13.0+cpu

To fix this you could try to:
1. loosen the range of package versions you've specified
ERROR: ResolutionImpossible: for help visit https://somewhere
"""


def test_a_conflict_is_told_with_what_the_node_keeps() -> None:
    assert cause_of(CONFLICT).splitlines() == [
        "ERROR: Cannot install torch==2.9.0 because these package versions have conflicting "
        "dependencies.",
        "The conflict is caused by:",
        "The user requested torch==2.9.0",
        "The node keeps torch==2.13.0+cpu",
    ]


@given(st.lists(st.text("abc \t", max_size=20), max_size=40))
def test_a_cause_is_short_and_has_no_password(noise: list[str]) -> None:
    said = [*noise, "ERROR: no answer from https://name:secret@index.example/simple", *noise]
    cause = cause_of("\n".join(said))
    assert cause == "ERROR: no answer from https://***@index.example/simple"
    without_error = cause_of("\n".join(noise))
    assert len(without_error.splitlines()) <= MAX_LINES
