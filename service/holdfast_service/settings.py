"""The settings of the control plane, from `HOLDFAST_*` environment variables or from arguments.

Every deadline and interval of the control plane is defined here, never in the middle of code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_workers.private_files import PrivateFileRefused, read_private

Seconds = Annotated[float, Field(gt=0)]


FOLDER_VARIABLE = "HOLDFAST_SETTINGS_DIR"
"""Names a folder with a file per setting, such as HOLDFAST_DATABASE_URL: a mounted secret. The
environment comes first."""
_PREFIX = "HOLDFAST_"
SECRETS = "secrets"
"""Folder for named secrets, inside the folder of keys."""
JOB_KEY = "job-secrets.key"
TOKEN = "token"


class FileRefused(Exception):
    """A file in the folder of settings must not be used; the message says why and what to do."""


def _listed(value: object) -> object:
    if not isinstance(value, str):
        return value
    return [name for part in value.split(",") if (name := part.strip())]


class Settings(BaseSettings):
    """Settings of one control-plane process; immutable once created."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8642
    allowed_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = Field(
        default=(),
        description="Names under which browsers reach the server through a proxy: HOST or "
        "HOST:PORT behind https, or a URL; several are separated by commas.",
    )
    auth: Literal["local", "none"] | None = Field(
        default=None,
        description="Who may use the API. local: who has the token in the data directory, which "
        "only this user can read; none: everybody who reaches the port; null: local, or none with "
        "--expose-without-authentication.",
    )
    https_cert_file: Path | None = Field(
        default=None,
        description="Certificate of the API for https, with its chain, in PEM; null: http.",
    )
    https_key_file: Path | None = Field(
        default=None, description="The key of `https_cert_file`, not encrypted, in PEM."
    )
    data_dir: Path = Field(
        default_factory=lambda: Path.home() / ".holdfast",
        description="Private to this server: database, keys, exports. Of the embedded cluster, "
        "also the folders of jobs, with their remote checkpoints by default.",
    )
    keys_dir: Path | None = Field(
        default=None,
        description="Folder of the key of all jobs and of named secrets; null: the data "
        "directory. Only the server needs it: nodes need not see it.",
    )
    database_url: str | None = Field(
        default=None,
        description="The database's URL: postgresql://...; null: SQLite in the data directory.",
    )
    ray_address: str | None = Field(
        default=None,
        description="Address of a running Ray cluster; null: start an embedded cluster of "
        "`local_nodes` nodes.",
    )
    store_uri: str | None = Field(
        default=None,
        description="Where checkpoints of jobs go that name no `checkpoint.remote.uri`: "
        "s3://bucket/prefix, or an absolute path that this server and all nodes share; null: the "
        "data directory, which suits the embedded cluster only.",
    )
    store_endpoint: str | None = Field(
        default=None, description="URL of the S3 service of `store_uri`; null: AWS."
    )
    store_region: str | None = Field(
        default=None, description="Region of the bucket of `store_uri`; null: AWS_DEFAULT_REGION."
    )
    store_secret: str | None = Field(
        default=None,
        description="Name of the secret for `store_uri`; null: the variables AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, ... in the environment of the server and of all nodes.",
    )
    ray_token_file: Path | None = Field(
        default=None,
        description="File with the token of the cluster at `ray_address`, mode 0600, as "
        "`holdfast cluster up` made it; null: RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH apply.",
    )
    send_own_code: bool = Field(
        default=False,
        description="Whether this server sends its own Holdfast to the nodes of the cluster at "
        "`ray_address`, which then run it in place of an installed one.",
    )
    ranks_may_use_ray: bool | None = Field(
        default=None,
        description="Whether jobs may use Ray datasets (`ray_run.datasets`): their ranks then are "
        "clients of the Ray cluster, with its token; null: on the embedded cluster only.",
    )
    autoscale: bool = Field(
        default=False,
        description="Whether the cluster at `ray_address` has an autoscaler, which is asked for "
        "the nodes that queued jobs lack.",
    )
    autoscale_nodes: Annotated[int | None, Field(ge=0)] = Field(
        default=None,
        description="Most nodes that the cluster is asked to have; null: no bound but the "
        "autoscaler's.",
    )
    autoscale_cpus: Annotated[float | None, Field(ge=0)] = Field(
        default=None, description="The same for CPUs of all its nodes together."
    )
    autoscale_gpus: Annotated[float | None, Field(ge=0)] = Field(
        default=None, description="The same for GPUs of all its nodes together."
    )
    local_nodes: Annotated[int | None, Field(ge=1)] = Field(
        default=None,
        description="Nodes of the embedded cluster, which divide the machine's CPUs and GPUs; "
        "null: one if the machine has GPUs, else three.",
    )
    local_gpus: Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_listed)] = Field(
        default=None,
        description="Ids of the GPUs of the embedded cluster, as CUDA_VISIBLE_DEVICES names them; "
        "empty: none; null: all that are found and that CUDA_VISIBLE_DEVICES allows.",
    )
    ray_metrics_port: Annotated[int | None, Field(ge=1024, le=65000)] = Field(
        default=None,
        description="Port of Ray's metrics exporter on the embedded cluster's first node; the "
        "other nodes use the ports after it; needs the extra `ray-metrics`; null: no exporters.",
    )
    end_with_stdin: bool = Field(
        default=False,
        description="Whether server and embedded cluster end when stdin, a pipe, is closed: with "
        "the program that started them, even if it is killed.",
    )
    node_health_period_s: Seconds = Field(
        default=1.0, description="Interval of Ray's health checks of an embedded cluster's node."
    )
    node_health_failures: Annotated[int, Field(ge=1)] = Field(
        default=3, description="Failed checks in a row after which Ray declares such a node dead."
    )
    ray_look_s: Seconds = Field(
        default=2.0, description="Interval between two looks at the connection to Ray."
    )
    ray_answer_s: Seconds = Field(
        default=2.0,
        description="Deadline of an answer of Ray's control service (GCS); then it counts as away.",
    )
    ray_lost_after_s: Seconds = Field(
        default=6.0,
        description="A connection to Ray is made anew if the GCS has answered others for so long, "
        "but not this server.",
    )
    ray_connect_s: Seconds = Field(
        default=60.0,
        description="Deadline of a new connection to Ray, once its GCS answers; after it the "
        "server ends with an error.",
    )
    check_data_paths: bool = Field(
        default=True,
        description="Refuse a spec whose data path does not exist: on the server, or with "
        "`ray_address` on a node; or whose remote storage the server cannot use.",
    )
    data_path_check_s: Seconds = Field(
        default=5.0, description="Deadline of the search for a job's data at submission."
    )
    storage_probe_s: Seconds = Field(
        default=10.0, description="Deadline of the test of a job's remote storage at submission."
    )

    reconcile_interval_s: Seconds = Field(
        default=2.0,
        description="Interval between two polls of a job that changes its state, is watched by a "
        "live stream, or was requested from this server in the last 5 s; others are polled 2.5 "
        "times less often. Events do not wait.",
    )
    polls_per_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0,
        description="Most polls of supervisors per second by one server. With more jobs than "
        "that allows, each job is polled less often; while the server is busy, all jobs are "
        "polled less often, so that requests stay fast. Jobs whose state is changing or that a "
        "user is watching share a second budget of the same size, those with an event a third.",
    )
    claim_interval_s: Seconds = Field(
        default=2.0,
        description="Interval between two searches for jobs that another process submitted, and "
        "for commands that came through another server.",
    )
    claim_limit: Annotated[int, Field(ge=1)] = Field(
        default=10_000, description="Most jobs that one reconciler drives at the same time."
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Lifetime of a lease: jobs and operations of a dead server wait this long.",
    )
    queue_retry_s: Seconds = Field(
        default=1.0, description="Interval between two admission checks of a queued job."
    )
    keep_idempotency_keys_s: Seconds = Field(
        default=7 * 86400.0,
        description="An `Idempotency-Key` that was used longer ago may be used for a new request.",
    )
    reserve_after_s: Seconds = Field(
        default=300.0,
        description="Nodes are reserved for a queued job that has waited so long, and more of "
        "them each time that it has waited twice as long.",
    )
    cluster_retry_s: Seconds = Field(
        default=2.0, description="Interval between two attempts to reach an unreachable cluster."
    )
    error_retry_s: Seconds = Field(default=1.0, description="First back-off after an error.")
    error_retry_max_s: Seconds = Field(default=30.0, description="Longest back-off after errors.")
    supervisor_deadline_s: Seconds = Field(
        default=15.0,
        description="A supervisor that has not answered for this long is requested again.",
    )
    supervisor_starts: Annotated[int, Field(ge=1)] = Field(
        default=20, description="Supervisors created for one job before the job fails."
    )
    drain_deadline_s: Seconds = Field(
        default=10.0,
        description="Deadline for the last rows and log lines of a job that has ended.",
    )
    cancel_deadline_s: Seconds = Field(
        default=60.0,
        description="Time that a cancelled job has to end, beyond the time for its last "
        "checkpoint; after that its resources are removed by force.",
    )
    paused_look_s: Seconds = Field(
        default=30.0, description="Interval between two checks of a paused job."
    )
    node_look_s: Seconds = Field(
        default=5.0,
        description="Interval between two reads of the cluster's nodes, and of the nodes that are "
        "cordoned or in quarantine.",
    )
    cluster_check_s: Seconds = Field(
        default=40.0,
        description="How long the nodes have for the check of the cluster (`holdfast doctor "
        "--cluster`); a node that has not answered then is reported.",
    )
    quarantine_incidents: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="A node with this many incidents within `quarantine_window_s` is quarantined; "
        "0: nodes are never quarantined.",
    )
    quarantine_window_s: Seconds = Field(
        default=3600.0, description="Incidents older than this do not count."
    )
    quarantine_first_s: Seconds = Field(
        default=600.0,
        description="Length of a node's first quarantine; each further one is twice as long.",
    )
    quarantine_longest_s: Seconds = Field(
        default=86400.0, description="Longest quarantine of a node."
    )
    quarantine_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.34,
        description="Largest share of the usable nodes that is in quarantine at the same time.",
    )
    release_retry_s: Seconds = Field(
        default=0.5, description="Interval between two attempts to remove a job from the cluster."
    )
    release_deadline_s: Seconds = Field(
        default=60.0,
        description="A clean-up that takes longer is reported as overdue and retried less often.",
    )
    reap_interval_s: Seconds = Field(
        default=30.0,
        description="Interval between two searches for remains of ended jobs on the cluster.",
    )
    keep_ended_jobs_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Ended jobs are removed with their history after so many seconds; their "
        "checkpoints are kept. Unset: never.",
    )
    release_unknown_jobs: bool = Field(
        default=False,
        description="Whether jobs of this installation on the cluster that its database does not "
        "know are ended; for a start after the database was restored from a backup.",
    )
    stop_deadline_s: Seconds = Field(
        default=10.0, description="Deadline of an orderly shutdown of the server."
    )
    log_search_s: Seconds = Field(
        default=1.0,
        description="Longest search of a job's log lines; then the answer says how far it got.",
    )
    live_poll_s: Seconds = Field(
        default=0.25,
        description="Interval between two reads of the store for all live streams together, and "
        "for all followers of events and logs.",
    )
    live_rows_per_s: Annotated[float, Field(gt=0)] = Field(
        default=100.0,
        description="Most rows per second that a live stream gets of jobs that only advanced; "
        "changes of state are sent at once and do not count.",
    )
    database_busy_s: Seconds = Field(default=30.0, description="Longest wait for a database lock.")
    database_pool: Annotated[int, Field(ge=1)] = Field(
        default=20, description="Most connections to the database."
    )
    storage_deadline_s: Seconds = Field(
        default=30.0,
        description="Deadline for an answer of the checkpoint storage: a listing, a mark, the "
        "next bytes.",
    )
    allow_local_storage: bool = Field(
        default=False,
        description="Accept a bucket's endpoint at a loopback or link-local address: a storage "
        "service on the server's own machine.",
    )
    keep_operations_s: Seconds = Field(
        default=6 * 3600.0,
        description="Ended operations, and the files of exports, are removed after so many "
        "seconds; each download keeps a file for so long again.",
    )
    node_room_fresh_s: Seconds = Field(
        default=600.0,
        description="A node that was too small for a job (shared memory, memory, processes) is not "
        "tried again by such jobs for so many seconds; one that lacks software is not tried again "
        "by any job.",
    )
    webhook_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="URL that gets a POST for each incident and for each job that ends.",
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="Key that signs webhook messages, by HMAC; see operations."
    )
    webhook_format: Literal["json", "slack"] = "json"
    metrics_of_jobs: bool = Field(
        default=False,
        description="Whether /metrics has series of each live job, not only of all jobs together.",
    )
    max_code_bytes: Annotated[int, Field(ge=1, le=256 << 20)] = Field(
        default=32 << 20, description="Largest size of a user's code folder, when packed."
    )
    max_code_total_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30,
        description="Largest size of all stored code; the longest unused of ended jobs goes first, "
        "but none that was sent or submitted in the last 10 minutes.",
    )
    allow_fault_injection: bool = Field(
        default=False,
        description="Whether users may inject faults into their jobs, for a drill.",
    )
    crash_at: str | None = Field(
        default=None,
        description="For chaos tests: the process kills itself at this point (crash_points.py).",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            return init_settings, env_settings
        _refuse_wrong_files(Path(folder), settings_cls)
        files = SecretsSettingsSource(settings_cls, secrets_dir=folder)
        return init_settings, env_settings, files

    def resolved_database_url(self) -> str:
        """The database's URL; the default is a SQLite file in the data directory."""
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
        """Folder with one file per named secret."""
        return self._keys / SECRETS

    @property
    def job_key_file(self) -> Path:
        """The file with the key from which every job's secret is derived."""
        return self._keys / JOB_KEY

    @property
    def token_file(self) -> Path:
        """The file with the API's token; it stays the same when the server starts again."""
        return self.data_dir.absolute() / TOKEN

    @property
    def _keys(self) -> Path:
        return (self.keys_dir or self.data_dir).absolute()

    def job_dir(self, job_id: str) -> Path:
        """The job's folder: its remote checkpoints, if neither spec nor `store_uri` names another
        place."""
        return self.data_dir.absolute() / "jobs" / job_id


def _refuse_wrong_files(folder: Path, settings: type[BaseSettings]) -> None:
    """Raises FileRefused for a file of the prefix that names no setting, or that others can
    read. Other files are not read: a mount may have some of its own."""
    if not folder.is_dir():
        return
    names = {_PREFIX + name.upper() for name in settings.model_fields}
    for path in sorted(folder.iterdir()):
        if not path.name.upper().startswith(_PREFIX):
            continue
        if path.name.upper() not in names:
            raise FileRefused(
                f"{path} names no setting: correct its name, or remove it; a variable that is no "
                "setting of the server goes into the environment"
            )
        try:
            read_private(path)
        except PrivateFileRefused as error:
            raise FileRefused(f"the setting {error}") from error
        except OSError as error:
            raise FileRefused(
                f"cannot read the setting {path}: {error.strerror}; let this user read it"
            ) from error
