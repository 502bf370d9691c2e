"""The `holdfast` program: commands, errors on stderr, exit codes (see `exit_codes`).

0 done, or the job succeeded; 1 the job failed; 2 wrong usage or spec; 3 not found; 4 conflict;
5 no server; 6 timeout; 7 the job was cancelled; 8 the server failed; 9 a bug of this program;
130 interrupted.

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
    "9 bug of this program, 130 interrupted."
)
JOBS = Group("Jobs", sort_key=1)
HISTORY = Group("History of a job", sort_key=2)
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
    Command(
        "submit",
        "cli.submission.submit:submit",
        JOBS,
        "Submit a job, or validate its spec (--dry-run).",
    ),
    Command(
        "run",
        "cli.submission.run:run",
        JOBS,
        "Run a program as it is: a script, torchrun's arguments.",
    ),
    Command("data", "cli.data:group", JOBS, "Prepare a job's data, and look at its samples."),
    Command("ls", "cli.jobs:ls", JOBS, "List jobs, newest first."),
    Command("top", "cli.top:top", JOBS, "Watch the jobs, or the ranks of one, live."),
    Command("wait", "cli.jobs:wait", JOBS, "Wait until a job has ended; exit with its result."),
    Command("pause", "cli.jobs:pause", JOBS, "Save a job's state and release its nodes."),
    Command("resize", "cli.jobs:resize", JOBS, "Order the size of an elastic job."),
    Command("resume", "cli.jobs:resume", JOBS, "Resume a paused job, bit for bit."),
    Command("restart", "cli.jobs:restart", JOBS, "Continue a job in new processes."),
    Command("cancel", "cli.jobs:cancel", JOBS, "Save a job's last state and end it."),
    Command("label", "cli.jobs:label", JOBS, "Set or remove labels of a job."),
    Command("priority", "cli.jobs:priority", JOBS, "Change the place of a job in the queue."),
    Command("remove", "cli.jobs:remove", JOBS, "Remove an ended job with its history."),
    Command("describe", "cli.jobs:describe", HISTORY, "Show a job in full."),
    Command("logs", "cli.feeds:logs", HISTORY, "Print the output of the ranks."),
    Command("events", "cli.feeds:events", HISTORY, "Print the numbered events of a job."),
    Command(
        "incidents", "cli.incidents:incidents", HISTORY, "List faults and the decisions about them."
    ),
    Command(
        "metrics", "cli.metrics:metrics", HISTORY, "Plot loss and other series in the terminal."
    ),
    Command("checkpoints", "cli.checkpoint:ls", HISTORY, "List the checkpoints of a job."),
    Command("checkpoint", "cli.checkpoint:group", HISTORY, "List, verify, pin, remove, export."),
    Command("verify", "cli.verify:verify", HISTORY, "Prove the bits of a job by a replay."),
    Command("inject", "cli.faults:inject", HISTORY, "Inject a fault into a job."),
    Command(
        "cluster",
        "cli.hosting.cluster:group",
        CLUSTER,
        "Start Ray on this machine; join or leave others.",
    ),
    Command("upgrade", "cli.upgrade:upgrade", CLUSTER, "Let running jobs use the server's build."),
    Command(
        "serve", "cli.hosting.server:serve", CLUSTER, "Run the control plane in the foreground."
    ),
    Command("backup", "cli.hosting.backup:backup", CLUSTER, "Back up database and keys to a file."),
    Command(
        "restore", "cli.hosting.backup:restore", CLUSTER, "Restore a backup into an empty database."
    ),
    Command("operations", "cli.operation:ls", HISTORY, "List verifications and exports."),
    Command("operation", "cli.operation:group", HISTORY, "List and cancel operations."),
    Command("nodes", "cli.node:ls", CLUSTER, "List the cluster's nodes."),
    Command("node", "cli.node:group", CLUSTER, "List nodes, cordon and uncordon them."),
    Command(
        "demo",
        "demo.command:demo",
        CLUSTER,
        "Train twice, with faults in the second run: the same bits.",
    ),
    Command("doctor", "cli.doctor:doctor", SETUP, "Check this machine and the server; advise."),
    Command("dashboard", "cli.dashboard:dashboard", JOBS, "Print a link that opens the dashboard."),
    Command("login", "cli.config:login", SETUP, "Store a server and a token for it."),
    Command(
        "config", "cli.config:group", SETUP, "Show the settings and their origin; choose a server."
    ),
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
    """Run a command line; returns its exit code."""
    from holdfast.cli.exit_codes import ExitCode, of_error  # late: `--help` does not need it
    from holdfast.errors import HoldfastError, ServerUnreachable

    try:
        result = build()(arguments, exit_on_error=False, print_error=True)
    except CycloptsError:
        return ExitCode.USAGE
    except HoldfastError as error:
        from holdfast.cli.printing import output

        output.print_error(error)
        if isinstance(error, ServerUnreachable):
            from holdfast.cli import own_servers

            output.progress(*own_servers.others_lines())
        return of_error(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        from holdfast.cli.printing import output

        output.print_unforeseen(error)
        return ExitCode.UNFORESEEN
    return result if isinstance(result, int) else ExitCode.OK


def main() -> None:
    # httpx has its own command line; its imports (click, pygments) cost more than all of these.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    sys.exit(run(sys.argv[1:]))


def _version() -> str:
    from importlib.metadata import version  # late: it is slow

    from holdfast_service.extras import DISTRIBUTION

    return version(DISTRIBUTION)
