"""The zygote: imports everything, starts nothing, and forks processes on request.

A node agent starts `python -m holdfast_workers.child_programs.zygote FD AGENT_PID`. The zygote
reads its configuration from the control socket FD, imports torch and the job's recipe, prepares the
recipe (opens the data, does nothing that needs a world) and then forks a process for each job. Each
job comes with a control socket and a log pipe for the new process. The zygote never starts a
thread, touches no device and holds no state of the run: it may die at any time, and the workers go
on.

Users' modules may start threads, whose locks would stay held in a child. So the zygote counts its
threads before each fork. If there are any of users' modules, it forks nothing and names the
modules; its agent replaces it by a zygote that leaves the recipe to the processes forked from it.

A *template* is a fork that has prepared everything that a worker of one rank needs, and then forks
workers for that rank as the zygote does: they start with all of it prepared.

Kinds of processes: `worker` (trains), `template`, `store` (hosts the rendezvous store), `saver`
(writes one shard of a remote checkpoint), `finalizer` (publishes a remote checkpoint), `tidier`
(removes those that are not kept), `loader` (loads one rank's state), `fetcher` (brings the job's
token sets to the node), `preflight` (checks processor and devices).

The *storage zygote* gets a `StorageZygoteConfig`: it imports no users' code and forks only savers,
finalizers, tidiers, loaders and fetchers, with the credentials of a bucket.

Log events of all of them go to the log pipe; see `log_setup`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import structlog

from holdfast_workers import build, log_setup
from holdfast_workers.ipc import control_channel, linux_processes
from holdfast_workers.ipc.thread_origins import ThreadOrigins
from holdfast_workers.ipc.visible_devices import VisibleDevices
from holdfast_workers.packages.folders import enter as enter_packages
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.answers import AgentFailure
from holdfast_workers.protocol.processes import (
    JOBS,
    WORKER_ORDERS,
    FetcherJob,
    FinalizerJob,
    Forked,
    FrozenCopy,
    Job,
    LoadOrder,
    PreflightJob,
    ProcessReady,
    RankPlace,
    StorageJob,
    StorageZygoteConfig,
    StoreJob,
    TemplateJob,
    TemplateUnfit,
    TidierJob,
    WorkerJob,
    ZygoteConfig,
)

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

REPARENT_TIMEOUT_S = 5.0
ARROW_WITHOUT_THREAD = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
"""The allocator of pyarrow, which Ray Train imports, starts a thread otherwise."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_log = structlog.get_logger()


def main() -> None:
    fd, agent_pid = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when the zygote ends
    linux_processes.name_process("hf-zygote")
    log_setup.configure()  # before the recipe is imported, which may configure structlog itself
    end = socket.socket(fileno=fd)
    with contextlib.suppress(control_channel.ControlClosed):  # the agent and its workers are gone
        config = control_channel.receive(end, StorageZygoteConfig, ZygoteConfig)
        recipe = None
        try:
            for name in ONE_THREAD:  # before torch is imported: otherwise it starts a thread pool
                os.environ.setdefault(name, "1")
            os.environ.setdefault(*ARROW_WITHOUT_THREAD)
            gc.disable()  # imports leave little garbage, and the search for it takes 0.4 s
            if isinstance(config, ZygoteConfig):
                _import_for_training()
                _choose_kernels(config)
                enter_packages(config.packages)
                _enter_code(_folder_of(config))
            else:
                _import_for_storage()
            gc.enable()
            threads = ThreadOrigins()
            if isinstance(config, ZygoteConfig) and config.imports_recipe:
                from holdfast_workers.data.corpus import DataUnavailable

                with contextlib.suppress(DataUnavailable):  # each worker waits, in its attempt
                    recipe = _prepare_recipe(config, threads)
            gc.collect()
            gc.freeze()  # a child's garbage collection would touch, and so copy, all these objects
        except Exception as error:
            control_channel.send(end, _failure(error))
            return
        control_channel.send(end, ProcessReady(build.LOADED))
        _serve(end, agent_pid, config, recipe, threads)


