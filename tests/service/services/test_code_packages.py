"""A package of code on a real Ray node: an actor has it after each restart, and runs none of it."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import signal
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from holdfast_service.cluster.agent_actor import code_folder
from holdfast_service.cluster.runtime_env import publish, with_code
from holdfast_service.services.code_inspection import PREFIX

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
MARK = "USERS_CODE_RAN"
HOSTILE = f"import os\nos.environ['{MARK}'] = __name__\n"
"""A module that is imported because of its name."""


@pytest.fixture
def node() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local")
    yield
    ray.shutdown()


class CodeProbe:
    def inspect(self) -> tuple[int, str, str | None, bool]:
        """The process id, the folder of the code, the module of it that this process has imported,
        and whether it would import another."""
        mark = os.environ.get(MARK)
        return os.getpid(), code_folder(), mark, importlib.util.find_spec("mine") is not None


def packed(**modules: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as package:
        for name, text in modules.items():
            package.writestr(f"{name}.py", text)
        script = zipfile.ZipInfo("lib/run.sh")
        script.external_attr = (stat.S_IFREG | 0o755) << 16
        package.writestr(script, "#!/bin/sh\n")
    return target.getvalue()


def test_a_restarted_actor_has_the_code_and_its_process_imports_none_of_it(node: None) -> None:
    content = packed(mine="NAME = 'the very code'", sitecustomize=HOSTILE, structlog=HOSTILE)
    code = PREFIX + hashlib.sha256(content).hexdigest()
    publish(code, content)
    publish(code, content)  # idempotent
    actor = ray.remote(CodeProbe).options(max_restarts=-1, max_task_retries=-1, **with_code(code))
    actor_handle = actor.remote()
    first = ray.get(actor_handle.inspect.remote(), timeout=120)
    os.kill(first[0], signal.SIGKILL)
    second = ray.get(actor_handle.inspect.remote(), timeout=120)  # Ray retries it after the restart
    assert first[0] != second[0]
    assert first[1:] == second[1:]
    _, folder, imported, found = first
    assert imported is None and not found
    assert (Path(folder) / "mine.py").read_text() == "NAME = 'the very code'"
    assert (Path(folder) / "lib" / "run.sh").stat().st_mode & 0o111
