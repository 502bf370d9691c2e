"""Makes the secrets of the services of compose.yaml, each for the user that reads it.

Each folder is a volume that only the services with that secret mount. Runs as root at every start,
and changes no secret that exists.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

HOLDFAST = 10001
GRAFANA = 472
BUCKET = "checkpoints"
ENDPOINT = "http://storage:9000"


def main(folder: Path) -> None:
    os.umask(0o022)
    keep(folder / "ray/token", _password())
    keep(folder / "redis/password", _password())
    keep(folder / "grafana/password", _password(), reader=GRAFANA)
    database = keep(folder / "database/password", _password())
    access_key = keep(folder / "storage/access-key", _password())
    secret_key = keep(folder / "storage/secret-key", _password())
    servers = folder / "servers"
    keep(servers / "keys/job-secrets.key", secrets.token_bytes(32))
    url = b"postgresql://holdfast:%s@database/holdfast" % database
    keep(servers / "settings/HOLDFAST_DATABASE_URL", url)
    bucket = {
        "access_key_id": access_key.decode(),
        "secret_access_key": secret_key.decode(),
        "bucket": BUCKET,
        "endpoint": ENDPOINT,
    }
    keep(servers / "keys/secrets/bucket.json", json.dumps(bucket).encode())


def keep(path: Path, content: bytes, reader: int = HOLDFAST) -> bytes:
    """The secret in the file, which is made of `content` if it is missing, for `reader` alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f".{path.name}")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
        with os.fdopen(descriptor, "wb") as file:
            os.fchown(descriptor, reader, -1)
            file.write(content)
        fresh.replace(path)
    return path.read_bytes()


def _password() -> bytes:
    return secrets.token_hex(20).encode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
