"""Holdfast's own code on a real Ray cluster: kept as long as an actor needs it, passed on, and
published again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

PROGRAM = """
import time
import ray
from ray._private.runtime_env import packaging
from holdfast_service.cluster import runtime_env
from holdfast_service.cluster.sent_code import SentCode, packed

runtime_env.PINNED_S = 2  # longer than Ray takes to note a detached actor
ray.init(num_cpus=2, namespace="own", include_dashboard=False, log_to_driver=False,
         object_store_memory=80 << 20, _temp_dir=FOLDER)
probe = packed({"sent_probe.py": b"PLACE = __file__"})
code = SentCode("gcs://_ray_pkg_holdfast_test_1.zip", probe)
ours = runtime_env.OwnCode(code)


class Child:
    def place(self):
        import sent_probe
        return sent_probe.PLACE


class Parent:
    def __init__(self):
        options = {"lifetime": "detached", "name": "child", "num_cpus": 0, "max_restarts": -1}
        self.child = ray.remote(Child).options(**options, **runtime_env.with_code(None)).remote()

    def places(self):
        import sent_probe
        return [sent_probe.PLACE, ray.get(self.child.place.remote())]


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.1)


def started_again(child):
    try:
        return ray.get(child.place.remote(), timeout=60) == places[0]
    except ray.exceptions.RayError:
        return False


def is_stored():
    return packaging.package_exists(code.uri)


assert not is_stored()
parent = ray.remote(Parent).options(num_cpus=0, name="parent", lifetime="detached",
                                    **ours.options()).remote()
places = ray.get(parent.places.remote(), timeout=60)
assert len(set(places)) == 1 and "py_modules_files" in places[0], places
time.sleep(1.5 * runtime_env.PINNED_S)
ray.kill(parent)
time.sleep(1.0)  # only the child can keep it now
assert is_stored(), "a detached actor needs it"
child = ray.get_actor("child")
ray.kill(child, no_restart=False)
eventually(lambda: started_again(child))
ray.kill(child)
eventually(lambda: not is_stored())
ours.options()
assert is_stored(), "published again"
print("done")
ray.shutdown()
"""


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(150)
def test_the_code_is_kept_for_detached_actors_and_passed_on_by_them() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-own-", dir="/tmp") as folder:
        program = PROGRAM.replace("FOLDER", repr(folder))
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("done\n")
