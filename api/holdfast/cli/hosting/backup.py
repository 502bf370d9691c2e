"""`backup` and `restore`: the control plane's database and keys in one file."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.hosting.server import settings_of
from holdfast.cli.printing import output
from holdfast_service import extras
from holdfast_service.wording import plural

if TYPE_CHECKING:
    from holdfast_service.backup.backup_file import BackupManifest
    from holdfast_service.backup.restore import Preview

Result = TypeVar("Result")

DataDir = Annotated[Path | None, Parameter(help="The server's; default ~/.holdfast.")]
DatabaseUrl = Annotated[
    str | None, Parameter(help="The server's; default: SQLite in the data directory.")
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="JSON on stdout.")]


def backup(
    file: Path,
    /,
    *,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    without_keys: Annotated[
        bool, Parameter(negative="", help="Leave out the key of all jobs and named secrets.")
    ] = False,
    force: Annotated[bool, Parameter(negative="", help="Replace an existing file.")] = False,
    json: Json = False,
) -> ExitCode:
    """Back up database and keys to FILE, while servers and jobs run.

    It needs the settings of the server: give the same options, or the same environment.
    """
    extras.require_server()
    from holdfast_service.backup.make import make_backup  # late: it loads the database's libraries

    settings = settings_of(data_dir=data_dir, database_url=database_url)
    making = make_backup(
        settings, file, with_keys=not without_keys, replace=force, progress=output.progress
    )
    made = _run("backup", making)
    if isinstance(made, ExitCode):
        return made
    manifest, nbytes = made
    if json:
        output.print_json({"file": str(file), "bytes": nbytes, **_summary(manifest)})
    else:
        output.console().print(f"{file}: {_described(manifest)}, {nbytes:,} bytes")
    return ExitCode.OK


def restore(
    file: Path,
    /,
    *,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    check: Annotated[
        bool,
        Parameter(
            name=["--check", "--dry-run"], negative="", help="Only verify, and show what would be."
        ),
    ] = False,
    json: Json = False,
) -> ExitCode:
    """Restore FILE into an empty database and a data directory without keys, with no server on it.

    It needs the settings of the server that will use them. The kind of database may be another.
    """
    extras.require_server()
    from holdfast_service.backup import restore as restoring  # late: as above

    settings = settings_of(data_dir=data_dir, database_url=database_url)
    plan = _run("restore", restoring.restore(settings, file, check=check, progress=output.progress))
    if isinstance(plan, ExitCode):
        return plan
    if json:
        output.print_json({"restored": not check, **_document(plan)})
    else:
        _print_plan(plan, check)
    return ExitCode.OK


def _run(command: str, work: Coroutine[Any, Any, Result]) -> Result | ExitCode:
    """The result, or the exit code of an error that was printed."""
    from holdfast_service.backup.backup_file import BackupError  # late: as above

    try:
        return asyncio.run(work)
    except BackupError as error:
        code, text = ExitCode.CONFLICT, str(error)
    except OSError as error:
        code, text = ExitCode.SERVER, f"{error.filename or 'the file'}: {error.strerror or error}"
    output.stderr().print(f"error ({command}): {text}")
    return code


def _summary(manifest: BackupManifest) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "revision": manifest.revision,
        "made_at": manifest.made_at,
        "database": manifest.database,
        "installation": manifest.installation,
        "jobs": manifest.rows("jobs"),
        "events": manifest.rows("events"),
        "rows": sum(table.rows for table in manifest.tables),
        "keys": [key.name for key in manifest.keys],
    }


def _document(plan: Preview) -> dict[str, Any]:
    return {
        **_summary(plan.manifest),
        "target": plan.target,
        "new_keys": plan.new_keys,
        "upgrades_to": plan.upgrades_to,
        "changed_settings": plan.changed_settings,
        "advice": plan.advice,
    }


def _described(manifest: BackupManifest) -> str:
    rows = sum(table.rows for table in manifest.tables)
    keys = plural(len(manifest.keys), "key") if manifest.keys else "no keys"
    return (
        f"{plural(manifest.rows('jobs'), 'job')}, "
        f"{plural(manifest.rows('events'), 'event')}, {plural(rows, 'row')}, {keys}, "
        f"schema {manifest.revision}, Holdfast {manifest.version}"
    )


def _print_plan(plan: Preview, check: bool) -> None:
    lines = [
        f"{'would restore' if check else 'restored'} into {plan.target}: "
        f"{_described(plan.manifest)}",
        *(f"key: {path}" for path in plan.new_keys),
    ]
    if plan.upgrades_to is not None:
        lines.append(f"schema: {plan.manifest.revision}, migrated to {plan.upgrades_to}")
    for name, (before, now) in plan.changed_settings.items():
        lines.append(f"setting {name}: was {before!r}, is {now!r}")
    lines += [f"note: {text}" for text in plan.advice]
    for line in lines:
        output.console().print(line)
