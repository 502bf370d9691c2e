"""What an operator may set, by `HOLDFAST_*` environment variables or by arguments.

Every deadline and interval of the control plane lives here, none in the middle of code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast_service.policy.quarantine import QuarantineRules

Seconds = Annotated[float, Field(gt=0)]


SECRETS = "secrets"
"""Folder of named secrets in the data directory."""


class Settings(BaseSettings):
    """Settings of one control-plane process; immutable once made."""

    model_config = SettingsConfigDict(env_prefix="HOLDFAST_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    data_dir: Path = Field(
        default_factory=lambda: Path.home() / ".holdfast",
        description="database, job folders and secrets of an embedded control plane",
    )
    database_url: str | None = Field(
        default=None, description="null: SQLite in the data directory; or postgresql://..."
    )
    ray_address: str | None = Field(
        default=None, description="null: an embedded cluster of `local_nodes` nodes"
    )
    local_nodes: Annotated[int, Field(ge=1)] = 3
    ray_metrics_port: Annotated[int | None, Field(ge=1024, le=65000)] = Field(
        default=None,
        description="where Ray's exporter of the embedded cluster's first node listens, those of "
        "the others on the ports after it; needs the extra `ray-metrics`; null: there are none",
    )
    node_health_period_s: Seconds = Field(
        default=1.0, description="between two checks of a node of the embedded cluster by Ray"
    )
    node_health_failures: Annotated[int, Field(ge=1)] = Field(
        default=3, description="checks in a row after which Ray takes such a node for dead"
    )
    check_data_paths: bool = Field(
        default=True,
        description="refuse a spec whose data path does not exist here; turn off where the "
        "nodes see folders that this process does not",
    )
    storage_probe_s: Seconds = Field(
        default=10.0, description="for trying out a job's remote storage when it is submitted"
    )

    reconcile_interval_s: Seconds = Field(default=2.0, description="between two polls of a job")
    polls_per_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="of supervisors, by one server at most: with more jobs than that allows, each "
        "is polled less often, and all less often while the server is busy, so that it stays "
        "quick; jobs that do not merely run have as many polls among themselves",
    )
    claim_interval_s: Seconds = Field(
        default=2.0, description="between two looks for work that another process brought"
    )
    claim_limit: Annotated[int, Field(ge=1)] = Field(
        default=10_000, description="jobs that one reconciler drives at the same time"
    )
    lease_s: Seconds = Field(default=10.0, description="a dead reconciler's jobs wait this long")
    queue_retry_s: Seconds = Field(default=1.0, description="next look at a job that waits")
    cluster_retry_s: Seconds = Field(default=2.0, description="next try of an unreachable cluster")
    error_retry_s: Seconds = Field(default=1.0, description="first back-off after an error")
    error_retry_max_s: Seconds = 30.0
    supervisor_deadline_s: Seconds = Field(
        default=15.0, description="a supervisor silent for so long is asked for anew"
    )
    supervisor_starts: Annotated[int, Field(ge=1)] = Field(
        default=20, description="supervisors made for one job before it fails"
    )
    drain_deadline_s: Seconds = Field(
        default=10.0, description="for the last rows and log lines of a job that has ended"
    )
    cancel_deadline_s: Seconds = Field(
        default=60.0,
        description="past the time for its last checkpoint, a cancelled job that has not ended "
        "has its resources taken away by force",
    )
    paused_look_s: Seconds = Field(default=30.0, description="between two looks at a paused job")
    node_look_s: Seconds = Field(
        default=2.0, description="between two looks at the cluster's nodes, and at who is set aside"
    )
    quarantine_incidents: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="a node with so many incidents within `quarantine_window_s` is quarantined; "
        "0: none is",
    )
    quarantine_window_s: Seconds = 3600.0
    quarantine_first_s: Seconds = Field(
        default=600.0, description="a node's first quarantine; each further one is twice as long"
    )
    quarantine_longest_s: Seconds = 86400.0
    quarantine_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.34,
        description="of the nodes that can run something; more are never quarantined at a time",
    )
    release_retry_s: Seconds = 0.5
    release_deadline_s: Seconds = Field(
        default=60.0, description="then a clean-up is reported as overdue and tried less often"
    )
    reap_interval_s: Seconds = 30.0
    stop_deadline_s: Seconds = Field(default=10.0, description="for an orderly shutdown")
    event_poll_s: Seconds = Field(default=0.1, description="between two looks for new events")
    log_search_s: Seconds = Field(
        default=1.0, description="of one search in a job's log lines; then it says how far it came"
    )
    live_poll_s: Seconds = Field(
        default=0.25, description="between two looks at the store for everybody who watches live"
    )
    live_rows_per_s: Annotated[float, Field(gt=0)] = Field(
        default=100.0,
        description="rows of jobs that merely advanced, told to each who watches live; changes of "
        "state are told at once and do not count",
    )
    database_busy_s: Seconds = Field(default=30.0, description="longest wait for a database lock")
    database_pool: Annotated[int, Field(ge=1)] = Field(
        default=20, description="connections to the database, at most"
    )
    storage_deadline_s: Seconds = Field(
        default=30.0,
        description="for an answer of the checkpoints' storage: a listing, a mark, the next bytes",
    )
    export_deadline_s: Seconds = Field(
        default=3600.0, description="for reading a whole checkpoint that is exported"
    )
    webhook_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="is told of incidents and of the ends of jobs, by POST",
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="signs what is told, by HMAC; see operations"
    )
    webhook_format: Literal["json", "slack"] = "json"
    metrics_of_jobs: bool = Field(
        default=False, description="series of each live job in /metrics, not only of all together"
    )
    max_code_bytes: Annotated[int, Field(ge=1, le=256 << 20)] = Field(
        default=32 << 20, description="of a user's folder of code, when packed"
    )
    allow_fault_injection: bool = Field(
        default=False, description="let users break what is theirs on purpose, for a drill"
    )
    crash_at: str | None = Field(
        default=None,
        description="for chaos tests: the process kills itself at this crossing (crossing.py)",
    )

    def resolved_database_url(self) -> str:
        """The database's URL; the embedded default lies in the data directory."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'holdfast.db'}"

    @property
    def quarantine_rules(self) -> QuarantineRules:
        return QuarantineRules(
            incidents=self.quarantine_incidents,
            window_s=self.quarantine_window_s,
            first_s=self.quarantine_first_s,
            longest_s=self.quarantine_longest_s,
            largest_share=self.quarantine_share,
        )

    @property
    def secrets_dir(self) -> Path:
        """Named secrets, one file each."""
        return self.data_dir.absolute() / SECRETS

    def job_dir(self, job_id: str) -> Path:
        """The job's own folder: its supervisor's journal and default remote checkpoints."""
        return self.data_dir.absolute() / "jobs" / job_id
