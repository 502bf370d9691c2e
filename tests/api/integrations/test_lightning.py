"""Lightning's entry points do nothing outside of Holdfast, in an installation without extras too;
a callback is tested with Lightning itself in tests/frameworks."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from tests.support.base_installation import ROOT, base_modules

OUTSIDE = """
import sys

present = {*sys.stdlib_module_names, *sys.argv[1].split()}


class BaseOnly:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in present and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(name)
        return None


sys.meta_path.insert(0, BaseOnly())
from holdfast.integrations import lightning

assert lightning.pytorch_lightning_callbacks() == lightning.lightning_callbacks() == []
"""


def test_the_entry_points_lead_to_functions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in ("pytorch_lightning.callbacks_factory", "lightning.pytorch.callbacks_factory"):
        module, _, name = project["entry-points"][group]["holdfast"].partition(":")
        assert callable(getattr(import_module(module), name))


@pytest.mark.seconds
def test_outside_of_holdfast_no_callback_is_added_and_torch_is_not_imported() -> None:
    present = " ".join([*base_modules(), "holdfast", "holdfast_workers"])
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, present],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
