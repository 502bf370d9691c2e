"""What a rank writes to its log unasked: from where it goes on, how its steps go, why it leaves.

Whoever opens the log of a job finds what any trainer prints, whether its program prints or not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from math import isfinite

from holdfast_workers.errors import complaint
from holdfast_workers.protocol.messages import ErrorKind, StepRow, Tier

STEPS_APART_S = 10.0
"""Between two steps that are told, at least; the first of an attempt and the last are always."""

_LONGEST = 300
_FROM = {
    Tier.OWN_RAM: "from its own memory",
    Tier.PARTNER_RAM: "from a partner's memory",
    Tier.RESHARD: "from memory, out of the parts of another mesh",
    Tier.REMOTE: "from remote storage",
}


class RankLog:
    """Of one rank in one attempt; `steps`: of the whole job."""

    def __init__(self, rank: int, attempt: int, mesh: Mapping[str, int], steps: int) -> None:
        self._rank = rank
        self._attempt = attempt
        self._mesh = mesh
        self._steps = steps
        self._told_at: float | None = None

    def joined(self, step: int, tier: Tier, phases_s: Mapping[str, float]) -> None:
        """It stands as after `step`, and will train."""
        axes = " x ".join(f"{name} {size}" for name, size in self._mesh.items() if size > 1)
        took = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases_s.items())
        goes_on = f"goes on after step {step} {_FROM[tier]}" if tier in _FROM else "begins"
        _info(f"attempt {self._attempt}: rank {self._rank} of {axes or 'one'} {goes_on} ({took})")

    def stepped(self, row: StepRow) -> None:
        """`row` was committed. Rank 0 tells it for all, if it is time again."""
        now = time.monotonic()
        early = self._told_at is not None and now - self._told_at < STEPS_APART_S
        if self._rank != 0 or (early and row.step != self._steps):
            return
        self._told_at = now
        _info(in_words(row))

    def done(self, step: int) -> None:
        _info(f"attempt {self._attempt}: done after step {step}")

    def fenced(self, step: int) -> None:
        _info(f"attempt {self._attempt}: fenced after step {step}; waits for the next attempt")

    def failed(self, step: int, kind: str, type_name: str, message: str, trace: str) -> None:
        """`kind`: an ErrorKind. What the program itself raised is told with its trace."""
        where = f"attempt {self._attempt}: left after step {step}"
        if kind == ErrorKind.COMMUNICATION:
            _say("WARNING", f"{where}: a peer does not answer ({complaint(message)[:_LONGEST]})")
            return
        first = message.partition("\n")[0][:_LONGEST]
        follows = f"\n{trace.rstrip()}" if kind in (ErrorKind.USER, ErrorKind.INTERNAL) else ""
        _say("ERROR", f"{where}: {type_name}: {first}{follows}")


def held(attempt: int, held_s: float) -> None:
    _say("WARNING", f"attempt {attempt}: held for {held_s:.1f} s, since no supervisor was heard")


def in_words(row: StepRow) -> str:
    """A step in a line; what is not known of it is left out."""
    figures = {
        "loss": f"{row.loss:.4f}" if isfinite(row.loss) else None,
        "grad norm": f"{row.grad_norm:.3f}" if isfinite(row.grad_norm) else None,
        "lr": f"{row.lr:.2e}",
        **{name: f"{value:.4g}" for name, value in row.own.items()},
    }
    told = [f"{name} {figure}" for name, figure in figures.items() if figure is not None]
    pace = [f"{row.step_time_s * 1e3:.0f} ms"]
    if row.tokens:
        pace.append(f"{row.tokens / row.step_time_s:,.0f} tokens/s")
    return "  ".join([f"step {row.step:>6}", *told, *pace])


def _info(words: str) -> None:
    _say("INFO", words)


def _say(level: str, words: str) -> None:
    # Who reads it is gone, and will end this process; or the program has closed its output.
    with contextlib.suppress(OSError, ValueError):
        print(f"{level:<7} {words}", flush=True)