def _import_for_training() -> None:
    """Import all that a worker will need but the recipe."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    from holdfast_workers.child_programs import saver, store_host  # noqa: F401
    from holdfast_workers.programs import launcher  # noqa: F401
    from holdfast_workers.recipes import lookup  # noqa: F401
    from holdfast_workers.worker import main as worker  # noqa: F401

    codec.prepare(*WORKER_ORDERS, *WorkerJob.answers)


def _choose_kernels(config: ZygoteConfig) -> None:
    from holdfast_workers.training.determinism import choose_kernels

    spec = config.plan.spec
    if not spec.brings_program:  # one chooses itself, as under torchrun
        choose_kernels(spec.train.deterministic, config.device)


def _import_for_storage() -> None:
    """Import all that the processes need that reach the storage of checkpoints."""
    linux_processes.name_process("hf-storage")
    from holdfast_workers.checkpoint import s3  # noqa: F401
    from holdfast_workers.child_programs import saver, token_fetcher  # noqa: F401


def _folder_of(config: ZygoteConfig) -> str:
    """The folder in which users' code runs; a program runs in a copy, in which it may write
    files."""
    from holdfast_workers.programs.working_folder import working_folder

    spec = config.plan.spec
    if not config.code or not (spec.brings_program or spec.script is not None):
        return config.code
    return working_folder(config.code, config.cache_dir, config.plan.job_id)


def _enter_code(folder: str) -> None:
    """Make users' code importable, here and in the programs that it starts."""
    if not folder:
        return
    os.chdir(folder)
    sys.path.insert(0, folder)
    paths = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{paths}" if paths else folder


def _prepare_recipe(config: ZygoteConfig, threads: ThreadOrigins | None = None) -> Recipe | None:
    """Import the recipe, and prepare what needs no world; of a program, only what it preloads:
    None. Raises DataUnavailable."""
    spec = config.plan.spec
    if spec.brings_program:
        with threads.recording("preload") if threads is not None else contextlib.nullcontext():
            for name in spec.preloaded:
                importlib.import_module(name)
        return None
    subject = spec.function_name or spec.recipe
    with threads.recording(subject) if threads is not None else contextlib.nullcontext():
        recipe = _make_recipe(config)
        recipe.prepare()
    return recipe


def _make_recipe(config: ZygoteConfig) -> Recipe:
    """Import the recipe, without its data."""
    from holdfast_workers.recipes import lookup

    return lookup.make_recipe(config.plan.spec, Path(config.cache_dir))


def _failure(error: Exception) -> AgentFailure:
    return AgentFailure(
        control_channel.shorten_middle(str(error)),
        type(error).__name__,
        control_channel.shorten_middle(traceback.format_exc()),
    )


def _serve(
    end: socket.socket,
    agent_pid: int,
    config: StorageZygoteConfig,
    recipe: Recipe | None,
    threads: ThreadOrigins,
) -> None:
    job: Job
    while True:
        job, fds = control_channel.receive_with_fds(end, *JOBS)
        if started_by := threads.started():
            for descriptor in fds:
                os.close(descriptor)
            control_channel.send(end, Forked(0, started_by))
            continue
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            try:
                child = os.fork()
            except OSError:  # no process can be forked: the answer is pid 0
                os._exit(1)
            if child:
                os.write(writer, str(child).encode())
                os._exit(0)
            os.close(reader)
            os.close(writer)
            end.close()
            _become(job, fds, agent_pid, config, recipe)
        os.close(writer)
        os.waitpid(middle, 0)
        pid = int(os.read(reader, 32) or b"0")
        os.close(reader)
        for descriptor in fds:
            os.close(descriptor)
        control_channel.send(end, Forked(pid))


