"""Becomes pip, and ends with the process that started it:
`python -m holdfast_workers.packages.pip_process <pid of that process> <arguments of pip>`.
"""

from __future__ import annotations

import os
import sys

from holdfast_workers.ipc.linux_processes import die_with_parent

PARENT_WAIT_S = 5.0


def main() -> None:
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if die_with_parent(parent, PARENT_WAIT_S):
        os.execv(sys.executable, [sys.executable, "-m", "pip", *arguments])


if __name__ == "__main__":
    main()
