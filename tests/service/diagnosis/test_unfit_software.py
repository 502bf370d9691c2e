"""The error texts of a node lead to a sentence with what is missing and what to install."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.diagnosis.unfit_software import (
    MOST_CHARACTERS,
    cannot_load,
    import_fault,
    version_fault,
)

INSTALLED = {"structlog": "structlog==25.1.0", "PIL": "pillow==12.0.0"}
RAY = (
    "The actor died because of an error raised in its creation task, "
    "\x1b[36mray::NodeProbe.__init__()\x1b[39m (pid=7, ip=10.0.0.3)\n"
    "RuntimeError: The actor with name NodeProbe failed to import on the worker. This may be "
    "because needed library dependencies are not installed in the worker environment:\n\n"
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n{}\n'
)


@pytest.mark.parametrize(("message", "expected"), [(RAY, True), ("the task failed", False)])
def test_a_node_that_cannot_import_a_task_is_told_from_a_task_that_failed(
    message: str, *, expected: bool
) -> None:
    assert cannot_load(RuntimeError(message)) is expected


def explained(error: str, *, sends_code: bool = False) -> tuple[str, str, str]:
    fault = import_fault(
        error, sends_code=sends_code, requirement_of=lambda module: INSTALLED.get(module, "")
    )
    assert fault is not None
    return fault.what, fault.seen, fault.advice


@pytest.mark.parametrize("package", ["holdfast_service", "holdfast_workers"])
def test_a_node_without_holdfast_is_told_apart_and_both_remedies_are_named(package: str) -> None:
    text = RAY.replace("{}", f"ModuleNotFoundError: No module named '{package}'")
    what, seen, advice = explained(text)
    assert (what, "not installed" in seen) == ("holdfast", True)
    assert "pip install" in advice and "--send-own-code" in advice


@pytest.mark.parametrize(
    "error",
    [
        "ModuleNotFoundError: No module named 'holdfast_service.cluster.code_by_value'",
        "ImportError: cannot import name 'SOFTWARE' from 'holdfast_workers.protocol.findings'",
    ],
)
def test_a_node_with_another_holdfast_needs_the_servers_version(error: str) -> None:
    what, seen, advice = explained(RAY.replace("{}", error))
    assert what == "holdfast" and "cannot be imported" in seen
    assert "the server's version" in advice


def test_sent_code_that_is_damaged_is_not_blamed_on_an_installation() -> None:
    text = RAY.replace("{}", "ModuleNotFoundError: No module named 'holdfast_workers'")
    _, _, advice = explained(text, sends_code=True)
    assert "pip install" not in advice and "Ray's folder" in advice


@pytest.mark.parametrize("sends_code", [False, True])
def test_a_missing_requirement_is_named_with_the_servers_version(sends_code: bool) -> None:
    text = RAY.replace("{}", "ModuleNotFoundError: No module named 'structlog.stdlib'")
    what, seen, advice = explained(text, sends_code=sends_code)
    assert (what, seen) == ("packages", "Holdfast needs the module structlog.stdlib")
    assert "pip install 'structlog==25.1.0'" in advice
    image = explained("ModuleNotFoundError: No module named 'PIL'", sends_code=sends_code)
    assert "pip install 'pillow==12.0.0'" in image[2]
    unknown = explained("ModuleNotFoundError: No module named 'other'", sends_code=sends_code)
    assert "pip install 'other'" in unknown[2]


def test_the_last_import_error_counts_and_a_long_one_is_cut() -> None:
    text = (
        "ModuleNotFoundError: No module named 'structlog'\n\nDuring handling of this:\n\n"
        f"ImportError: libcudart.so: {'x' * 5000}"
    )
    what, seen, _ = explained(text)
    assert what == "packages" and "libcudart.so" in seen
    assert len(seen) < MOST_CHARACTERS + 50


@pytest.mark.parametrize(
    "error", ["", "MemoryError: no", "the node died", "KeyError: 'ImportError'"]
)
def test_other_errors_are_no_import_faults(error: str) -> None:
    assert import_fault(error, sends_code=False, requirement_of=lambda _: "") is None


@given(st.text(), st.booleans())
def test_any_text_is_read_without_an_error_and_every_fault_has_an_advice(
    text: str, sends_code: bool
) -> None:
    for error in (text, f"ImportError: {text}", f"No module named '{text}'"):
        fault = import_fault(error, sends_code=sends_code, requirement_of=lambda _: "")
        if re.match(r"ImportError: \w", error):
            assert fault is not None and fault.what and fault.seen and fault.advice


def test_another_python_or_ray_is_named_with_both_versions() -> None:
    here = {"python": "3.11", "ray": "2.60.0"}
    assert version_fault(here, dict(here)) is None
    for name, there in (("python", "3.12"), ("ray", "2.50.0")):
        fault = version_fault(here, {**here, name: there})
        assert fault is not None and fault.what == name
        assert there in fault.seen and here[name] in fault.seen and "install" in fault.advice
    unknown = version_fault(here, {})
    assert unknown is not None and "?" in unknown.seen
