"""`demo`: runs a job without and with faults, and compares the two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import holdfast
from holdfast.cli.common import Assignments
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.submission import interruption
from holdfast.cli.submission.submit import UnreadableSpec, read_spec
from holdfast_service import extras

EXAMPLE, STEPS = "stdlib-lm.yaml", 100
ELASTIC_EXAMPLE, ELASTIC_STEPS = "elastic-lm.yaml", 80


def demo(
    *,
    elastic: Annotated[
        bool, Parameter(negative="", help="A node is lost without a standby, and comes back.")
    ] = False,
    spec: Annotated[
        Path | None,
        Parameter(help="Spec of another job; 4 ranks on 2 nodes fit, with --elastic on 2 to 3."),
    ] = None,
    steps: Annotated[
        int | None,
        Parameter(help=f"Optimizer steps of each run; {STEPS}, with --elastic {ELASTIC_STEPS}."),
    ] = None,
    set_: Assignments = None,
    json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print the verdict as JSON.")
    ] = False,
) -> ExitCode:
    """Train a small language model twice on a local Ray cluster, with faults in the second run.

    SIGKILL ends one rank, and later the whole node of rank 0. The exit code is 0 only if both jobs
    succeed and every step of both has the same bits.

    With --elastic, SIGKILL ends a whole node that no standby replaces, and the node comes back. The
    exit code is 0 only if the job shrinks, grows and succeeds, and its steps read the samples and
    have the losses of a run without faults.
    """
    extras.require_server()
    from holdfast.demo import elastic_run, run  # late: they need packages of the server

    example = ELASTIC_EXAMPLE if elastic else EXAMPLE
    steps = steps or (ELASTIC_STEPS if elastic else STEPS)
    source = str(spec or _installed(example))
    document = read_spec(source, [f"train.steps={steps}", *(set_ or [])])
    interruption.install("interrupted; cleaning up")
    console = output.stderr() if json else output.console()
    verdict = elastic_run.run(document, console) if elastic else run.run(document, console)
    if json:
        output.print_json(verdict.plain())
    return ExitCode.OK if verdict.passed else ExitCode.JOB_FAILED


def _installed(example: str) -> Path:
    """An example spec: in the installed package, or else in the repository."""
    package = Path(holdfast.__file__).parent
    for folder in (package / "demo", package.parents[1] / "examples"):
        if (folder / example).is_file():
            return folder / example
    raise UnreadableSpec(f"the example {example} is not installed; give a file with --spec")
