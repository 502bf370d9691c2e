"""Makes the certificates by which the machines of an installation know each other.

One authority signs one certificate, and every machine has a copy of it: like the token, it says
that a machine belongs to the cluster. The authority's key stays on the machine that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_workers.memory.peer_tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE
from holdfast_workers.private_files import write_private

DAYS = 3650
"""By default a certificate is valid as long as its authority."""
_CLOCKS_DIFFER = timedelta(days=1)


@dataclass(frozen=True)
class CertificateAuthority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_authority(now: datetime) -> CertificateAuthority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Holdfast cluster")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    made = (
        _valid(_builder(name, name, key), now, now + timedelta(DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return CertificateAuthority(made.sign(key, hashes.SHA256()), key)


def issue(authority: CertificateAuthority, now: datetime, days: int = DAYS) -> tuple[str, str]:
    """A new certificate and its key, in PEM, for servers and clients; valid no longer than its
    authority."""
    until = min(now + timedelta(days), authority.certificate.not_valid_after_utc)
    key = ec.generate_private_key(ec.SECP256R1())
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    made = (
        _valid(_builder(_name("Holdfast node"), authority.certificate.subject, key), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both, critical=False)
        .add_extension(signer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return pem_of(made), _key_pem(key)


@dataclass(frozen=True)
class CertificateFiles:
    """`folder` is copied to the other machines; `authority_key` is not."""

    folder: Path
    authority_key: Path

    def make_once(self, now: datetime) -> None:
        """Unless an earlier start of this head made them."""
        if (self.folder / AUTHORITY_FILE).exists():
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = make_authority(now)
        write_private(self.authority_key, _key_pem(authority.key))
        self._write(*issue(authority, now))
        write_private(self.folder / AUTHORITY_FILE, pem_of(authority.certificate))  # last: complete

    def renew(self, now: datetime, days: int) -> None:
        """A new certificate of the same authority, in place of the present one. Raises
        HostClusterError."""
        try:
            authority = CertificateAuthority(
                x509.load_pem_x509_certificate((self.folder / AUTHORITY_FILE).read_bytes()),
                _read_key(self.authority_key),
            )
        except (OSError, ValueError) as error:
            raise HostClusterError(
                f"this machine cannot issue certificates ({error}): run the command on the machine "
                "that made them with `holdfast cluster up --tls`"
            ) from error
        self._write(*issue(authority, now, days))

    def _write(self, certificate: str, key: str) -> None:
        write_private(self.folder / KEY_FILE, key)
        write_private(self.folder / CERTIFICATE_FILE, certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(identifier, critical=False)
    )


def _valid(
    builder: x509.CertificateBuilder, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return builder.not_valid_before(now - _CLOCKS_DIFFER).not_valid_after(until)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is no key of an authority that Holdfast made")
    return key
