"""Folders with certificates, as nodes have them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from holdfast_service.host_cluster.certificates import (
    CertificateAuthority,
    issue,
    make_authority,
    pem_of,
)
from holdfast_workers.memory.peer_tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def new_authority() -> CertificateAuthority:
    return make_authority(datetime.now(UTC))


def certified(
    folder: Path,
    signer: CertificateAuthority,
    *,
    trusted: CertificateAuthority | None = None,
    at: datetime | None = None,
) -> Path:
    """Fill the folder of a node: with a certificate that `signer` issued at this time, by default
    now, and the authority that it trusts, by default the signer."""
    folder.mkdir(exist_ok=True)
    certificate, key = issue(signer, at or datetime.now(UTC), 365)
    put(folder / KEY_FILE, key)
    put(folder / CERTIFICATE_FILE, certificate)
    put(folder / AUTHORITY_FILE, pem_of((trusted or signer).certificate))
    return folder


def put(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)
