"""Folders with certificates, as nodes have them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
    now = at or datetime.now(UTC)
    certificate, key = issue(signer, now, now + timedelta(365))
    put(folder / KEY_FILE, key)
    put(folder / CERTIFICATE_FILE, certificate)
    put(folder / AUTHORITY_FILE, pem_of((trusted or signer).certificate))
    return folder


def addressed(signer: CertificateAuthority, *addresses: str) -> tuple[str, str]:
    """A certificate and its key that name these addresses, as Ray's own TLS needs them."""
    now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
    named = [x509.IPAddress(ip_address(address)) for address in addresses]
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, addresses[0])]))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(1))
        .not_valid_after(now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName(named), critical=False)
        .sign(signer.key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return pem_of(made), key.private_bytes(serialization.Encoding.PEM, *form).decode()


def put(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)
