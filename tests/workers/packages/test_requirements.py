"""The requirements that pip receives, and the reading of its reports."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_workers.packages.folders import folder_name
from holdfast_workers.packages.requirements import (
    MAX_LINES,
    UnstablePackage,
    cause_of,
    distributions_by_name,
    fault_of,
    fixed_versions,
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
    assert fixed_versions(distributions_by_name(NODE)) == {
        "holdfast-train": "0.2",
        "pydantic": "2.9",
        "pydantic-core": "2.1",
        "sympy": "1.13",
        "torch": "2.13+cpu",
    }


def test_where_holdfast_lies_as_files_everything_stays_as_it_is() -> None:
    assert set(fixed_versions(distributions_by_name(NODE[1:]))) == {
        *("pydantic", "pydantic-core", "torch", "sympy", "email-validator", "transformers"),
    }


@pytest.mark.parametrize("good", ["einops", "einops>=0.8,<1", "x[y]==1; python_version>'3'"])
def test_a_requirement_is_accepted(good: str) -> None:
    assert fault_of(good) is None


@pytest.mark.parametrize(
    "bad",
    [
        *("", "-r other.txt", "--index-url x", "einops>>1", "a b", "a\nb"),
        *(f"x @ https://h/x{split}--requirement=/secret" for split in "\n\r\x0b\x0c\x1c\x85\u2028"),
        *("x @ https://h/x\t", "x @ https://h/\0", "x @ https://h/\udc80", "x @ https://h/ä"),
        *("x @ https://h/${HOLDFAST_WEBHOOK_SECRET}", "x @ https://h/x\\"),
        *("x @ --requirement=/secret", "x; python_version > '3 --pre'", "x @ -e"),
    ],
)
def test_what_is_no_requirement_is_named_with_an_example(bad: str) -> None:
    assert "is not a requirement such as 'einops>=0.8'" in (fault_of(bad) or "")


def test_what_an_interrupted_pip_left_has_no_name_and_of_two_the_first_counts() -> None:
    nameless, second = Installed("", "1"), Installed("Torch", "1.0")
    assert fixed_versions(distributions_by_name([nameless, *NODE, second])) == fixed_versions(
        distributions_by_name(NODE)
    )


@pytest.mark.parametrize(
    "url",
    [
        *("https://me:word@example.org/x.whl", "https://token@example.org/x.whl"),
        *("git+https://token@example.org/x.git", "git+ssh://git:word@example.org/x.git"),
        *("//token@example.org/x.whl", "https://:word@[::1/x.whl"),
    ],
)
def test_credentials_in_an_address_are_refused(url: str) -> None:
    assert "has a user or a password" in (fault_of(f"x @ {url}") or "")


@given(st.text(), st.sampled_from(["{}", "x @ {}", "x; python_version > '{}'", "x[{}]", "x=={}"]))
def test_what_is_accepted_is_one_line_to_pip_and_no_option(text: str, form: str) -> None:
    requirement = form.format(text)
    if fault_of(requirement) is None:
        assert requirement.splitlines() == [requirement]
        assert not any(word.startswith("-") for word in requirement.split(" "))


def test_the_user_of_ssh_is_no_secret() -> None:
    assert fault_of("x @ git+ssh://git@example.org/x.git") is None


def entry(name: str, version: str, *needs: str, **source: Any) -> dict[str, Any]:
    """Of pip's installation report."""
    about = {"name": name, "version": version, "requires_dist": list(needs)}
    return {"metadata": about, "is_direct": bool(source), "download_info": source}


def pins(wanted: list[str], *new: dict[str, Any]) -> tuple[str, ...]:
    return pins_of({"install": list(new)}, wanted, distributions_by_name(NODE))


def test_pins_have_what_is_new_and_what_this_node_has_of_it_but_not_what_all_nodes_have() -> None:
    new = entry("A", "1.0", "transformers", "torch", "b; extra == 'more'", "c; python_version<'3'")
    assert pins(["a"], new) == ("A==1.0", "transformers==4.40")
    assert pins(["a[more]"], new, entry("b", "2")) == ("A==1.0", "b==2", "transformers==4.40")
    assert pins(["transformers"]) == ("transformers==4.40",)
    assert pins(["torch", "a; sys_platform == 'win32'"]) == ()


SHA = "a" * 64


@pytest.mark.parametrize("archive", [{"hashes": {"sha256": SHA}}, {"hash": f"sha256={SHA}"}])
def test_direct_addresses_are_pinned_to_the_bytes_that_were_found(archive: dict[str, Any]) -> None:
    """Else the same pin installs one version here and another there."""
    wheel = entry("c", "3", url="https://example.org/c.whl", archive_info=archive)
    sources = entry("e", "5", url="https://example.org/e.zip", archive_info=archive)
    sources["download_info"]["subdirectory"] = "python"
    vcs = {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}
    git = entry("d", "4", url="https://example.org/d.git", vcs_info=vcs)
    git["download_info"]["subdirectory"] = "python"
    wanted = [
        *("c @ https://example.org/c.whl", "d @ git+https://example.org/d.git@main"),
        "e @ https://example.org/e.zip#subdirectory=python",
    ]
    found = pins(wanted, wheel, git, sources)
    assert found == (
        f"c @ https://example.org/c.whl#sha256={SHA}",
        "d @ git+https://example.org/d.git@abc#subdirectory=python",
        f"e @ https://example.org/e.zip#subdirectory=python&sha256={SHA}",
    )
    assert not any(map(fault_of, found))  # a replay submits them


@pytest.mark.parametrize("info", [{"dir_info": {}}, {"archive_info": {"hashes": {"md5": "1"}}}, {}])
def test_an_address_whose_bytes_nobody_can_compare_is_refused(info: dict[str, Any]) -> None:
    with pytest.raises(UnstablePackage, match=r"c @ file:///c: other nodes cannot check"):
        pins(["c @ file:///c"], entry("c", "3", url="file:///c", **info))


@given(st.sets(st.from_regex(r"[a-z]{1,8}", fullmatch=True)), st.data())
def test_the_order_of_a_report_changes_no_folder(names: set[str], data: st.DataObject) -> None:
    given = data.draw(st.permutations(sorted(names)))
    found = pins(given, *(entry(name, "1") for name in reversed(given)))
    again = pins(sorted(names), *(entry(name, "1") for name in sorted(names)))
    assert folder_name(found) == folder_name(again)
    assert folder_name((*found, "more==1")) != folder_name(found)


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
    url = "https://name:s@cret@index.example/simple?key=secret#egg=x"
    cause = cause_of("\n".join([*noise, f"ERROR: no answer from {url}", *noise]))
    assert cause == "ERROR: no answer from https://***@index.example/simple?***#egg=x"
    without_error = cause_of("\n".join(noise))
    assert len(without_error.splitlines()) <= MAX_LINES
