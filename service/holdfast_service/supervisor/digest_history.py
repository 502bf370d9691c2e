"""The digests of the steps that are part of history. Pure.

Every node with ranks keeps the digests of the run and sends them at any time, also those of steps
that a later attempt has computed again with other bits. A digest is known one step after its step,
so a step may be part of history without one, while an older digest of it is still on its way.

A digest is that of the shards on one mesh. An attempt also sends that of the state which it starts
from: on another mesh than that which computed the state, it is not the digest of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice


@dataclass(frozen=True)
class _Beginning:
    """Where an attempt went on, and on which mesh."""

    attempt: int
    mesh: Mapping[str, int]
    restored_step: int
    restored_from: int
    """The attempt that computed the state, or that started from it too; 0: it is the first state
    of the job."""

    def computes_anew(self, step: int) -> bool:
        return self.restored_step < step or (self.restored_step == step and not self.restored_from)


@dataclass
class DigestHistory:
    _digests: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Step → the attempt that computed the digest, and the digest."""
    _beginnings: dict[int, _Beginning] = field(default_factory=dict)
    """The beginnings of attempts, by attempt."""
    _cuts: list[tuple[int, int]] = field(default_factory=list)

    def begin(
        self, attempt: int, mesh: Mapping[str, int], restored_step: int, restored_from: int
    ) -> None:
        """An attempt was formed. If its mesh, or the states that it starts from, can be others
        than those of earlier attempts, it computes later steps with other bits. `restored_from`:
        the attempt by which its state is known; 0: none has computed it."""
        self._beginnings[attempt] = _Beginning(attempt, mesh, restored_step, restored_from)
        self._forget_replaced()

    def cut(self, attempt: int, step: int) -> None:
        """Steps after `step` of this attempt and earlier ones were rolled back: they had bad data,
        or bad bits."""
        self._cuts.append((attempt, step))
        self._forget_replaced()

    def add(self, attempt: int, step: int, digest: str) -> None:
        """A digest that an attempt has computed. Those of two attempts that are kept are equal."""
        if self._is_kept(attempt, step):
            self._digests[step] = attempt, digest

    def up_to(self, last: int) -> dict[int, str]:
        """Step → digest."""
        return {step: digest for step, (_, digest) in self._digests.items() if step <= last}

    def forget_before(self, step: int) -> None:
        self._digests = {s: entry for s, entry in self._digests.items() if s >= step}

    def bound(self, limit: int) -> None:
        """Forget those that became known first, beyond `limit`."""
        for step in list(islice(self._digests, max(0, len(self) - limit))):
            del self._digests[step]

    def __len__(self) -> int:
        return len(self._digests)

    def _forget_replaced(self) -> None:
        self._digests = {
            step: (by, digest)
            for step, (by, digest) in self._digests.items()
            if self._is_kept(by, step)
        }

    def _is_kept(self, attempt: int, step: int) -> bool:
        if any(attempt <= cut and step > kept for cut, kept in self._cuts):
            return False
        begun = self._beginnings.get(attempt)
        if begun is not None and not self._is_own(begun, step):
            return False
        return not any(
            later.attempt > attempt
            and later.computes_anew(step)
            and (
                begun is None
                or later.mesh != begun.mesh
                or later.restored_step < begun.restored_step
            )
            for later in self._beginnings.values()
        )

    def _is_own(self, begun: _Beginning, step: int) -> bool:
        """Whether the attempt, or an earlier one on the same mesh, has computed the step."""
        by = begun
        while not by.computes_anew(step):
            earlier = self._beginnings.get(by.restored_from)
            if earlier is None or earlier.attempt >= by.attempt:
                return True  # not known, such as before a pause; its worker knows the mesh
            by = earlier
        return by.mesh == begun.mesh
