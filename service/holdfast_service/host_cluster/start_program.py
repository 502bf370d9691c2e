"""A child process that is `ray start`: its arguments are those, and Redis's password is read from
standard input, because any user of the machine can list arguments."""

from __future__ import annotations

import sys


def main() -> None:
    password = sys.stdin.read()
    from ray.scripts.scripts import start  # late: Ray reads its environment on import

    secret = [f"--redis-password={password}"] if password else []
    start.main([*sys.argv[1:], *secret], prog_name="ray start")


if __name__ == "__main__":
    main()
