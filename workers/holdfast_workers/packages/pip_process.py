"""Becomes another program, which ends with the process that started this one:
`python -m holdfast_workers.packages.pip_process <pid of that process> <program> <its arguments>`.
"""

from __future__ import annotations

import os
import sys

from holdfast_workers.ipc.linux_processes import die_with_parent

PARENT_WAIT_S = 5.0


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if die_with_parent(parent, PARENT_WAIT_S):
        os.execv(program[0], program)


if __name__ == "__main__":
    main()
