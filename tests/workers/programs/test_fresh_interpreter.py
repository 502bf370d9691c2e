"""A script in a fork finds what it would find in an interpreter of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from holdfast_workers.programs import fresh_interpreter

DIFFERENT = {
    "name": "`ps` shows the rank",
    "modules": "those that the launcher has imported: a fork starts at once",
    "frozen": "the objects of these modules: collecting them would copy their memory",
    "group": "the program leads a process group, which ends with it",
    "encoding errors": "the log is UTF-8 in every locale, and no text ends a program",
    "filters": "those of modules that are imported already",
    "path": "without the second mention of a folder",
}
"""What differs, and why."""
SCRIPT = """
    import asyncio, atexit, builtins, faulthandler, gc, json, locale, logging, multiprocessing, os
    import resource, signal, sys, tempfile, threading, warnings

    def shown(stream):
        kinds = [type(stream).__name__, type(stream.buffer).__name__]
        return [*kinds, stream.name, stream.mode, stream.encoding, stream.line_buffering,
                stream.write_through]

    main = sys.modules["__main__"]
    fds = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]  # the last is that of the list
    lines = open("/proc/self/status").read().splitlines()
    values = {
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
                  sys.breakpointhook is sys.__breakpointhook__,
                  sys.unraisablehook is sys.__unraisablehook__,
                  threading.excepthook is threading.__excepthook__,
                  str([sys.gettrace(), sys.getprofile(), sys.get_asyncgen_hooks()])],
        "arguments": [sys.argv, sys.orig_argv[1:], sys.executable, sys.warnoptions],
        "flags": str(sys.flags),
        "path": list(dict.fromkeys(sys.path)),
        "main": [sorted(name for name in vars(main) if name[:2] == "__"), main.__file__,
                 str(main.__spec__), type(main.__loader__).__name__, str(main.__package__),
                 str(main.__cached__), main.__builtins__ is builtins],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "frozen": gc.get_freeze_count(),
        "signals": {str(number): str(signal.getsignal(number)).split(" at ")[0]
                    for number in sorted(signal.valid_signals())},
        "masks": [line for line in lines if line.startswith(("Sig", "Shd", "Umask", "NoNew"))],
        "wake up": signal.set_wakeup_fd(-1),
        "descriptors": [[fd, os.readlink(f"/proc/self/fd/{fd}").split(":")[0],
                         os.get_inheritable(fd), os.get_blocking(fd)] for fd in fds],
        "environment": dict(os.environ),
        "locale": locale.setlocale(locale.LC_ALL),
        "folders": [os.getcwd(), str(tempfile.tempdir)],
        "limits": {name: resource.getrlimit(getattr(resource, name))
                   for name in dir(resource) if name.startswith("RLIMIT_")},
        "threads": [[thread.name for thread in threading.enumerate()],
                    len(os.listdir("/proc/self/task")),
                    threading.main_thread().native_id == os.getpid(),
                    threading.main_thread().ident == threading.get_ident()],
        "faulthandler": faulthandler.is_enabled(),
        "multiprocessing": [str(multiprocessing.get_start_method(allow_none=True)),
                            multiprocessing.current_process().name,
                            str(multiprocessing.parent_process()),
                            multiprocessing.current_process().pid == os.getpid()],
        "asyncio": str(asyncio.events._event_loop_policy),
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable,
                    logging._warnings_showwarning is None],
        "filters": [str(entry) for entry in warnings.filters],
        "shows warnings": warnings.showwarning.__module__,
        "streams": [shown(sys.stdin), shown(sys.stdout), shown(sys.stderr)],
        "same streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__,
                         sys.stderr is sys.__stderr__],
        "encoding errors": [sys.stdin.errors, sys.stdout.errors, sys.stderr.errors],
        "limits of the interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(),
                                      threading.stack_size(), sys.getdlopenflags()],
        "group": os.getpgid(0) == os.getpid(),
        "name": open("/proc/self/comm").read(),
        "modules": len(sys.modules),
        "priority": [os.nice(0), sorted(os.sched_getaffinity(0))],
        "exit handlers": atexit._ncallbacks(),
    }
    print(json.dumps(values))
"""
LAUNCHER = """
    import gc, logging, os, random, select, signal, sys, tempfile
    from holdfast_workers.ipc import linux_processes
    from holdfast_workers.programs.program_process import ProgramLine, ProgramProcess

    # What the processes before it have done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect(), gc.freeze(), gc.disable()
    tempfile.gettempdir()
    sys.stdout = open(os.devnull, "w")
    linux_processes.become_subreaper()
    private = [os.open(os.devnull, os.O_RDONLY), os.dup(1)]
    variables = {name: value for name, value in os.environ.items() if name != "OF_THE_LAUNCHER"}
    line = ProgramLine(tuple(sys.argv[1:]), is_script=True, fork=True)
    process = ProgramProcess(
        line, variables, private, lambda: linux_processes.name_process("rank-0"), lambda _: None
    )
    read = b""
    os.set_blocking(process.output, True)
    while piece := os.read(process.output, 1 << 16):
        read += piece
    end = process.reap()
    os.write(1, read)
    os._exit(end.exit_code if end.exit_code is not None else 100 + end.signal)
"""


def outputs(folder: Path, script: str, **variables: str) -> list[tuple[int, str]]:
    """(exit code, output) of the script in a fork, and in an interpreter."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    forked = [sys.executable, "-c", textwrap.dedent(LAUNCHER), "script.py", "--lr", "1"]
    fresh = [sys.executable, "-u", "script.py", "--lr", "1"]
    found = []
    for command in (forked, fresh):
        own = {"OF_THE_LAUNCHER": "1"} if command is forked else {}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        found.append((done.returncode, done.stdout.decode()))
    return found


def test_a_fork_differs_from_an_interpreter_only_where_that_has_a_reason(tmp_path: Path) -> None:
    (code, forked), (_, fresh) = outputs(tmp_path, SCRIPT)
    assert code == 0, forked
    values: list[dict[str, Any]] = [json.loads(forked), json.loads(fresh)]
    different = {name for name in values[0] if values[0][name] != values[1][name]}
    unexpected = {name: [each[name] for each in values] for name in different - DIFFERENT.keys()}
    assert not unexpected


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_what_a_script_has_printed_is_out_however_it_ends(tmp_path: Path, end: str) -> None:
    script = f"""
        import os, sys
        print("a line")
        sys.stdout.buffer.write(b"no text \\\\xff|")
        print("without end", end="")
        {end}
    """
    (_, forked), (_, fresh) = outputs(tmp_path, script)
    assert forked.encode() == fresh.encode() != b""


def test_a_breakpoint_fails_at_once_and_visibly(tmp_path: Path) -> None:
    """As in an interpreter without a terminal."""
    forked, fresh = outputs(tmp_path, "x = 1\nbreakpoint()\nprint(x * 777)\n")
    assert forked == fresh
    assert forked[0] == 1
    assert "bdb.BdbQuit" in forked[1]
    assert "777\n" not in forked[1]


def test_forks_have_different_random_numbers() -> None:
    found: list[str] = []
    for _ in range(2):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            fresh_interpreter.restore(["script.py"])
            numbers = random.random(), float(numpy.random.rand()), float(torch.rand(1))
            os.write(writer, repr(numbers).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        found += os.read(reader, 1000).decode().strip("()").split(", ")
        os.close(reader)
        os.close(writer)
    assert len(set(found)) == 6
