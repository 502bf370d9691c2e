"""The last fetched view of a job, readable without a request. Pure."""

from __future__ import annotations

from typing import Any

from holdfast.errors import JobFailed
from holdfast_service.job_model.lifecycle import State
from holdfast_service.views.jobs import JobView, OutcomeView, ProgressView


class JobSnapshot:
    """A job as last fetched; `view` is the whole view."""

    def __init__(self, client: Any, view: JobView) -> None:
        self._client = client
        self.view = view

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def state(self) -> State:
        return self.view.state

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec, with its defaults."""
        return self.view.spec

    @property
    def progress(self) -> ProgressView:
        return self.view.progress

    @property
    def outcome(self) -> OutcomeView | None:
        """Why the job ended; None before its end."""
        return self.view.outcome

    def raise_for_state(self) -> None:
        """Raises JobFailed if the job ended without success."""
        if self.state.terminal and self.state is not State.SUCCEEDED:
            why = f": {self.outcome.message}" if self.outcome is not None else ""
            code = self.outcome.code if self.outcome is not None else self.state.value.lower()
            raise JobFailed(f"job {self.name} ({self.id}) is {self.state.value}{why}", code)

    def __repr__(self) -> str:
        step = f"step {self.progress.step} of {self.progress.steps}"
        return f"<{type(self).__name__} {self.name} {self.id}: {self.state.value}, {step}>"
