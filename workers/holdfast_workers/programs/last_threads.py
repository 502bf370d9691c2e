"""Threads that keep the process of a program alive after the end of its main program.

The interpreter waits for them without a limit, in `threading._shutdown`: a thread that waits for
ever makes a program that has finished look like one that hangs.
"""

from __future__ import annotations

from holdfast_workers.progress import inspection

SHOWN_FRAMES = 3
_SHUTDOWN = "_shutdown (threading.py:"
_COLLECTIVES = "torch/distributed/"


def remaining_threads(pid: int, timeout_s: float) -> str:
    """The threads that remain, with their innermost frames, for people; "" if the main program has
    not ended, if a thread is in a collective (then it trains), or if the process cannot be read."""
    stacks, _ = inspection.stacks_of(pid, timeout_s)
    main = next((stack for stack in stacks if stack.thread_id == pid), None)
    if main is None or not any(frame.startswith(_SHUTDOWN) for frame in main.frames):
        return ""
    others = [stack for stack in stacks if stack is not main and stack.frames]
    if any(_COLLECTIVES in file for stack in others for file in stack.files):
        return ""
    return "; ".join(
        f"thread {stack.name} at {' < '.join(stack.frames[:SHOWN_FRAMES])}" for stack in others
    )
