"""Whether a path is on a network file system, where SQLite must not be used: its locks may not hold
there, and its write-ahead log needs memory that all processes share.
"""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "orangefs", "ocfs2", "gfs2", "davfs"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.rclone"),
        *("fuse.gcsfuse", "fuse.blobfuse", "fuse.mountpoint-s3", "fuse.goofys"),
    }
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that holds `path`, which need not exist; None: local."""
    try:
        mounts = MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux's /proc: nothing is known
        return None
    found = type_at(path.resolve(), mounts)
    return found if found in _NETWORK else None


def type_at(path: Path, mounts: str) -> str | None:
    """The type of the file system at an absolute path, by the lines of `mountinfo`. Pure."""
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        place, _, source = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = len(point.parts), source.split(" ")[0]  # a later mount hides an earlier one
    return None if best is None else best[1]
