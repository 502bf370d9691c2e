"""The files that supervisors of version 0.1 kept in the job's folder.

Later supervisors keep these numbers in the remote storage, where every node finds them. The server
reads the files once, when it starts a supervisor.
"""

from __future__ import annotations

import json
from pathlib import Path

from holdfast_service.job_model.supervisor_protocol import FormerNumbers

FENCE_FILE = "fence.json"
FAULTS_FILE = "faults-taken"


def former_numbers(job_dir: Path) -> FormerNumbers:
    """The numbers in the folder; 0 where a file is missing or damaged. Raises OSError if it cannot
    be read, which is not known to be the same."""
    try:
        fence = json.loads((job_dir / FENCE_FILE).read_text())
        epoch, attempt = int(fence["epoch"]), int(fence["attempt"])
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        epoch = attempt = 0
    try:
        fault = int((job_dir / FAULTS_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        fault = 0
    return FormerNumbers(epoch, attempt, fault)
