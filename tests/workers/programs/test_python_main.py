"""A script that runs in a fork behaves as under the interpreter: same output, same exit code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RUN = """
import os, sys
from holdfast_workers.programs import python_main
def show(end):
    if isinstance(end, Exception):
        print("noted", type(end).__name__)
pid = os.fork()
if pid == 0:
    python_main.run(sys.argv[1:], show)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
SCRIPTS = {
    "arguments": "import sys; print(sys.argv, __name__, __file__, sys.path[0])",
    "a number as exit code": "import sys; sys.exit(3)",
    "a large exit code": "import sys; sys.exit(259)",
    "a text as exit code": "import sys; sys.exit('gone wrong')",
    "no exit code": "import sys; print('x'); sys.exit()",
    "a hard exit": "import os; os._exit(5)",
    "exit handlers": "import atexit; atexit.register(print, 'handler'); print('main')",
    "threads that are not daemons": """
        import threading, time
        def late():
            time.sleep(0.05)
            print("late", name)
        name = "a global"
        threading.Thread(target=late).start()
        print("main ends")
    """,
    "handlers that use globals": """
        import atexit
        value = 7
        @atexit.register
        def show():
            print(value)
    """,
    "a pool of processes": """
        from concurrent.futures import ProcessPoolExecutor
        def square(number):
            return number * number
        if __name__ == "__main__":
            with ProcessPoolExecutor(2) as pool:
                print(list(pool.map(square, range(4))))
    """,
    "spawned processes import the script": """
        import multiprocessing
        def work(queue):
            queue.put(("from", __name__))
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            print(queue.get(timeout=30))
            process.join()
    """,
    "pickled classes": """
        import pickle, sys
        class Point:
            pass
        print(type(pickle.loads(pickle.dumps(Point()))) is Point, sys.modules["__main__"].Point)
    """,
    "dataclasses with text annotations": """
        from __future__ import annotations
        import dataclasses, typing
        @dataclasses.dataclass
        class Sizes:
            width: int = 3
        print(Sizes(), typing.get_type_hints(Sizes))
    """,
    "standard input": "import sys; print(repr(sys.stdin.read()))",
    "its own folder": "import neighbour; print(neighbour.NAME)",
}


def run(folder: Path, *command: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_behaves_as_under_the_interpreter(tmp_path: Path, name: str) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'the neighbour'")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPTS[name]))
    forked = run(tmp_path, "-c", RUN, "script.py", "--lr", "3e-4")
    assert forked == run(tmp_path, "script.py", "--lr", "3e-4")


def test_a_module_behaves_as_under_the_interpreter(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print('main of', __package__)")
    (package / "train.py").write_text("import sys; from . import other; print(sys.argv[1:])")
    (package / "other.py").write_text("print(__name__)")
    for arguments in (["-m", "package.train", "--lr", "1"], ["-m", "package"]):
        assert run(tmp_path, "-c", RUN, *arguments) == run(tmp_path, *arguments)


def test_an_exception_is_printed_without_frames_of_the_launcher_and_noted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("def f():\n    raise KeyError('x')\n\n\nf()\n")
    code, output, error = run(tmp_path, "-c", RUN, "script.py")
    assert (code, output) == (1, "noted KeyError\n")
    assert error == run(tmp_path, "script.py")[2]
