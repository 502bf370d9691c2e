"""The client for threads is what `api/generate_client.py` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parents[3] / "api/generate_client.py"


def test_generating_the_client_again_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
