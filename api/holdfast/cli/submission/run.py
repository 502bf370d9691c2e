"""`run`: starts a program on the cluster from the command line that starts it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Group, Parameter

from holdfast.cli.common import LONG_RETRY_S, OPTIONS, SHORT_RETRY_S, NotUnderstood, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.submission.rank_output import RankOutput
from holdfast.cli.submission.submit import (
    UnreadableSpec,
    follow_job,
    print_resolved,
    print_suggestions,
)
from holdfast.errors import ServerUnreachable
from holdfast.formats import documents, launch_lines, requirements_file
from holdfast.formats.launch_lines import LaunchLine

if TYPE_CHECKING:
    from holdfast.client.synchronous.jobs import Client
    from holdfast_service.views.nodes import NodeView

TORCHRUN = Group("Accepted from torchrun", sort_key=90)


def _accepted(name: str) -> Parameter:
    return Parameter(name=(f"--{name}", f"--{name.replace('-', '_')}"), show=False, group=TORCHRUN)


@Parameter(name="*")
@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun without a meaning here: each gives a notice."""

    rdzv_backend: Annotated[str | None, _accepted("rdzv-backend")] = None
    rdzv_endpoint: Annotated[str | None, _accepted("rdzv-endpoint")] = None
    rdzv_id: Annotated[str | None, _accepted("rdzv-id")] = None
    rdzv_conf: Annotated[str | None, _accepted("rdzv-conf")] = None
    standalone: Annotated[bool, Parameter(name="--standalone", negative="", show=False)] = False
    max_restarts: Annotated[str | None, _accepted("max-restarts")] = None
    monitor_interval: Annotated[str | None, _accepted("monitor-interval")] = None
    node_rank: Annotated[str | None, _accepted("node-rank")] = None
    master_addr: Annotated[str | None, _accepted("master-addr")] = None
    master_port: Annotated[str | None, _accepted("master-port")] = None
    log_dir: Annotated[str | None, _accepted("log-dir")] = None

    @property
    def notices(self) -> tuple[str, ...]:
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        return tuple(launch_lines.notice(f"--{name.replace('_', '-')}") for name in given)


def run(
    *words: Annotated[
        str,
        Parameter(
            name="PROGRAM",
            allow_leading_hyphen=True,
            help="After --: train.py and its arguments, python or torchrun with theirs, or any "
            "other command.",
        ),
    ],
    nproc_per_node: Annotated[
        str | None,
        Parameter(name=("--nproc-per-node", "--nproc_per_node"), help="Ranks of a node; 1."),
    ] = None,
    nnodes: Annotated[
        str | None, Parameter(help="Nodes; 1. 1:4 is an elastic job on 1 to 4 nodes.")
    ] = None,
    gpus: Annotated[
        float | None,
        Parameter(help="GPUs of each rank; default: 1 if nodes of the cluster have any, else 0."),
    ] = None,
    name: Annotated[str | None, Parameter(help="Name of the job; default: the script's.")] = None,
    code: Annotated[
        bool, Parameter(help="Send the current folder with the job, but for ignored files.")
    ] = True,
    pip: Annotated[
        list[str] | None,
        Parameter(negative="", help="A package for the nodes, or a requirements file; repeat it."),
    ] = None,
    preload: Annotated[
        list[str] | None,
        Parameter(negative="", help="Module to import before the ranks are forked; repeat it."),
    ] = None,
    env: Annotated[
        list[str] | None,
        Parameter(negative="", help="NAME=TEXT, or NAME for its value here; repeat it."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", help="path.to.key=value of the spec; repeat it."),
    ] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Print the resolved spec, or its errors; create no job.")
    ] = False,
    follow: Annotated[bool, Parameter(help="Show the job until it has ended.")] = True,
    local: Annotated[
        bool,
        Parameter(negative="", help="Start a server on this machine, for this run only."),
    ] = False,
    data_dir: Annotated[
        Path | None,
        Parameter(help="With --local: where the run's folder is made; default: the cache folder."),
    ] = None,
    torchrun: TorchrunOptions = TorchrunOptions(),
    options: Options = OPTIONS,
) -> ExitCode:
    """Run a program as it is: `holdfast run --nproc-per-node 2 -- train.py --lr 3e-4`.

    Every rank gets the environment that torchrun sets; what runs under torchrun runs here. The exit
    code is the job's: 0 succeeded, 1 failed, 7 cancelled. Ctrl-C only ends the display: the job
    continues. With --local, Ctrl-C ends the program and everything that was started for it; output
    and files stay in the folder that is printed.
    """
    _check_place(options, local=local, data_dir=data_dir, follow=follow)
    folder = Path.cwd()
    line = launch_lines.combined(launch_lines.read(words, folder), nproc_per_node, nnodes)
    spec = launch_lines.spec_of(line, name=name)
    _complete(spec, line, folder=folder if code else None, gpus=gpus, preload=preload, env=env)
    _read_files(spec, pip or [], set_ or [])
    for text in (*torchrun.notices, *line.notices):
        output.progress(text)
    if not local:
        return _run_at_server(spec, options, dry_run=dry_run, follow=follow)
    return _run_here(spec, options, data_dir, dry_run=dry_run)


