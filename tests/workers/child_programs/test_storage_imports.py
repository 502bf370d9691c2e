"""What the storage zygote imports: all that the processes forked from it use."""

from __future__ import annotations

import subprocess
import sys


def test_its_processes_import_nothing_that_it_has_not_imported() -> None:
    """After an upgrade on disk they would run two versions at once."""
    program = (
        "import sys; from holdfast_workers.child_programs import zygote;"
        "zygote._import_for_storage(); before = {*sys.modules};"
        "from holdfast_workers.child_programs import saver, token_fetcher;"
        "print(sorted({*sys.modules} - before))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
