"""Removes what a job's dead agents left in the shared memory of a node.

Ray gets this function by value, so it runs on nodes without Holdfast, on which jobs may have run
code that their server sent: it uses the standard library only.
"""

from __future__ import annotations


def sweep_this_node(folder: str) -> None:
    """Remove this folder below `memory_base` (`holdfast_workers/memory/node_folder.py`)."""
    import contextlib
    import os
    import shutil
    from pathlib import Path

    base = Path(os.environ.get("HOLDFAST_SHM_ROOT", f"/dev/shm/holdfast-{os.getuid()}"))
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(base / folder)
