"""A package of code on a real Ray node: an actor has it after each restart."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from holdfast_service.cluster.runtime_env import publish, with_code
from holdfast_service.services.code_packages import PREFIX

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture
def node() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local")
    yield
    ray.shutdown()


class CodeProbe:
    def inspect(self) -> tuple[int, str, str]:
        """The process id, the module's value, and the working directory."""
        module: Any = importlib.import_module("lib.mine")
        return os.getpid(), module.NAME, str(Path.cwd())


def test_a_restarted_actor_has_the_code(node: None) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as package:
        package.writestr("lib/__init__.py", "")
        package.writestr("lib/mine.py", "NAME = 'the very code'")
    content = target.getvalue()
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
    assert first[1] == "the very code"
