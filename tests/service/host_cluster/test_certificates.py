"""The installation's certificates: made once, usable by every node, renewed by their maker only."""

from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from holdfast_service.host_cluster.certificates import DAYS, CertificateFiles
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.node_record import node_files
from holdfast_workers.memory.peer_tls import PeerTls

NOW = datetime.now(UTC)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    found = node_files(tmp_path).certificates
    found.make_once(NOW)
    return found


def test_they_are_made_once_for_their_owner_only(files: CertificateFiles) -> None:
    before = {path: path.read_bytes() for path in files.folder.iterdir()}
    assert {path.name for path in before} == {"ca.crt", "tls.crt", "tls.key"}
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (*before, files.authority_key)
    )
    files.make_once(NOW)
    assert {path: path.read_bytes() for path in files.folder.iterdir()} == before


def test_a_copy_of_the_folder_is_all_that_a_node_needs(
    files: CertificateFiles, tmp_path: Path
) -> None:
    PeerTls(Path(shutil.copytree(files.folder, tmp_path / "copy"))).check()
    assert not files.authority_key.is_relative_to(files.folder)


def test_a_renewed_certificate_has_the_authority_of_the_former(files: CertificateFiles) -> None:
    authority = (files.folder / "ca.crt").read_bytes()
    files.renew(NOW, days=30)
    PeerTls(files.folder).check()
    assert (files.folder / "ca.crt").read_bytes() == authority
    made = x509.load_pem_x509_certificate((files.folder / "tls.crt").read_bytes())
    assert abs(made.not_valid_after_utc - NOW - timedelta(30)) < timedelta(seconds=1)


def test_no_certificate_outlives_its_authority(files: CertificateFiles) -> None:
    files.renew(NOW, days=2 * DAYS)
    made = x509.load_pem_x509_certificate((files.folder / "tls.crt").read_bytes())
    end = (NOW + timedelta(DAYS)).replace(microsecond=0)
    assert made.not_valid_after_utc == end
    assert PeerTls(files.folder).check() == end.timestamp()


def test_only_the_machine_that_made_them_can_renew_them(
    files: CertificateFiles, tmp_path: Path
) -> None:
    for other in (
        CertificateFiles(files.folder, tmp_path / "none"),
        CertificateFiles(tmp_path, files.authority_key),
    ):
        with pytest.raises(HostClusterError, match="on the machine that made them"):
            other.renew(NOW, days=30)
