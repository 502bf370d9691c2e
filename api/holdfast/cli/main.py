"""The `holdfast` program: commands, errors on stderr, exit codes (see `exit_codes`).

0 done, or the job succeeded; 1 the job failed; 2 wrong usage or spec; 3 not found; 4 conflict;
5 no server; 6 timeout; 7 the job was cancelled; 8 the server failed; 130 interrupted.
"""

from __future__ import annotations

import os
import sys

import stamina.instrumentation
from cyclopts import App, CycloptsError

from holdfast.cli import checkpoint, demo, faults, jobs, node, output, server
from holdfast.cli.exit_codes import ExitCode, of_error
from holdfast.errors import HoldfastError

EXIT_CODES = (
    "Exit codes: 0 done or job succeeded, 1 job failed, 2 wrong usage or spec, 3 not found, "
    "4 conflict, 5 no server, 6 timeout, 7 job cancelled, 8 server failed, 130 interrupted."
)


def build() -> App:
    app = App(
        name="holdfast",
        help="Elastic, fault-tolerant training as a service.",
        help_epilogue=EXIT_CODES,
        version_flags=[],
        result_action="return_value",
    )
    server.register(app)
    jobs.register(app)
    checkpoint.register(app)
    node.register(app)
    faults.register(app)
    demo.register(app)
    return app


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    stamina.instrumentation.set_on_retry_hooks([])  # retries are no output of a command
    try:
        result = build()(arguments, exit_on_error=False, print_error=True)
    except CycloptsError:
        return ExitCode.USAGE
    except HoldfastError as error:
        output.print_error(error)
        return of_error(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    return result if isinstance(result, int) else ExitCode.OK


def main() -> None:
    sys.exit(run(sys.argv[1:]))
