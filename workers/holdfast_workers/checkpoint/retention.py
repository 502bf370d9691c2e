"""What of the remote tier stays and what goes.

Never removed: the newest checkpoint that verifies, whatever the rules say; what the current
attempt may still be writing; what has been quarantined. A removal begins with the manifest, so
that one which is broken off leaves nothing that looks complete.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from holdfast_workers.checkpoint.manifest import (
    FOLDER_NAME,
    MANIFEST,
    BadCheckpoint,
    Manifest,
    fsync_folder,
    list_checkpoints,
    verify,
)

QUARANTINED = ".bad"
REASON = "why-bad.txt"


def quarantine(folder: Path, why: str) -> Path:
    """Take a checkpoint out of what is listed, keeping it as evidence. Returns where it is now."""
    target = folder.with_name(folder.name + QUARANTINED)
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"{folder.name}{QUARANTINED}-{number}")
    with contextlib.suppress(OSError):  # a full or read-only disk must not keep a bad state listed
        (folder / REASON).write_text(why + "\n")
    folder.rename(target)
    fsync_folder(target.parent)
    return target


def retain(root: Path, keep: int, *, current_attempt: int) -> list[Path]:
    """Keep the `keep` newest complete checkpoints; return the folders that were removed.

    Removed with the older ones are incomplete leftovers of other attempts that are older than
    the newest complete checkpoint. Reads the newest checkpoint through, but only if a complete
    one is to go.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    complete = list_checkpoints(root)
    doomed = [manifest.folder for manifest in _surplus(complete, keep)]
    if complete:
        doomed += _leftovers(root, complete, current_attempt)
    for folder in doomed:
        _remove(folder)
    if doomed:
        fsync_folder(root)
    return doomed


def _surplus(complete: list[Manifest], keep: int) -> list[Manifest]:
    """Those beyond `keep`, without the newest that verifies."""
    extra = complete[keep:]
    if not extra or any(_is_whole(manifest) for manifest in complete[:keep]):
        return extra
    newest_whole = next((manifest for manifest in extra if _is_whole(manifest)), None)
    return [manifest for manifest in extra if manifest is not newest_whole]


def _is_whole(manifest: Manifest) -> bool:
    try:
        verify(manifest.folder)
    except BadCheckpoint:
        return False
    return True


def _leftovers(root: Path, complete: list[Manifest], current_attempt: int) -> list[Path]:
    newest = (complete[0].step, complete[0].attempt)
    found = []
    for folder in sorted(root.iterdir()):
        name = FOLDER_NAME.fullmatch(folder.name)
        if name is None or (folder / MANIFEST).exists():
            continue
        step, attempt = int(name[1]), int(name[2])
        if (step, attempt) < newest and attempt != current_attempt:
            found.append(folder)
    return found


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    fsync_folder(folder)
    shutil.rmtree(folder)