def _check_place(options: Options, *, local: bool, data_dir: Path | None, follow: bool) -> None:
    """Raises NotUnderstood."""
    if not local:
        if data_dir is not None:
            raise NotUnderstood("--data-dir is for --local: a server has its own data directory")
        return
    if options.address or options.context:
        raise NotUnderstood("--local starts a server of its own: leave out --address and --context")
    if not follow:
        raise NotUnderstood("--local ends with its job: --no-follow needs a server")


def _complete(
    spec: dict[str, Any],
    line: LaunchLine,
    *,
    folder: Path | None,
    gpus: float | None,
    preload: Sequence[str] | None,
    env: Sequence[str] | None,
) -> None:
    """Add what the options say. Raises UnreadableSpec, NotUnderstood."""
    if folder is not None:
        spec["code"] = str(folder)
        script = line.script[0] if line.script else "-m"
        if script != "-m" and not (folder / script).is_file():
            raise UnreadableSpec(f"there is no file {script} in {folder}, which is sent as code")
    if gpus is not None:
        spec["resources"]["gpus_per_worker"] = gpus
    if preload:
        modules = [module for given in preload for module in given.split(",") if module]
        spec["program"] = {"preload": modules}
    if env:
        spec["env"] = dict(map(_variable, env))


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        if name not in os.environ:
            raise NotUnderstood(f"--env {text}: it is not set here: write {text}=TEXT")
        value = os.environ[name]
    return name, value


def _read_files(spec: dict[str, Any], pip: Sequence[str], assignments: Sequence[str]) -> None:
    """Raises UnreadableSpec, RequirementsUnusable."""
    if pip:
        requirements = [word for given in pip for word in requirements_file.read_word(given)]
        spec["runtime_env"] = {"pip": requirements}
    try:
        for assignment in assignments:
            documents.set_path(spec, assignment)
    except documents.DocumentError as error:
        raise UnreadableSpec(f"--set: {error}") from error


def _choose_gpus(spec: dict[str, Any], nodes: Sequence[NodeView]) -> None:
    """Give each rank a GPU where the cluster has any, unless an option says how many."""
    resources = spec["resources"]
    if not isinstance(resources, dict) or resources.get("gpus_per_worker") is not None:
        return
    chosen = launch_lines.gpus_per_rank(node.gpus for node in nodes)
    resources["gpus_per_worker"] = chosen
    if chosen:
        output.progress("each rank gets a GPU, as the cluster has some: --gpus 0 for none")


def _share_cpus(spec: dict[str, Any], nodes: Sequence[NodeView]) -> None:
    """Let the ranks share the processors of this machine, however many there are."""
    resources = spec["resources"]
    if not isinstance(resources, dict) or resources.get("cpus_per_worker") is not None:
        return
    ranks = resources.get("workers_per_node")
    if isinstance(ranks, int):
        cpus = launch_lines.cpus_per_rank(ranks, (node.cpus for node in nodes))
        resources["cpus_per_worker"] = cpus


def _run_at_server(
    spec: dict[str, Any], options: Options, *, dry_run: bool, follow: bool
) -> ExitCode:
    with options.connect(LONG_RETRY_S if follow and not dry_run else SHORT_RETRY_S) as client:
        try:
            _choose_gpus(spec, _present(client))
            if dry_run:
                return print_resolved(client.validated(spec), options)
            job = client.submit(spec)
        except ServerUnreachable as error:
            raise ServerUnreachable(
                f"{error}; or run it without one: holdfast run --local -- ..."
            ) from error
        if follow:
            return follow_job(client, job, options, ranks=_output_of(client, spec, options))
        if not output.result(options, job):
            output.console().print(job.id)
        print_suggestions(job)
    return ExitCode.OK


def _run_here(
    spec: dict[str, Any], options: Options, data_dir: Path | None, *, dry_run: bool
) -> ExitCode:
    from holdfast.cli.submission import local_run

    nodes = launch_lines.nodes_of(spec)
    with local_run.local_server(nodes, str(spec["name"]), data_dir) as server:
        client, present = server.client, _present(server.client)
        _choose_gpus(spec, present)
        _share_cpus(spec, present)
        if dry_run:
            return print_resolved(client.validated(spec), options)
        with (server.folder / local_run.OUTPUT_LOG).open("w") as copy:
            job, ranks = client.submit(spec), _output_of(client, spec, options, copy)
            cancel = partial(local_run.cancel, client, ranks=ranks)
            code = follow_job(client, job, options, ranks=ranks, interrupted=cancel)
            if options.plain:  # no line was shown until now
                ranks(client.get(job.id))
            return code


def _present(client: Client) -> list[NodeView]:
    return [node for node in client.nodes() if node.there]


def _output_of(
    client: Client, spec: dict[str, Any], options: Options, copy: TextIO | None = None
) -> RankOutput:
    several = launch_lines.ranks_of(spec) != 1
    return RankOutput(client, several=several, copy=copy, shown=not options.plain)
