"""A tar file from a server decides nothing on this machine: only plain files are unpacked."""

from __future__ import annotations

import errno
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.client.model_folder import ExportDamaged, folder_at, packed_file, unpack

FILES = {"config.json": b"{}", "model.safetensors": b"x" * 1500, "empty": b""}


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return content.getvalue()[:end] + bytes(1024)


def plain(name: str, data: bytes = b"data") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


WHOLE = packed(*(plain(name, data) for name, data in FILES.items()))


def resized(size: bytes) -> bytes:
    """With another size of the first file, and the checksum that belongs to it."""
    header = bytearray(WHOLE[:512])
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + WHOLE[512:]


def test_a_folder_appears_whole_with_the_bytes_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(WHOLE)
    target = folder_at(tmp_path / "model")
    unpack(tmp_path / "a.tar", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "model"]
    with pytest.raises(OSError, match="no empty folder"):
        folder_at(target)
    with pytest.raises(OSError, match="not empty"):
        unpack(tmp_path / "a.tar", target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES


def test_an_empty_folder_may_be_there_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(WHOLE)
    (tmp_path / "empty").mkdir()
    unpack(tmp_path / "a.tar", folder_at(tmp_path / "empty"))
    assert len(list((tmp_path / "empty").iterdir())) == len(FILES)
    with pytest.raises(FileExistsError):
        folder_at(tmp_path / "a.tar")


def test_a_folder_that_is_there_stays_the_same_one_and_nothing_is_written_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the root of a disk, or the working directory."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    inode = folder.stat().st_ino
    target = folder_at(Path())
    packed = packed_file(target)
    packed.write_bytes(WHOLE)
    renamed: list[str] = []
    rename = Path.rename

    def record(path: Path, to: Path) -> Path:
        renamed.append(to.name)
        assert (path.parent.parent, to.parent) == (folder, folder)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", record)
    unpack(packed, target)
    packed.unlink()
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == FILES
    assert folder.stat().st_ino == inode
    assert renamed[-1] == "config.json"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("failing", FILES)
def test_an_error_leaves_a_folder_that_is_there_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    packed = packed_file(tmp_path)
    packed.write_bytes(WHOLE)
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if to.name == failing:
            raise OSError(errno.EIO, "the disk is broken")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken"):
        unpack(packed, tmp_path)
    assert list(tmp_path.iterdir()) == [packed]
    monkeypatch.undo()
    (tmp_path / "config.json").write_bytes(b"of somebody else")
    with pytest.raises(OSError, match="not empty"):
        unpack(packed, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"of somebody else"
    assert set(tmp_path.iterdir()) == {packed, tmp_path / "config.json"}


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "absolute": lambda outside: packed(plain(str(outside / "made"))),
    "upwards": lambda _: packed(plain("../outside/made")),
    "below": lambda _: packed(plain("sub/made")),
    "dots": lambda _: packed(plain("..")),
    "hidden": lambda _: packed(plain(".bashrc")),
    "backslash": lambda _: packed(plain("..\\made")),
    "newline": lambda _: packed(plain("a\nb")),
    "long": lambda _: packed(plain("a" * 99 + "/../" * 20 + "made")),
    "folder": lambda _: packed(special("sub", tarfile.DIRTYPE)),
    "symlink": lambda outside: packed(
        special("link", tarfile.SYMTYPE, str(outside)), plain("link/made")
    ),
    "symlink to file": lambda outside: packed(
        special("made", tarfile.SYMTYPE, str(outside / "made")), plain("made")
    ),
    "hard link": lambda outside: packed(special("made", tarfile.LNKTYPE, str(outside / "kept"))),
    "pipe": lambda _: packed(special("pipe", tarfile.FIFOTYPE)),
    "device": lambda _: packed(special("null", tarfile.CHRTYPE)),
    "sparse": lambda _: packed(special("sparse", tarfile.GNUTYPE_SPARSE)),
    "twice": lambda _: packed(plain("made"), plain("made", b"other")),
    "nothing": lambda _: packed(),
    "no tar": lambda _: b"\x08\0\0\0\0\0\0\0{}      " * 100,
    "empty": lambda _: b"",
    "size": lambda _: resized(b"\xff" + b"\0" * 11),
    "more": lambda _: WHOLE + b"x",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_anything_but_plain_files_is_refused_and_leaves_nothing(
    tmp_path: Path, attack: str
) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    (tmp_path / "a.tar").write_bytes(ATTACKS[attack](outside))
    with pytest.raises(ExportDamaged):
        unpack(tmp_path / "a.tar", inside / "model")
    assert [path.read_bytes() for path in outside.iterdir()] == [b"kept"]
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize("kept", range(0, len(WHOLE), 256))
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, kept: int) -> None:
    (tmp_path / "a.tar").write_bytes(WHOLE[:kept])
    with pytest.raises(ExportDamaged):
        unpack(tmp_path / "a.tar", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
