"""The zygote: imports everything, starts nothing, and forks processes on request.

A node agent starts `python -m holdfast_workers.child_programs.zygote FD AGENT_PID`. The zygote
reads its configuration from the control socket FD, imports torch and the job's recipe, prepares the
recipe (opens the data, does nothing that needs a world) and then serves `fork` requests. Each
request passes a control socket and a log pipe for the new process. The zygote never starts a
thread, touches no device and holds no state of the run: it may die at any time, and the workers go
on.

A *template* is a fork that has prepared everything that a worker of one rank needs, and then forks
workers for that rank as the zygote does: they start with all of it prepared.

Kinds of processes: `worker` (trains), `template`, `store` (hosts the rendezvous store), `saver`
(writes one shard of a remote checkpoint), `finalizer` (publishes a remote checkpoint), `tidier`
(removes those that are not kept), `preflight` (checks processor and devices).

Log events of all of them go to the log pipe; see `log_setup`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from holdfast_workers import log_setup
from holdfast_workers.ipc import control_channel, linux_processes

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

REPARENT_TIMEOUT_S = 5.0
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_log = structlog.get_logger()


def main() -> None:
    fd, agent_pid = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when the zygote ends
    linux_processes.name_process("hf-zygote")
    log_setup.configure()  # before the recipe is imported, which may configure structlog itself
    end = socket.socket(fileno=fd)
    with contextlib.suppress(control_channel.ControlClosed):  # the agent and its workers are gone
        config = control_channel.receive(end)
        try:
            recipe = _prepare(config)
        except Exception as error:
            control_channel.send(end, _failure(error))
            return
        threads = linux_processes.thread_count()
        control_channel.send(end, {"op": "ready", "pid": os.getpid(), "threads": threads})
        _serve(end, agent_pid, config, recipe)


def _prepare(config: dict[str, Any]) -> Recipe:
    """Import all that a worker will need, and prepare what needs no world."""
    for name in ONE_THREAD:  # before torch is imported: otherwise it starts a thread pool
        os.environ.setdefault(name, "1")
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    from holdfast_workers.child_programs import saver, store_host  # noqa: F401
    from holdfast_workers.protocol import codec
    from holdfast_workers.protocol.messages import JoinOrder
    from holdfast_workers.recipes import lookup
    from holdfast_workers.spec import TrainingSpec
    from holdfast_workers.worker import main as worker  # noqa: F401

    spec = TrainingSpec.model_validate(config["training"])
    recipe = lookup.make_recipe(spec, Path(config["cache_dir"]))
    recipe.prepare()
    codec.prepare(JoinOrder)
    gc.collect()
    gc.freeze()  # a worker's garbage collection would touch, and so copy, all these objects
    return recipe


def _failure(error: Exception) -> dict[str, Any]:
    return {
        "op": "failed",
        "type": type(error).__name__,
        "message": control_channel.shorten_middle(str(error)),
        "traceback": control_channel.shorten_middle(traceback.format_exc()),
    }


def _serve(end: socket.socket, agent_pid: int, config: dict[str, Any], recipe: Recipe) -> None:
    while True:
        request, fds = control_channel.receive_with_fds(end)
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
            _become(request, fds, agent_pid, config, recipe)
        os.close(writer)
        os.waitpid(middle, 0)
        pid = int(os.read(reader, 32) or b"0")
        os.close(reader)
        for descriptor in fds:
            os.close(descriptor)
        control_channel.send(end, {"op": "forked", "pid": pid})


def _become(
    request: dict[str, Any],
    fds: list[int],
    agent_pid: int,
    config: dict[str, Any],
    recipe: Recipe,
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
            os.environ.update(request.get("env", {}))
            end = socket.socket(fileno=control_fd)
            if request["kind"] == "template":
                code = _run_template(request, end, agent_pid, config, recipe)
            else:
                code = _run(request, end, config, recipe)
    except BaseException:
        _log.exception("the process failed", kind=request.get("kind"))
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
    request: dict[str, Any], end: socket.socket, config: dict[str, Any], recipe: Recipe
) -> int:
    from holdfast_workers.child_programs import saver, store_host
    from holdfast_workers.health import preflight
    from holdfast_workers.progress.beacon import Beacon
    from holdfast_workers.worker import main as worker

    kind = request["kind"]
    linux_processes.name_process(f"hf-{kind}")
    if kind == "worker":
        beacon = Beacon(Path(request["beacon"]))
        expected = worker.expected_world(request.get("expected"), config["device"])
        return worker.Worker(end, config, recipe, beacon, expected).run()
    if kind == "store":
        return store_host.run(end, request["host"])
    if kind == "saver":
        return saver.save(end, request, config["remote"])
    if kind == "finalizer":
        return saver.finalize(end, request, config["remote"])
    if kind == "tidier":
        return saver.tidy(end, request, config["remote"])
    if kind == "preflight":
        return preflight.run(end, request)
    raise ValueError(f"unknown kind of process: {kind}")


def _run_template(
    request: dict[str, Any],
    end: socket.socket,
    agent_pid: int,
    config: dict[str, Any],
    recipe: Recipe,
) -> int:
    """Prepare what a worker in the requested place needs, then fork such workers until the agent
    ends this process. A process that has threads, or could prepare nothing, answers `unfit`."""
    from holdfast_workers.worker import main as worker

    linux_processes.name_process("hf-template")
    place = worker.expected_world(request["expected"], config["device"])
    prepared = place is not None and recipe.expect(place)
    gc.collect()
    gc.freeze()
    if not prepared or linux_processes.thread_count() > 1:
        control_channel.send(end, {"op": "unfit"})
        return 0
    control_channel.send(end, {"op": "ready"})
    with contextlib.suppress(control_channel.ControlClosed):
        _serve(end, agent_pid, config, recipe)
    return 0


if __name__ == "__main__":
    main()
