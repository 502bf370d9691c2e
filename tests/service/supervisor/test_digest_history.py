"""Whatever the agents send again, and when: a reported digest is that of the step in history."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_service.supervisor.digest_history import DigestHistory

MESHES = ({"dp_shard": 4}, {"dp_shard": 3})


@dataclass
class Run:
    """What was computed: the bits after a step follow from the meshes of all steps up to it."""

    history: list[tuple[int, int]] = field(default_factory=list)
    """Of each step: the mesh on which, and the attempt by which it was computed."""
    starts: dict[int, list[int]] = field(default_factory=dict)
    """Step in history → the attempts that have, or may have, its state: they computed it, or
    started from it."""
    first_mesh: int = 0
    """The mesh of the first state."""
    sent: list[tuple[int, int, str]] = field(default_factory=list)
    """Attempt, step and digest, as every agent may send them at any time from now on."""

    def digest(self, step: int, mesh: int | None = None) -> str:
        """Of the shards on the mesh that has computed the step, or on another."""
        bits = "".join(str(mesh) for mesh, _ in self.history[:step])
        own = self.history[step - 1][0] if step else self.first_mesh
        return f"{bits}@{own if mesh is None else mesh}"

    def compute(self, attempt: int, mesh: int, restored: int, steps: int) -> None:
        del self.history[restored:]
        self.starts = {step: by for step, by in self.starts.items() if step <= restored}
        if restored:
            self.starts[restored].append(attempt)
        else:
            self.first_mesh = mesh
        if steps:
            self.sent.append((attempt, restored, self.digest(restored, mesh)))
        for _ in range(steps):
            self.history.append((mesh, attempt))
            self.starts[len(self.history)] = [attempt]
        # The digest of the last step is lost with the attempt.
        for step in range(restored + 1, len(self.history)):
            self.sent.append((attempt, step, self.digest(step)))


ATTEMPTS = st.lists(
    st.tuples(st.sampled_from((0, 1)), st.integers(0, 4), st.integers(0, 4)), max_size=6
)


@pytest.mark.seconds
@settings(max_examples=300)
@given(attempts=ATTEMPTS, data=st.data())
def test_only_digests_of_the_steps_in_history_are_reported(
    attempts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    run, known = Run(), DigestHistory()
    for number, (mesh, back, steps) in enumerate(attempts, 1):
        restored = max(0, len(run.history) - back)
        held_by = data.draw(st.sampled_from(run.starts[restored])) if restored else 0
        known.begin(number, MESHES[mesh], restored, held_by)
        run.compute(number, mesh, restored, steps)
        for attempt, step, digest in data.draw(st.permutations(run.sent)):
            if data.draw(st.booleans()):
                known.add(attempt, step, digest)
        reported = known.up_to(len(run.history))
        assert reported == {step: run.digest(step) for step in reported}
    for attempt, step, digest in data.draw(st.permutations(run.sent)):
        known.add(attempt, step, digest)
    last = {step: by for step, (_, by) in enumerate(run.history, 1)}
    own = {step for by, step, _ in run.sent if last.get(step) == by}
    assert own <= known.up_to(len(run.history)).keys(), "all that history itself has computed"


def test_steps_that_were_rolled_back_for_their_data_are_forgotten_of_all_earlier_attempts() -> None:
    known = DigestHistory()
    known.begin(1, MESHES[0], 0, 0)
    known.begin(2, MESHES[0], 4, 1)
    known.add(1, 4, "4")
    known.add(1, 5, "5")
    known.cut(2, 4)
    known.add(2, 5, "5 again")
    assert known.up_to(9) == {4: "4"}
    known.begin(3, MESHES[0], 4, 1)
    known.add(3, 5, "other data")
    known.add(2, 5, "5 again")
    assert known.up_to(9) == {4: "4", 5: "other data"}


def test_the_digest_of_a_state_that_an_unknown_attempt_computed_is_reported() -> None:
    known = DigestHistory()
    known.begin(5, MESHES[1], 100, 4)  # before a pause, after which no supervisor has known it
    known.add(5, 100, "100")
    known.add(5, 101, "101")
    assert known.up_to(200) == {100: "100", 101: "101"}
