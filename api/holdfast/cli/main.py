"""The `holdfast` program: commands, errors on stderr, exit codes (see `exit_codes`).

0 done, or the job succeeded; 1 the job failed; 2 wrong usage or spec; 3 not found; 4 conflict;
5 no server; 6 timeout; 7 the job was cancelled; 8 the server failed; 9 a fault of this
program; 130 interrupted.

A command's module is loaded when the command is called: `holdfast --help` loads none.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from cyclopts import App, CycloptsError, Group

EXIT_CODES = (
    "Exit codes: 0 done or job succeeded, 1 job failed, 2 wrong usage or spec, 3 not found, "
    "4 conflict, 5 no server, 6 timeout, 7 job cancelled, 8 server failed, "
    "9 fault of this program, 130 interrupted."
)
JOBS = Group("Jobs", sort_key=1)
SEEN = Group("What happened to a job", sort_key=2)
CLUSTER = Group("Server and cluster", sort_key=3)
SETUP = Group("Set up", sort_key=4)
HIDDEN = "_candidates"


@dataclass(frozen=True)
class Command:
    """A command, loaded when it is called. `where`: `<module below holdfast>:<function or App>`."""

    name: str
    where: str
    group: Group
    help: str


COMMANDS = (
    Command("submit", "cli.submit:submit", JOBS, "Submit a job, or only try its spec (--dry-run)."),
    Command("ls", "cli.jobs:ls", JOBS, "List jobs, newest first."),
    Command("top", "cli.top:top", JOBS, "Watch the jobs, or the ranks of one, live."),
    Command("wait", "cli.jobs:wait", JOBS, "Wait until a job has ended; exit as it did."),
    Command("pause", "cli.jobs:pause", JOBS, "Let a job save its state and give its nodes back."),
    Command("resume", "cli.jobs:resume", JOBS, "Let a paused job go on, with the same bits."),
    Command("cancel", "cli.jobs:cancel", JOBS, "End a job; its last state is saved before."),
    Command("describe", "cli.jobs:describe", SEEN, "Show a job in full."),
    Command("logs", "cli.feeds:logs", SEEN, "Print what the ranks wrote."),
    Command("events", "cli.feeds:events", SEEN, "Print the numbered events of a job."),
    Command(
        "incidents", "cli.incidents:incidents", SEEN, "List faults and what was done about them."
    ),
    Command("metrics", "cli.metrics:metrics", SEEN, "Plot loss and other series in the terminal."),
    Command("checkpoints", "cli.checkpoint:ls", SEEN, "List what a job can go on from."),
    Command("checkpoint", "cli.checkpoint:group", SEEN, "List, verify, pin, remove, export."),
    Command("inject", "cli.faults:inject", SEEN, "Break something of a job on purpose."),
    Command("serve", "cli.server:serve", CLUSTER, "Run the control plane in the foreground."),
    Command("nodes", "cli.node:ls", CLUSTER, "List the cluster's nodes."),
    Command("node", "cli.node:group", CLUSTER, "List nodes, set them aside, take them back."),
    Command(
        "demo", "demo.command:demo", CLUSTER, "Train twice, hurt the second run: the same bits."
    ),
    Command(
        "doctor", "cli.doctor:doctor", SETUP, "Check this machine and the server; say what to do."
    ),
    Command("login", "cli.config:login", SETUP, "Remember a server, and a token for it."),
    Command("config", "cli.config:group", SETUP, "Show what is set and by whom; choose a server."),
    Command(
        "completion", "cli.completion:completion", SETUP, "Print completion for bash, zsh, fish."
    ),
)


def build() -> App:
    app = App(
        name="holdfast",
        help="Elastic, fault-tolerant training as a service.",
        help_epilogue=EXIT_CODES,
        help_format="plaintext",
        version=_version,
        result_action="return_value",
    )
    for command in COMMANDS:
        app.command(
            f"holdfast.{command.where}", name=command.name, help=command.help, group=command.group
        )
    app.command("holdfast.cli.completion:complete", name=HIDDEN, show=False)
    return app


def run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    from holdfast.cli.exit_codes import ExitCode, of_error  # late: `--help` needs none of it
    from holdfast.errors import HoldfastError

    try:
        result = build()(arguments, exit_on_error=False, print_error=True)
    except CycloptsError:
        return ExitCode.USAGE
    except HoldfastError as error:
        from holdfast.cli import output

        output.print_error(error)
        return of_error(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        from holdfast.cli import output

        output.print_unforeseen(error)
        return ExitCode.UNFORESEEN
    return result if isinstance(result, int) else ExitCode.OK


def main() -> None:
    # httpx brings a program of its own, whose click and pygments would cost more than all of ours.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    sys.exit(run(sys.argv[1:]))


def _version() -> str:
    from importlib.metadata import version  # late: it is slow

    return version("holdfast")
