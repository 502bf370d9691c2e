"""The wire schemas beside the service's own views: problems, health, the server's address."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from holdfast_service.errors import statuses
from holdfast_service.job_model.labels import LabelName, LabelText, Priority
from holdfast_service.job_model.storable_text import StorableText
from holdfast_service.job_model.times import GivenTime


class _Lazy(BaseModel):
    """The schema is built at the first use: a command needs few of them."""

    model_config = ConfigDict(defer_build=True)


class Problem(_Lazy):
    """An error as RFC 9457 describes it; programs branch on `code`, which never changes."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: str = Field(description="urn:holdfast:problem:<code>")
    title: str
    status: int
    code: str = Field(
        description="stable name of the error",
        json_schema_extra={"x-statuses": dict[str, JsonValue](statuses())},
    )
    detail: str | None = None
    instance: str | None = Field(default=None, description="path of the request")
    request_id: str | None = Field(
        default=None, description="of the request, as in the server's log and in `X-Request-Id`"
    )
    faults: list[ProblemFault] | None = Field(
        default=None, description="every fault, with its path"
    )


class ProblemFault(_Lazy):
    """One fault of a document or of parameters."""

    path: str
    message: str


class JobChanges(BaseModel):
    """The changes of a job: what is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    labels: dict[LabelName, LabelText | None] = Field(
        default_factory=dict, description="labels to set; null removes one, the others stay"
    )
    priority: Priority | None = Field(default=None, description="for the order of the queue")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("name what changes: labels, priority")
        return self


class Cordon(BaseModel):
    """The request to cordon a node."""

    reason: StorableText = Field(min_length=1, max_length=500)
    until: GivenTime | None = Field(default=None, description="null: until it is uncordoned")


class Health(_Lazy):
    status: str


class Readiness(_Lazy):
    status: str
    checks: dict[str, str] = Field(description="per part: ok, or the problem")


class Version(_Lazy):
    version: str = Field(description="of the server")
    api: str = Field(description="of the API, as in its paths")
    build: str = Field(description="of the code that the ranks of a new job run")


class SessionKey(_Lazy):
    page_key: str = Field(
        description="the page sends it with each request, as `Holdfast-Page-Key`; empty: the "
        "server needs none"
    )


class SessionCode(_Lazy):
    code: str | None = Field(
        description="for `/#code=` of the dashboard's address; null: the server needs none"
    )


class ServerFile(_Lazy):
    """`server.json` in the data directory: programs of the same user find the server by it."""

    address: str
    pid: int
    data_dir: str
    token: str | None = Field(default=None, description="sent as a bearer token; null: none")


VERSION_HEADER = "Holdfast-Version"
"""Header of each answer: the version of the server."""
SERVER_FILE = "server.json"
