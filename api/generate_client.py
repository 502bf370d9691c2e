"""Generates the client for threads from the client for event loops.

`python api/generate_client.py` writes `holdfast/client/synchronous` from the modules of
`holdfast/client/asynchronous`: unasync drops `async` and `await` and replaces the names below, ruff
makes the result idiomatic and formats it. With `--check` it writes nothing, lists the files that
differ, and fails if there are any.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "api/holdfast/client/asynchronous"
TARGET = ROOT / "api/holdfast/client/synchronous"
HEADER = "# Generated from asynchronous/{} by api/generate_client.py: do not edit.\n"
RUFF = (sys.executable, "-m", "ruff")
REPLACED = {
    "AsyncClient": "Client",
    "AsyncJob": "Job",
    "AsyncJobs": "Jobs",
    "AsyncRequestMethods": "RequestMethods",
    "AsyncTransport": "Transport",
    "aclose": "close",
    "aiter_raw": "iter_raw",
    "aiter_sse": "iter_sse",
    "aiter_text": "iter_text",
    "aread": "read",
    "async_waiting": "waiting",
    "asynchronous": "synchronous",
}
"""Names that are replaced beside `__aenter__`, `AsyncIterator` and others that unasync itself
replaces."""
MADE_IDIOMATIC = "I,C416,UP028"
"""The order of imports; `list(x)` and `yield from x` instead of loops."""


def main(arguments: list[str]) -> int:
    differing = {
        path: text
        for path, text in generated().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in differing.items():
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} differs: run `python api/generate_client.py`")
        else:
            path.write_text(text)
    return int("--check" in arguments and bool(differing))


def generated() -> dict[Path, str]:
    """Path and content of each module for threads."""
    sources = sorted(path for path in SOURCE.glob("*.py") if path.name != "__init__.py")
    with tempfile.TemporaryDirectory() as folder:
        rule = unasync.Rule(f"{SOURCE}/", f"{folder}/", additional_replacements=REPLACED)
        unasync.unasync_files([str(path) for path in sources], [rule])
        return {
            TARGET / source.name: _finished(source, (Path(folder) / source.name).read_text())
            for source in sources
        }


def _finished(source: Path, text: str) -> str:
    name = ("--stdin-filename", str(TARGET / source.name), "-")
    fixes = ("--select", MADE_IDIOMATIC, "--fix", "--unsafe-fixes", "--quiet")
    header = HEADER.format(source.name)
    fixed = _output(*RUFF, "check", *fixes, *name, given=header + text)
    return _output(*RUFF, "format", "--quiet", *name, given=fixed)


def _output(*command: str, given: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
