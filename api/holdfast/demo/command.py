"""`demo`: one job twice, undisturbed and with a rank and a node killed, and the same bits."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from cyclopts import Parameter

import holdfast
from holdfast.cli import output
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.submit import UnreadableSpec, read_spec

EXAMPLE = "stdlib-lm.yaml"
IMPATIENCE_S = 2.0


def demo(
    *,
    spec: Annotated[
        Path | None, Parameter(help="Another job than the example's; 4 ranks on 2 nodes fit.")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Optimizer steps of each of the two runs.")] = 100,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="path.to.key=value, over the file's own."),
    ] = None,
    json: Annotated[bool, Parameter(name="--json", negative="", help="Verdict on stdout.")] = False,
) -> ExitCode:
    """Train a small language model twice on a local Ray cluster and hurt the second run.

    One rank is killed by SIGKILL, later the whole node that holds rank 0. The exit code is 0 only
    if both jobs succeed and every step of the two has the same bits.
    """
    from holdfast.demo import run  # late: nothing else needs it
    from holdfast.demo.child_server import ENDING

    steps_set = [] if steps is None else [f"train.steps={steps}"]
    document = read_spec(str(spec or _example()), [*steps_set, *(set_ or [])])
    interruption = _Interruption()
    for number in ENDING:
        signal.signal(number, interruption)
    verdict = run.run(document, output.stderr() if json else output.console())
    if json:
        output.print_json(_plain(verdict))
    return ExitCode.OK if verdict.passed else ExitCode.JOB_FAILED


def _example() -> Path:
    """The example: in the package where it is installed, in the repository where it is not."""
    package = Path(holdfast.__file__).parent
    for folder in (package / "demo", package.parents[1] / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise UnreadableSpec(f"the example {EXAMPLE} is not installed; name a file by --spec")


def _plain(verdict: Any) -> dict[str, Any]:
    return {
        "passed": verdict.passed,
        "incidents": verdict.incidents,
        "jobs": [verdict.undisturbed.id, verdict.disturbed.id],
        "compared": [
            {"what": comparison.what, "steps": comparison.steps, "equal": comparison.equal}
            for comparison in verdict.comparisons
        ],
    }


class _Interruption:
    """Ends the demo by KeyboardInterrupt. An impatient second signal is the same one; a later one
    counts again, since an exception of a signal's handler is lost in some of Python's callbacks.
    The clean-up itself ignores them all."""

    def __init__(self) -> None:
        self._raised = -IMPATIENCE_S

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised < IMPATIENCE_S:
            return
        self._raised = now
        output.stderr().print("interrupted; cleaning up")
        raise KeyboardInterrupt
