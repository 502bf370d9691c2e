"""`demo`: runs a job without and with faults, and compares the bits of the two runs."""

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
from holdfast_service import extras

EXAMPLE = "stdlib-lm.yaml"
REPEATED_SIGNAL_S = 2.0


def demo(
    *,
    spec: Annotated[
        Path | None, Parameter(help="Spec of another job; 4 ranks on 2 nodes fit.")
    ] = None,
    steps: Annotated[int | None, Parameter(help="Optimizer steps of each of the two runs.")] = 100,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="path.to.key=value, overrides the file."),
    ] = None,
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print the verdict as JSON.")
    ] = False,
) -> ExitCode:
    """Train a small language model twice on a local Ray cluster, with faults in the second run.

    SIGKILL ends one rank, and later the whole node of rank 0. The exit code is 0 only if both jobs
    succeed and every step of both has the same bits.
    """
    extras.require_server()
    from holdfast.demo import run  # late: it needs packages of the server
    from holdfast.demo.child_server import END_SIGNALS

    step_assignment = [] if steps is None else [f"train.steps={steps}"]
    document = read_spec(str(spec or _example()), [*step_assignment, *(set_ or [])])
    interruption = _Interruption()
    for number in END_SIGNALS:
        signal.signal(number, interruption)
    verdict = run.run(document, output.stderr() if json else output.console())
    if json:
        output.print_json(_plain(verdict))
    return ExitCode.OK if verdict.passed else ExitCode.JOB_FAILED


def _example() -> Path:
    """The example spec: in the installed package, or else in the repository."""
    package = Path(holdfast.__file__).parent
    for folder in (package / "demo", package.parents[1] / "examples"):
        if (folder / EXAMPLE).is_file():
            return folder / EXAMPLE
    raise UnreadableSpec(f"the example {EXAMPLE} is not installed; give a file with --spec")


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
    """Ends the demo with KeyboardInterrupt. A second signal within a short time is ignored; a later
    one counts again, because some of Python's callbacks lose an exception of a signal handler. The
    clean-up ignores all signals."""

    def __init__(self) -> None:
        self._raised = -REPEATED_SIGNAL_S

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised < REPEATED_SIGNAL_S:
            return
        self._raised = now
        output.stderr().print("interrupted; cleaning up")
        raise KeyboardInterrupt