def _become(
    job: Job,
    fds: list[int],
    agent_pid: int,
    config: StorageZygoteConfig,
    recipe: Recipe | None,
) -> None:
    """Run as the requested kind of process; never returns."""
    code = 1
    try:
        control_fd, log_fd = fds
        os.setsid()  # processes that it starts can be killed with it
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        sys.stdout, sys.stderr = _lines_to(1), _lines_to(2)
        if linux_processes.die_with_parent(agent_pid, REPARENT_TIMEOUT_S):
            linux_processes.allow_tracing(agent_pid)
            end = socket.socket(fileno=control_fd)
            linux_processes.name_process(f"hf-{job.process}")
            if isinstance(job, StorageJob):
                code = _run_storage(job, end, config)
            elif not isinstance(config, ZygoteConfig):
                raise ValueError("the storage zygote has no recipe")
            else:
                code = _run(job, end, agent_pid, config, recipe)
    except BaseException:
        _log.exception("the process failed", kind=job.process)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lines_to(descriptor: int) -> TextIO:
    """A text stream on `descriptor`. The agent reads UTF-8, whatever the locale; text that cannot
    be encoded must not end the process."""
    return open(
        descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


def _run(
    job: WorkerJob | TemplateJob | StoreJob | PreflightJob,
    end: socket.socket,
    agent_pid: int,
    config: ZygoteConfig,
    recipe: Recipe | None,
) -> int:
    from holdfast_workers.child_programs import store_host
    from holdfast_workers.health import preflight
    from holdfast_workers.programs.launcher import Launcher
    from holdfast_workers.progress.beacon import Beacon
    from holdfast_workers.worker import main as worker

    match job:
        case WorkerJob(beacon=beacon, env=env, launches=True):
            node_devices = VisibleDevices.of(os.environ).names
            os.environ.update(env)
            return Launcher(end, config, Beacon(Path(beacon)), node_devices).run()
        case WorkerJob(beacon=beacon, env=env, place=place):
            os.environ.update(env)
            _compute_with(config.plan.resources.threads_per_worker)
            is_prepared = recipe is not None
            recipe = _make_recipe(config) if recipe is None else recipe
            expected = worker.expected_world(place, config.device)
            beats = Beacon(Path(beacon))
            return worker.Worker(end, config, recipe, beats, expected, is_prepared).run()
        case TemplateJob(place=place):
            return _run_template(place, end, agent_pid, config, recipe)
        case StoreJob():
            return store_host.run(end, job)
        case PreflightJob():
            return preflight.run(end, job)


def _compute_with(threads: int) -> None:
    """Let torch compute with `threads` threads. Called in a worker, which forks no more."""
    import torch

    torch.set_num_threads(threads)
    for name in ONE_THREAD:
        os.environ[name] = str(threads)  # of programs that users' code starts


def _run_storage(job: StorageJob, end: socket.socket, config: StorageZygoteConfig) -> int:
    """Run a process that reaches the storage of checkpoints."""
    from holdfast_workers.child_programs import saver, token_fetcher

    match job:
        case FrozenCopy():
            return saver.save(end, job, config)
        case FinalizerJob(command=publication):
            return saver.finalize(end, publication, config)
        case TidierJob():
            return saver.tidy(end, job, config)
        case LoadOrder():
            return saver.load(end, job, config)
        case FetcherJob():
            return token_fetcher.run(end, job, config)


def _run_template(
    place: RankPlace,
    end: socket.socket,
    agent_pid: int,
    config: ZygoteConfig,
    recipe: Recipe | None,
) -> int:
    """Prepare what a worker in this place needs, then fork such workers until the agent ends this
    process. A process that has threads, or could prepare nothing, answers `TemplateUnfit`; so does
    one without a recipe, whose import is known to start threads, or whose data did not come."""
    from holdfast_workers.worker import main as worker

    world = worker.expected_world(place, config.device)
    if (
        recipe is None
        or world is None
        or not recipe.expect(world)
        or len(linux_processes.thread_ids()) > 1
    ):
        control_channel.send(end, TemplateUnfit())
        return 0
    gc.collect()
    gc.freeze()
    control_channel.send(end, ProcessReady())
    with contextlib.suppress(control_channel.ControlClosed):
        _serve(end, agent_pid, config, recipe, ThreadOrigins())
    return 0


if __name__ == "__main__":
    main()
