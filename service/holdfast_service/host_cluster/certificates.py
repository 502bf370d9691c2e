"""Makes the certificates by which the machines of an installation know each other.

One authority signs one certificate, and every machine has a copy of it: like the token, it says
that a machine belongs to the cluster. The authority's key stays on the machine that made it.

Files in use are replaced only by files that have been tried as a node uses them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_workers.memory.peer_tls import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    PeerTls,
    TlsUnusable,
)
from holdfast_workers.private_files import write_private

DAYS = 3650
"""How long an authority is valid."""
_CLOCKS_DIFFER = timedelta(days=1)


@dataclass(frozen=True)
class CertificateAuthority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def end(self) -> datetime:
        return self.certificate.not_valid_after_utc


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


def issue(authority: CertificateAuthority, now: datetime, until: datetime) -> tuple[str, str]:
    """A new certificate and its key, in PEM, for servers and clients."""
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
        """Make the authority and the certificates, unless an earlier start of this head made them.
        Raises HostClusterError if something of them is left, which a new authority would make
        useless."""
        if (self.folder / AUTHORITY_FILE).exists():
            return
        pair = (self.folder / KEY_FILE, self.folder / CERTIFICATE_FILE)
        if left := [str(path) for path in (self.authority_key, *pair) if path.exists()]:
            raise HostClusterError(
                f"{self.folder / AUTHORITY_FILE} is missing, but {' and '.join(left)} would be "
                f"replaced: copy {AUTHORITY_FILE} back from another machine, or remove "
                f"{' and '.join(left)} to begin with a new authority"
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = make_authority(now)
        write_private(self.authority_key, _key_pem(authority.key))
        self._replace(*issue(authority, now, authority.end))
        write_private(self.folder / AUTHORITY_FILE, pem_of(authority.certificate))  # last: complete

    def renew(self, now: datetime, days: int | None) -> datetime:
        """A new certificate of the same authority in place of the present one. It is valid for
        these days or, if None, as long as its authority: until the time that is returned. Raises
        HostClusterError; then the present certificate and key are as they were."""
        try:
            authorities = (self.folder / AUTHORITY_FILE).read_text()
            authority = self._authority(authorities)
        except (OSError, ValueError) as error:
            raise HostClusterError(
                f"this machine cannot issue certificates ({error}): run the command on the machine "
                "that made them with `holdfast cluster up --tls`"
            ) from error
        certificate, key = issue(authority, now, self._end(authority, now, days))
        try:
            end = self._rehearse(authorities, certificate, key)
            self._replace(certificate, key)
        except (OSError, TlsUnusable) as error:
            raise HostClusterError(
                f"the present certificate stays, because a new one cannot take its place: {error}"
            ) from error
        return end

    def _authority(self, authorities: str) -> CertificateAuthority:
        """The authority of the key, among all whose certificates a peer may show. Raises OSError,
        ValueError."""
        key = _read_key(self.authority_key)
        for certificate in x509.load_pem_x509_certificates(authorities.encode()):
            if certificate.public_key() == key.public_key():
                return CertificateAuthority(certificate, key)
        raise ValueError(
            f"{self.authority_key} is not the key of an authority in {self.folder / AUTHORITY_FILE}"
        )

    def _end(self, authority: CertificateAuthority, now: datetime, days: int | None) -> datetime:
        """End of the validity of a new certificate. Raises HostClusterError."""
        until = authority.end if days is None else now + timedelta(days)
        if now < until <= authority.end:
            return until
        left = (authority.end - now).days
        fewer = f"ask for --days {left} or fewer, or leave --days out for all of it. " * (left > 0)
        raise HostClusterError(
            f"the authority itself is valid until {authority.end:%Y-%m-%d %H:%M} UTC, and so is "
            f"every certificate of it at the longest: {fewer}For a new authority, end all nodes, "
            f"remove {self.folder} and {self.authority_key}, and run `holdfast cluster up --tls`"
        )

    def _rehearse(self, authorities: str, certificate: str, key: str) -> datetime:
        """Try the files as a node uses them: when they expire. Raises OSError, TlsUnusable."""
        with tempfile.TemporaryDirectory(dir=self.authority_key.parent) as name:
            folder = Path(name)
            write_private(folder / AUTHORITY_FILE, authorities)
            write_private(folder / CERTIFICATE_FILE, certificate)
            write_private(folder / KEY_FILE, key)
            return datetime.fromtimestamp(PeerTls(folder).check(), UTC)

    def _replace(self, certificate: str, key: str) -> None:
        """Replace both files, each at once; if the second cannot be replaced, the first is as it
        was."""
        key_file = self.folder / KEY_FILE
        former = key_file.read_text() if key_file.exists() else None
        write_private(key_file, key)
        try:
            write_private(self.folder / CERTIFICATE_FILE, certificate)
        except OSError:
            if former is not None:
                write_private(key_file, former)
            raise


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
