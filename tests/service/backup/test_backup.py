"""A backup has all rows of one moment, for either kind of database, or there is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from tests.service.backup.conftest import JOB, SECRET, Databases
from tests.support.service.fake_cluster import FakeCluster
from tests.support.service.job_drives import JOB as SPEC

from holdfast_service.backup.backup_file import BackupError, BackupManifest, BackupReader
from holdfast_service.backup.make import make_backup
from holdfast_service.backup.restore import restore
from holdfast_service.services.jobs import JobService
from holdfast_service.settings import JOB_KEY, Settings
from holdfast_service.store import migrate
from holdfast_service.store.engine import Store
from holdfast_service.store.migrate import newest_revision
from holdfast_service.store.models import Event, JobRecord, LeaseOwner, RemovedJob
from holdfast_workers.private_files import write_private

KINDS = ("sqlite", "postgresql")
_DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from holdfast_service.backup.restore import restore
from holdfast_service.settings import Settings
def progress(line):
    if line.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
settings = Settings.model_validate_json(sys.argv[1])
asyncio.run(restore(settings, Path(sys.argv[2]), check=False, progress=progress))
"""


async def backed_up(settings: Settings, path: Path, **options: Any) -> BackupManifest:
    options = {"with_keys": True, "replace": False, **options}
    return (await make_backup(settings, path, **options))[0]


def digests(manifest: BackupManifest) -> dict[str, str]:
    return {each.name: each.sha256 for each in manifest.members}


@pytest.mark.seconds
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
async def test_a_restored_database_has_the_same_rows_and_keys(
    filled: Databases, empty: Databases, tmp_path: Path, source: str, target: str
) -> None:
    before, after = await filled(source, "before"), await empty(target, "after")
    first = await backed_up(before, tmp_path / "first")
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o600
    saved = {each.table: each.rows for each in first.tables}
    assert [name for name, rows in saved.items() if not rows] == []
    plan = await restore(after, tmp_path / "first", check=False)
    assert set(plan.new_keys) == {str(after.data_dir / name) for name in (JOB_KEY, SECRET)}
    second = await backed_up(after, tmp_path / "second")
    assert digests(second) == digests(first)
    assert (after.data_dir / SECRET).stat().st_mode & 0o777 == 0o600
    store = await Store.open(after)
    async with store.write() as session:
        assert await session.scalar(select(func.count()).select_from(LeaseOwner)) == 0
        assert list(await session.scalars(select(JobRecord.lease_owner).distinct())) == [None]
        # Change numbers of this database are never used again, on SQLite not even those that the
        # lost database used after the backup.
        numbers = [*await session.scalars(select(JobRecord.changed))]
        if source == target == "sqlite":
            assert min(numbers) > first.newest_change + 1_000_000
        assert min(numbers) > 0
        await session.execute(
            update(JobRecord).where(JobRecord.id == JOB).values(name="changed again")
        )
        newest = await session.scalar(select(JobRecord.changed).where(JobRecord.id == JOB))
        assert newest is not None and newest > max(numbers)
        assert newest > (await session.scalars(select(func.max(RemovedJob.changed)))).one()
        if target == "postgresql":  # no counter has to be set: a new table with one must be
            assert await session.scalar(text("SELECT count(*) FROM pg_sequences")) == 0
    await store.close()


