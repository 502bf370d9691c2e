"""The submit page: a spec is validated while it is typed, with faults at their lines; the files of
a script or function are sent from the browser."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from tests.support.service.live_server import LiveServer
from tests.support.waiting import DEADLINE_S
from tests.web.conftest import assert_no_violations, submitted

from holdfast.formats import code_archive

GOOD = """name: typed
train: {steps: 5, schedule: {name: constant, warmup_steps: 0}}
parallel: {dp_shard: 2, tp: 2}
resources: {workers_per_node: 2, standby_nodes: 1}
"""
BAD = GOOD.replace("tp: 2}", "tp: 3}").replace("steps: 5", "stepz: 5")
SCRIPT = """# mine
name: from-browser   # its name
script: old.py --lr 3e-4
parallel: {dp_shard: 2}
"""
MAX_CODE_BYTES = 2**16
FOLDER = {
    "train.py": "import model\n",
    "model.py": "def net(): ...\n" * 9,
    "lib/__init__.py": "",
    "lib/naïve loader.py": "x = 'ö'\n",
    "lib/.gitignore": "*.tmp\n!keep.tmp\n",
    "lib/scratch.tmp": "-",
    "lib/keep.tmp": "kept",
    ".holdfastignore": "/data/\n",
    ".env.example": "A=1\n",
    "data/corpus.bin": "-" * 999,
    "notes/data/kept.md": "kept",
    ".git/config": "-",
    "lib/__pycache__/model.pyc": "-",
}


def prepare_server(server: LiveServer) -> None:
    server.settings = server.settings.model_copy(update={"max_code_bytes": MAX_CODE_BYTES})


def wait_for_verdict(page: Any, text: str) -> None:
    page.locator(".validation-head", has_text=text).wait_for()


def test_faults_appear_at_their_lines_while_typing(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    wait_for_verdict(page, "ready to submit")  # the example
    field = page.get_by_role("textbox", name="Spec")
    field.fill(BAD)
    wait_for_verdict(page, "fault")
    faulty = page.locator(".editor-line.faulty .editor-number").all_inner_texts()
    assert faulty[:2] == ["2", "3"]
    assert page.locator(".wrong").first.inner_text() == "stepz"
    assert page.get_by_role("button", name="Submit", exact=True).is_disabled()
    page.locator(".validation li button", has_text="parallel.tp").first.click()
    selection = "field => field.value.slice(field.selectionStart, field.selectionEnd)"
    assert page.locator("textarea").evaluate(selection) == "tp"
    assert not httpx.get(f"{dashboard_server.address}/api/v1/jobs", timeout=DEADLINE_S).json()[
        "items"
    ]  # nothing was created


def test_an_unparsable_text_is_reported(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill("name: [unfinished\ntrain: {")
    wait_for_verdict(page, "cannot be parsed")


def test_the_field_at_the_cursor_is_explained(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill("train:\n  micro_batch: 4")
    page.locator(".hint", has_text="Samples per rank and forward pass").wait_for()
    assert "default 4" in page.locator(".hint").inner_text()


@pytest.mark.story("submit page")
def test_a_job_is_submitted_once(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill(GOOD)
    wait_for_verdict(page, "ready to submit")
    page.keyboard.press("Control+Enter")
    page.wait_for_url("**/jobs/*")
    jobs = httpx.get(
        f"{dashboard_server.address}/api/v1/jobs", params={"name": "typed"}, timeout=DEADLINE_S
    ).json()["items"]
    assert [job["id"] for job in jobs] == [page.url.rpartition("/")[2]]


def test_a_draft_is_kept_and_examples_replace_it(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill("name: draft")
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.wait_for_url("**/jobs")
    page.go_back()
    page.wait_for_function("() => document.querySelector('textarea')?.value === 'name: draft'")
    for index, (name, faults) in enumerate(
        {
            "stdlib-lm": [],
            "first-steps": [],
            "replicated": [],
            "my-script": ["code"],
            "my-function": ["code"],
            # What the cluster of this test does not have.
            "llama-gpu": [
                "data.source",
                "resources.cpus_per_worker",
                "resources.gpus_per_worker",
            ],
        }.items()
    ):
        page.get_by_label("Start from an example").select_option(str(index))
        page.wait_for_function(
            f"() => document.querySelector('textarea').value.includes('name: {name}')"
        )
        assert faulty_paths(dashboard_server, field.input_value()) == faults
        choice = page.locator(".validation").get_by_role("button", name="Choose a folder")
        expect(choice).to_have_count(int(faults == ["code"]))


def faulty_paths(server: LiveServer, text: str) -> list[str]:
    """The paths of the faults that the server finds in a spec."""
    address = f"{server.address}/api/v1/jobs/validate"
    headers = {"Content-Type": "application/yaml"}
    answer = httpx.post(address, content=text, headers=headers, timeout=DEADLINE_S).json()
    return [fault["path"] for fault in answer.get("faults") or []]


def test_json_is_a_spec_too(open_page: Callable[..., Any], dashboard_server: LiveServer) -> None:
    page = open_page(f"{dashboard_server.address}/submit")
    page.get_by_role("textbox", name="Spec").fill('{\n "name": "x",\n "train": {"steps": 0}\n}')
    wait_for_verdict(page, "1 fault")
    assert page.locator(".editor-line.faulty .editor-number").all_inner_texts() == ["3"]


def test_a_copy_contains_the_non_default_fields(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    job = submitted(dashboard_server, name="original")
    page = open_page(f"{dashboard_server.address}/submit?from={job}")
    page.wait_for_function("() => document.querySelector('textarea')?.value.includes('original')")
    text = page.get_by_role("textbox", name="Spec").input_value()
    assert "dp_shard: 2" in text
    assert "clip_grad_norm" not in text  # a default
    wait_for_verdict(page, "ready to submit")


def choose(page: Any, path: Path, name: str = "") -> None:
    """Choose a file or folder, and wait until the page shows it."""
    inputs = page.locator(".code-card input[type=file]")
    inputs.nth(1 if path.is_dir() else 0).set_input_files(path)
    expect(page.locator(".code-card strong")).to_have_text(name or path.name)


def stored_job(server: LiveServer, page: Any) -> tuple[dict[str, Any], zipfile.ZipFile]:
    """The spec of the job whose page is shown, and its code, as the server has them."""
    page.wait_for_url("**/jobs/*")
    with httpx.Client(base_url=f"{server.address}/api/v1", timeout=DEADLINE_S) as http:
        spec: dict[str, Any] = http.get(f"/jobs/{page.url.rpartition('/')[2]}").json()["spec"]
        return spec, zipfile.ZipFile(io.BytesIO(http.get(f"/code/{spec['code']}").content))


def members(package: zipfile.ZipFile) -> dict[str, tuple[bytes, int]]:
    return {
        entry.filename: (package.read(entry), entry.external_attr) for entry in package.infolist()
    }


def test_a_folder_is_sent_as_the_command_line_sends_it(
    open_page: Callable[..., Any], dashboard_server: LiveServer, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    for path, text in FOLDER.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill(SCRIPT)
    card, verdict = page.locator(".code-card"), page.locator(".validation")
    expect(verdict).to_contain_text("set `code` to the folder that contains it")
    choose(page, folder)
    expect(card).to_contain_text("9 files")
    expect(card).to_contain_text("the largest is model.py")
    expect(card.get_by_label("File to start")).to_have_value("train.py")
    card.get_by_text("4 files and folders left out").click()
    left_out = card.locator(".left-out li code")
    expect(left_out).to_have_text([".git/", "data/", "lib/__pycache__/", "lib/scratch.tmp"])
    assert_no_violations(page)
    expect(card).to_contain_text(f"Never sent: {', '.join(code_archive.ALWAYS_IGNORED)}.")
    card.get_by_label("File to start").select_option("model.py")
    expect(field).to_have_value(SCRIPT.replace("old.py", "model.py"))
    card.get_by_label("File to start").select_option("train.py")
    at = field.input_value().index("parallel")
    field.evaluate("(field, at) => field.setSelectionRange(at, at + 8)", at)
    verdict.get_by_role("button", name="Upload 9 files").click()
    wait_for_verdict(page, "ready to submit")
    selected = "field => field.value.slice(field.selectionStart, field.selectionEnd)"
    assert field.evaluate(selected) == "parallel", "the selection stays"
    code = field.input_value().partition("code: ")[2].partition("\n")[0]
    line = "script: train.py --lr 3e-4\n"
    expected = SCRIPT.replace("script: old.py --lr 3e-4\n", f"{line}code: {code}\n")
    assert field.input_value() == expected, "the rest stays as it was typed"
    page.get_by_role("button", name="Submit", exact=True).click()
    spec, package = stored_job(dashboard_server, page)
    assert (spec["code"], spec["script"]) == (code, ["train.py", "--lr", "3e-4"])
    by_command_line = zipfile.ZipFile(io.BytesIO(code_archive.pack(folder)))
    assert members(package) == members(by_command_line)


def test_a_job_waits_for_the_chosen_file_of_its_function(
    open_page: Callable[..., Any], dashboard_server: LiveServer, tmp_path: Path
) -> None:
    file = tmp_path / "spirals.py"
    file.write_text("def net():\n    ...\n\n\ndef main(ctx):\n    ...\n")
    page = open_page(f"{dashboard_server.address}/submit", viewport={"width": 390, "height": 844})
    field = page.get_by_role("textbox", name="Spec")
    field.fill("name: own-function\nfunction: train:main")
    wait_for_verdict(page, "ready to submit")  # `train` may be installed on the nodes
    card = page.locator(".code-card")
    expect(card).to_contain_text("the nodes must have the function already")
    choose(page, file)
    wait_for_verdict(page, "the chosen files are not uploaded")
    assert page.get_by_role("button", name="Submit", exact=True).is_disabled()
    function = card.get_by_label("Function to call")
    expect(function.locator("option")).to_have_text(["spirals:net", "spirals:main"])
    expect(function).to_have_value("spirals:main")
    assert_no_violations(page)
    card.get_by_role("button", name="Upload 1 file").press("Enter")
    wait_for_verdict(page, "ready to submit")
    expect(card).to_be_focused()
    page.get_by_role("button", name="Submit", exact=True).press("Enter")
    spec, package = stored_job(dashboard_server, page)
    assert spec["function"] == "spirals:main"
    assert package.read("spirals.py") == file.read_bytes()


def test_files_that_cannot_be_sent_are_refused_and_nothing_typed_is_lost(
    open_page: Callable[..., Any], dashboard_server: LiveServer, tmp_path: Path
) -> None:
    folder, picture = tmp_path / "large", tmp_path / "picture.png"
    folder.mkdir()
    (folder / "old.py").write_text("pass\n")
    (folder / "corpus.bin").write_bytes(random.Random(7).randbytes(2 * MAX_CODE_BYTES))
    picture.write_bytes(b"\x89PNG\0")
    page = open_page(f"{dashboard_server.address}/submit")
    field = page.get_by_role("textbox", name="Spec")
    field.fill(SCRIPT)
    card = page.locator(".code-card")
    choose(page, picture)
    expect(card.get_by_role("alert")).to_contain_text("picture.png is not a Python file (.py)")
    assert card.get_by_role("button", name="Upload 1 file").is_disabled()
    choose(page, folder)
    card.get_by_role("button", name="Upload 2 files").click()
    expect(card.get_by_role("alert")).to_contain_text(f"exceeds the limit of {MAX_CODE_BYTES}")
    expect(card.get_by_role("alert")).to_contain_text("by a .holdfastignore file")
    assert field.input_value() == SCRIPT
    dropped = """() => {
        const transfer = new DataTransfer();
        transfer.items.add(new File(["pass"], "old.py"));
        transfer.items.add(new File(["*.env"], ".gitignore"));
        transfer.items.add(new File(["KEY=1"], "secrets.env"));
        const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
        return ["dragover", "drop"].map(
            (kind) => document.querySelector("nav").dispatchEvent(new DragEvent(kind, options)),
        );
    }"""
    assert page.evaluate(dropped) == [False, False], "the browser does not open the file"
    expect(card.locator(".left-out li code")).to_have_text(["secrets.env"])
    card.get_by_role("button", name="Upload 2 files").click()
    wait_for_verdict(page, "ready to submit")
    assert field.input_value().replace(SCRIPT.partition("old.py")[0], "").startswith("old.py --lr")
