"""The installation's certificates: made once, usable by every node, renewed by their maker only."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import run
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


def test_by_default_a_certificate_is_valid_as_long_as_its_authority(
    files: CertificateFiles,
) -> None:
    end = (NOW + timedelta(DAYS)).replace(microsecond=0)
    assert files.renew(NOW + timedelta(hours=20), days=None) == end
    assert PeerTls(files.folder).check() == end.timestamp()


@pytest.mark.parametrize(
    ("left_s", "why"),
    [
        (4.5 * 86400, "--days 4 or fewer, or leave --days out"),
        (3600, "For a new authority, end all"),
    ],
)
def test_days_that_its_authority_cannot_give_are_refused(
    tmp_path: Path, left_s: float, why: str
) -> None:
    """365 days were asked for and 4 given, silently."""
    files = node_files(tmp_path).certificates
    files.make_once(NOW - timedelta(DAYS) + timedelta(seconds=left_s))
    before = contents(files.folder)
    with pytest.raises(HostClusterError, match=f"itself is valid until 20.* UTC, .*{why}"):
        files.renew(NOW, days=365)
    assert contents(files.folder) == before


def test_only_the_machine_that_made_them_can_renew_them(
    files: CertificateFiles, tmp_path: Path
) -> None:
    for other in (
        CertificateFiles(files.folder, tmp_path / "none"),
        CertificateFiles(tmp_path, files.authority_key),
    ):
        with pytest.raises(HostClusterError, match="on the machine that made them"):
            other.renew(NOW, days=30)


def foreign_key(files: CertificateFiles, tmp_path: Path) -> datetime:
    other = node_files(tmp_path / "another head").certificates
    other.make_once(NOW)
    other.authority_key.replace(files.authority_key)
    return NOW


def wrong_clock(files: CertificateFiles, tmp_path: Path) -> datetime:
    return NOW + timedelta(9)


def unwritable_certificate(files: CertificateFiles, tmp_path: Path) -> datetime:
    """The key has been replaced by then."""
    (files.folder / "tls.crt").unlink()
    (files.folder / "tls.crt" / "in the way").mkdir(parents=True)
    return NOW


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (foreign_key, "tls-authority.key is not the key of an authority in .*ca.crt"),
        (wrong_clock, "the present certificate stays.*certificate is not yet valid"),
        (unwritable_certificate, "the present certificate stays.*tls.crt"),
    ],
)
def test_a_certificate_that_cannot_be_used_replaces_none(
    files: CertificateFiles,
    tmp_path: Path,
    spoil: Callable[[CertificateFiles, Path], datetime],
    why: str,
) -> None:
    now = spoil(files, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(HostClusterError, match=why):
        files.renew(now, days=30)
    assert contents(tmp_path) == before


def test_a_renewal_makes_a_half_replaced_pair_whole(files: CertificateFiles) -> None:
    """As after a crash between the two files."""
    certificate = (files.folder / "tls.crt").read_bytes()
    files.renew(NOW, days=30)
    (files.folder / "tls.crt").write_bytes(certificate)
    files.renew(NOW, days=30)
    PeerTls(files.folder).check()


def test_the_authority_of_the_key_is_found_among_others(
    files: CertificateFiles, tmp_path: Path
) -> None:
    """As while an authority is changed."""
    other = node_files(tmp_path / "former").certificates
    other.make_once(NOW)
    both = (other.folder / "ca.crt").read_text() + (files.folder / "ca.crt").read_text()
    (files.folder / "ca.crt").write_text(both)
    files.renew(NOW, days=30)
    PeerTls(files.folder).check()
    assert (files.folder / "ca.crt").read_text() == both


def test_a_new_authority_takes_the_place_of_no_other(files: CertificateFiles) -> None:
    (files.folder / "ca.crt").unlink()
    before = contents(files.folder.parent)
    with pytest.raises(HostClusterError, match=r"copy ca.crt back from another machine"):
        files.make_once(NOW)
    assert contents(files.folder.parent) == before
    shutil.rmtree(files.folder)
    files.authority_key.unlink()
    files.make_once(NOW)
    PeerTls(files.folder).check()


def test_the_command_says_until_when_its_certificate_is_valid(
    files: CertificateFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cluster", "certificate", "--data-dir", str(tmp_path)]
    assert run(command) == ExitCode.OK
    authority = x509.load_pem_x509_certificate((files.folder / "ca.crt").read_bytes())
    said = " ".join(capsys.readouterr().err.split())
    assert f"valid until {authority.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: copy" in said
    assert run([*command, "--days", "3650"]) == ExitCode.SERVER
    assert "ask for --days 3649 or fewer" in " ".join(capsys.readouterr().err.split())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}