@pytest.mark.parametrize("target", KINDS)
async def test_a_backup_of_an_older_schema_is_migrated(
    filled: Databases,
    empty: Databases,
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after = await empty(target, "after")
    manifest = await backed_up(await filled("sqlite", "before"), tmp_path / "backup")
    add_a_migration(tmp_path / "migrations", manifest.revision, monkeypatch)
    plan = await restore(after, tmp_path / "backup", check=False)
    assert plan.upgrades_to == newest_revision() > manifest.revision
    store = await Store.open(after)
    async with store.read() as session:
        rows = await session.execute(text("SELECT id, later FROM jobs"))
        assert [tuple(row) for row in rows] == [(JOB, "as before")]
    await store.close()


def add_a_migration(folder: Path, newest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version have one more revision than it has."""
    shutil.copytree(migrate._MIGRATIONS, folder)
    lines = (
        "import sqlalchemy as sa",
        "from alembic import op",
        f"revision, down_revision = '9998', '{newest}'",
        "def upgrade():",
        "    op.add_column('jobs', sa.Column('later', sa.Text(), server_default='as before'))",
    )
    (folder / "versions" / "9998_later.py").write_text("\n".join(lines))
    monkeypatch.setattr(migrate, "_MIGRATIONS", folder)


@pytest.mark.slow
async def test_a_backup_beside_a_writer_is_of_one_moment(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    jobs = JobService(store, FakeCluster(), settings)
    done = asyncio.Event()

    async def write() -> int:
        written = 0
        while not done.is_set():
            job, _ = await jobs.submit(SPEC)  # with its first event, in one transaction
            await jobs.cancel(job.id)
            written += 1
            await asyncio.sleep(0)
        return written

    writing = asyncio.create_task(write())
    sizes = []
    for number in range(5):
        path = tmp_path / f"{number}.backup"
        manifest = await backed_up(settings, path)
        reader = BackupReader(path)
        rows: dict[str, list[dict[str, Any]]] = {}
        for table in manifest.tables:
            lines = [json.loads(line) for line in reader.lines(table)]
            rows[table.table] = [dict(zip(table.columns, line, strict=True)) for line in lines]
        counted = {job["id"]: job["event_seq"] for job in rows["jobs"]}
        events = dict.fromkeys(counted, 0)
        for event in rows["events"]:
            events[event["job_id"]] += 1
        assert events == counted
        sizes.append(len(counted))
    done.set()
    assert await writing > 5
    assert sizes[0] < sizes[-1], "it wrote meanwhile"


async def test_a_damaged_file_is_refused_and_nothing_is_changed(
    filled: Databases, empty: Databases, tmp_path: Path
) -> None:
    path, damaged = tmp_path / "good", tmp_path / "damaged"
    manifest = await backed_up(await filled("sqlite", "before"), path)
    content = path.read_bytes()
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    cuts = [content[:length] for length in (0, 10, len(content) // 2, len(content) - 1)]
    flips = [chance.randrange(len(content)) for _ in range(150)]
    refused = 0
    target = await empty("sqlite", "after")
    for number, bad in enumerate([*cuts, *(flipped(content, place) for place in flips)]):
        damaged.write_bytes(bad)
        try:
            found = await restore(target, damaged, check=True)
        except BackupError:
            refused += 1
        else:  # a byte without meaning, as the time of a member
            assert number >= len(cuts)
            assert found.manifest == manifest
        assert not target.data_dir.exists()
    assert refused > 100


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


async def test_a_row_that_was_exchanged_is_found_by_its_digest(
    filled: Databases, empty: Databases, tmp_path: Path
) -> None:
    path = tmp_path / "good"
    await backed_up(await filled("sqlite", "before"), path)
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(tmp_path / "bad", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name).replace(b"RUNNING", b"PAUSED!"))
    target = await empty("sqlite", "after")
    with pytest.raises(BackupError, match="another digest"):
        await restore(target, tmp_path / "bad", check=False)
    assert not target.data_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_restore_leaves_an_empty_database_and_may_be_repeated(
    filled: Databases, empty: Databases, tmp_path: Path, kind: str
) -> None:
    path, target = tmp_path / "backup", await empty(kind, "after")
    first = await backed_up(await filled("sqlite", "before"), path)
    for point in ("code_packages", "jobs", first.tables[-1].table):
        command = [sys.executable, "-c", _DYING, target.model_dump_json(), str(path), point]
        died = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
        assert died.returncode == -signal.SIGKILL
        assert await restore(target, path, check=True)  # it is empty
    await restore(target, path, check=False)
    assert digests(await backed_up(target, tmp_path / "second")) == digests(first)


async def test_what_cannot_be_restored_is_refused_and_says_what_to_do(
    filled: Databases, empty: Databases, tmp_path: Path
) -> None:
    source, path = await filled("sqlite", "before"), tmp_path / "backup"
    manifest = await backed_up(source, path)
    with pytest.raises(BackupError, match=r"is not empty \(\d+ jobs\).*--database-url"):
        await restore(source, path, check=False)
    target = await empty("sqlite", "after")
    target.data_dir.mkdir()
    write_private(target.data_dir / JOB_KEY, b"x" * 32)
    with pytest.raises(BackupError, match="another key than the backup's"):
        await restore(target, path, check=False)
    assert not (target.data_dir / "holdfast.db").exists()
    (target.data_dir / JOB_KEY).unlink()
    newer = manifest.model_copy(update={"revision": "9999", "version": "7.0"})
    with zipfile.ZipFile(path) as good, zipfile.ZipFile(tmp_path / "newer", "w") as file:
        for name in good.namelist():
            changed = name == "manifest.json"
            file.writestr(name, newer.model_dump_json() if changed else good.read(name))
    with pytest.raises(BackupError, match=r"Holdfast 7.0.*9999.*reads up to 00\d\d: upgrade"):
        await restore(target, tmp_path / "newer", check=False)
    await backed_up(source, tmp_path / "keyless", with_keys=False)
    plan = await restore(target, tmp_path / "keyless", check=True)
    assert any("copy the installation's to" in advice for advice in plan.advice)
    assert list(target.data_dir.iterdir()) == []
    write_private(target.data_dir / JOB_KEY, (source.data_dir / JOB_KEY).read_bytes())
    await restore(target, path, check=False)


async def test_what_cannot_be_backed_up_is_refused_and_leaves_no_file(
    filled: Databases, empty: Databases, tmp_path: Path
) -> None:
    source, path = await filled("sqlite", "before"), tmp_path / "to" / "backup"
    path.parent.mkdir()
    with pytest.raises(BackupError, match="there is no database"):
        await backed_up(await empty("sqlite", "nothing"), path)
    key = source.data_dir / JOB_KEY
    saved = key.read_bytes()
    key.chmod(0o640)
    with pytest.raises(BackupError, match=r"key is refused: other users .* chmod 600"):
        await backed_up(source, path)
    write_private(key, b"x" * 32)
    with pytest.raises(BackupError, match="is not the key of this database"):
        await backed_up(source, path)
    key.unlink()
    with pytest.raises(BackupError, match="there is no key"):
        await backed_up(source, path)
    write_private(key, saved)
    with contextlib.closing(sqlite3.connect(source.data_dir / "holdfast.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
        with pytest.raises(BackupError, match=r"the database has schema version 9999.*upgrade"):
            await backed_up(source, path)
        assert not any(path.parent.iterdir())
        database.execute("UPDATE alembic_version SET version_num = ?", [newest_revision()])
        database.commit()
    await backed_up(source, path)
    before = path.read_bytes()
    with pytest.raises(BackupError, match="--force"):
        await backed_up(source, path)
    assert path.read_bytes() == before
    await backed_up(source, path, replace=True)
    assert list(path.parent.iterdir()) == [path]


async def test_settings_of_a_backup_have_no_secrets(filled: Databases, tmp_path: Path) -> None:
    given = {"webhook_secret": "hush", "webhook_url": "http://a:hush@b/"}
    settings = (await filled("sqlite", "before")).model_copy(update=given)
    manifest = await backed_up(settings, tmp_path / "backup")
    assert "hush" not in manifest.model_dump_json()
    assert manifest.settings["lease_s"] == settings.lease_s
    assert Event.__tablename__ in {each.table for each in manifest.tables}
