"""A job as last fetched, readable without a request. Pure."""

from __future__ import annotations

from typing import Any

from holdfast.errors import JobFailed, NotFetched
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView, OutcomeView, ProgressView
from holdfast_service.views.lists import JobRow


class JobSnapshot:
    """A job as last fetched: in full, or in short if it comes from a list.

    `view`, `spec` and `outcome` of a job from a list raise NotFetched until `refresh`.
    """

    def __init__(self, client: Any, seen: JobView | JobRow) -> None:
        self._client = client
        self._seen = seen

    @property
    def view(self) -> JobView:
        """The whole view."""
        if isinstance(self._seen, JobRow):
            raise NotFetched(
                f"job {self.name} ({self.id}) comes from a list, which has no details: call "
                "refresh() first"
            )
        return self._seen

    @view.setter
    def view(self, seen: JobView) -> None:
        self._seen = seen

    @property
    def id(self) -> str:
        return self._seen.id

    @property
    def name(self) -> str:
        return self._seen.name

    @property
    def state(self) -> State:
        return self._seen.state

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec, with its defaults."""
        return self.view.spec

    @property
    def progress(self) -> ProgressView:
        seen = self._seen
        return ProgressView.from_attributes(seen) if isinstance(seen, JobRow) else seen.progress

    @property
    def outcome(self) -> OutcomeView | None:
        """Why the job ended; None before its end."""
        return self.view.outcome

    def raise_for_state(self) -> None:
        """Raises JobFailed if the job ended without success."""
        if self.state.terminal and self.state is not State.SUCCEEDED:
            seen = self._seen
            outcome = None if isinstance(seen, JobRow) else seen.outcome
            code = seen.outcome_code if isinstance(seen, JobRow) else outcome and outcome.code
            why = f": {outcome.message}" if outcome is not None else ""
            message = f"job {self.name} ({self.id}) is {self.state.value}{why}"
            raise JobFailed(message, code or self.state.value.lower())

    def __repr__(self) -> str:
        known, steps = self.progress.step, self.progress.steps
        step = "no step reported" if known is None else f"step {known}"
        step += f" of {steps}" if steps is not None else ""
        return f"<{type(self).__name__} {self.name} {self.id}: {self.state.value}, {step}>"
