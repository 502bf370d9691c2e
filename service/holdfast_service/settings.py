"""The settings of the control plane, from `HOLDFAST_*` environment variables or from arguments.

Only what an operator has a reason to set is a setting. Other intervals and deadlines are constants
beside their use, or in `policy/pace.py`.
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

from holdfast_service.policy.pace import Pace
from holdfast_service.policy.quarantine import QuarantineRules
from holdfast_workers.node_cache.cached_file import CACHE_VARIABLE
from holdfast_workers.private_files import PrivateFileRefused, read_private
from holdfast_workers.programs.working_folder import FOLDER

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

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", frozen=True, extra="ignore"
    )

    host: str = Field(
        default="127.0.0.1",
        description="Where the API listens; an address other than loopback also needs "
        "`--expose-without-authentication`.",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=8642, description="Its port; 0: any free port."
    )
    allowed_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = Field(
        default=(),
        description="Names under which browsers reach the server through a proxy: `HOST` or "
        "`HOST:PORT` behind https, or a URL, IPv6 in brackets; several are separated by commas.",
    )
    auth: Literal["local", "none"] | None = Field(
        default=None,
        description="Who may use the API. `local`: the server's user, by the token in the data "
        "directory; `none`: everybody who reaches the port. Unset: `local`, or `none` with "
        "`--expose-without-authentication`.",
    )
    https_cert_file: Path | None = Field(
        default=None,
        description="Certificate of the API for https, with its chain, in PEM; unset: http.",
    )
    https_key_file: Path | None = Field(default=None, description="Its key, not encrypted, in PEM.")
    data_dir: Path = Field(
        default_factory=lambda: Path.home() / ".holdfast",
        description="Private to this server: database, keys, exports. Of the embedded cluster, "
        "also the folders of jobs, with their remote checkpoints by default. Other users lose "
        "their access to it.",
    )
    keys_dir: Path | None = Field(
        default=None,
        description="Folder of `job-secrets.key` and `secrets/`; unset: the data directory. "
        "Servers of one database need the same keys; nodes need not see them.",
    )
    database_url: str | None = Field(
        default=None,
        description="`postgresql://user@host/database`, with the options of libpq "
        "(`?sslmode=verify-full`); behind PgBouncer in transaction mode `?pgbouncer=true`. Unset: "
        "SQLite in the data directory, which is refused on a network file system.",
    )
    database_pool: Annotated[int, Field(ge=1)] = Field(
        default=20, description="Most connections to the database."
    )
    ray_address: str | None = Field(
        default=None,
        description="An existing Ray cluster, `HOST:PORT`, which needs `HOLDFAST_STORE_URI`; "
        "unset: an embedded cluster of `HOLDFAST_LOCAL_NODES` nodes.",
    )
    ray_token_file: Path | None = Field(
        default=None,
        description="File with that cluster's token, mode 0600 (on a read-only mount also 0440), "
        "as `holdfast cluster up` made it; unset: `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` apply.",
    )
    send_own_code: bool = Field(
        default=False,
        description="Send this server's Holdfast to the nodes of that cluster, which run it in "
        "place of an installed one.",
    )
    ranks_may_use_ray: bool | None = Field(
        default=None,
        description="Whether jobs may use Ray datasets (`ray_run.datasets`): their ranks then are "
        "clients of the Ray cluster, with its token. Checked when a job is submitted. Unset: on "
        "the embedded cluster only.",
    )
    store_uri: str | None = Field(
        default=None,
        description="Where checkpoints of jobs go that name no `checkpoint.remote.uri`: "
        "`s3://bucket/prefix`, or an absolute path that this server and all nodes share; unset: "
        "the data directory, which suits the embedded cluster only.",
    )
    store_endpoint: str | None = Field(
        default=None,
        description="URL of the S3 service of that bucket, which needs a secret; unset: AWS.",
    )
    store_region: str | None = Field(
        default=None, description="Region of that bucket; unset: `AWS_DEFAULT_REGION`."
    )
    store_secret: str | None = Field(
        default=None,
        description="Name of the secret for that bucket; unset: `AWS_ACCESS_KEY_ID`, "
        "`AWS_SECRET_ACCESS_KEY`, ... in the environment of the server and of all nodes.",
    )
    storage_deadline_s: Seconds = Field(
        default=30.0,
        description="Deadline for an answer of the checkpoints' storage: a listing, a mark, the "
        "next bytes of a verification or an export.",
    )
    allow_local_storage: bool = Field(
        default=False,
        description="Accept a bucket's endpoint at a loopback or link-local address: a storage "
        "service on the server's own machine.",
    )
    check_data_paths: bool = Field(
        default=True,
        description="Refuse a spec whose data path does not exist, on the server or, with "
        "`HOLDFAST_RAY_ADDRESS`, on the node with most CPUs; or whose remote storage the server "
        "cannot use.",
    )
    autoscale: bool = Field(
        default=False,
        description="The cluster at `HOLDFAST_RAY_ADDRESS` has an autoscaler, which is asked for "
        "the nodes that queued jobs lack.",
    )
    autoscale_nodes: Annotated[int | None, Field(ge=0)] = Field(
        default=None,
        description="Most nodes that the cluster is asked to have, those that are there included; "
        "unset: no bound but the autoscaler's.",
    )
    autoscale_cpus: Annotated[float | None, Field(ge=0)] = Field(
        default=None, description="The same for the CPUs of all nodes together."
    )
    autoscale_gpus: Annotated[float | None, Field(ge=0)] = Field(
        default=None, description="The same for their GPUs."
    )
    local_nodes: Annotated[int | None, Field(ge=1)] = Field(
        default=None,
        description="Nodes of the embedded cluster, beside its head, which divide the machine's "
        "CPUs and GPUs; unset: 1 if the machine has GPUs, else 3.",
    )
    local_gpus: Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_listed)] = Field(
        default=None,
        description="Ids of the embedded cluster's GPUs, as `CUDA_VISIBLE_DEVICES` names them; "
        "empty: none; unset: all that are found and that `CUDA_VISIBLE_DEVICES` allows.",
    )
    ray_metrics_port: Annotated[int | None, Field(ge=1024, le=65000)] = Field(
        default=None,
        description="Port of Ray's metrics exporter on the embedded cluster's first node; the "
        "other nodes use the next ports; needs the extra `ray-metrics`. Unset: no exporters.",
    )
    end_with_stdin: bool = Field(
        default=False,
        description="Server and embedded cluster end when stdin, a pipe, is closed: with the "
        "program that started them, even if it is killed.",
    )

    lease_s: Seconds = Field(
        default=10.0, description="Jobs and operations of a dead server wait this long for another."
    )
    reserve_after_s: Seconds = Field(
        default=300.0,
        description="Nodes are reserved for a queued job that has waited so long, and more of "
        "them each time that it has waited twice as long.",
    )
    cancel_deadline_s: Seconds = Field(
        default=60.0,
        description="A cancelled job that has not ended this long after the time for its last "
        "checkpoint (`checkpoint.final_save_s`) loses its resources by force.",
    )
    quarantine_incidents: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="A node with this many incidents within an hour is quarantined; 0: no node is.",
    )
    keep_ended_jobs_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Ended jobs are removed with their history after so long; their checkpoints "
        "stay. Unset: never.",
    )
    keep_operations_s: Seconds = Field(
        default=6 * 3600.0,
        description="Ended operations and the files of exports are removed after so long; each "
        "download keeps a file for so long again.",
    )
    release_unknown_jobs: bool = Field(
        default=False,
        description="End jobs of this installation on the cluster that its database does not "
        "know; for a start after the database was restored from a backup.",
    )
    webhook_url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="URL that gets a POST for each incident and for each job that ends.",
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="Key that signs webhook messages, by HMAC."
    )
    webhook_format: Literal["json", "slack"] = Field(
        default="json",
        description="`json`, or `slack`: plain text, as Slack's incoming webhooks take it.",
    )
    metrics_of_jobs: bool = Field(
        default=False,
        description="`/metrics` has series of each live job (up to 200), besides those of all jobs "
        "together.",
    )
    max_code_bytes: Annotated[int, Field(ge=1, le=256 << 20)] = Field(
        default=32 << 20,
        description="Largest size of a user's folder of code, when packed; unpacked 20 times as "
        "much, and above 64 MiB at most 50 times its own packed size.",
    )
    max_code_total_bytes: Annotated[int, Field(ge=1)] = Field(
        default=1 << 30,
        description="Largest size of all stored code. The longest unused goes first, but none that "
        "an unfinished job needs, or that was sent or submitted in the last 10 minutes; without "
        "any to remove, a new folder is refused (`code_store_full`).",
    )
    allow_fault_injection: bool = Field(
        default=False,
        description="Users may break their jobs on purpose, for a drill.",
    )
    crash_at: str | None = Field(
        default=None,
        description="For tests: the server kills itself at this crash point (`crash_points.py`).",
    )
    pace: Pace = Field(
        default=Pace(),
        description="For tests: other intervals and internal deadlines (`pace.py`), as "
        "`HOLDFAST_PACE__NODE_LOOK_S`.",
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
        return QuarantineRules(self.quarantine_incidents)

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

    def program_folder(self, job_id: str) -> str:
        """Where a job's program starts on its nodes, for people: on an embedded cluster a path."""
        if self.ray_address is None:
            cache = os.environ.get(CACHE_VARIABLE) or self.data_dir.absolute() / "cache"
            return str(Path(cache) / FOLDER / job_id)
        return (
            f"{FOLDER}/{job_id} in the cache folder of each of its nodes ({CACHE_VARIABLE} there, "
            "else ~/.cache/holdfast)"
        )


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
