"""Plays a job and its replay on a live server, and changes what is stored."""

from __future__ import annotations

import json
import sqlite3

from tests.support.service.live_server import LiveServer
from tests.support.waiting import eventually

from holdfast import Client
from holdfast_service.job_model.supervisor_protocol import Phase


def play(server: LiveServer, client: Client, job_id: str, last: int) -> None:
    """Let a job make its steps up to `last`, on one mesh, until they are stored."""
    server.run_job(job_id, steps=last, end=False)
    stored(client, job_id, last)


def end_of(server: LiveServer, client: Client, job_id: str) -> None:
    server.supervisor(job_id).end()
    eventually(lambda: client.get(job_id).state.terminal)


def stored(client: Client, job_id: str, step: int) -> None:
    """Wait until the step and its digest are stored."""
    eventually(
        lambda: (client.get(job_id).progress.step or 0) >= step and step in client.digests(job_id)
    )


def form_again(server: LiveServer, job_id: str, restored: int, size: int, last: int) -> None:
    """Let a job go on from the step `restored` with another size of `dp_shard`."""
    supervisor = server.supervisor(job_id)
    supervisor.form(supervisor.attempt + 1, restored, {"dp_shard": size, "tp": 2})
    supervisor.enter(Phase.RUNNING)
    supervisor.run(supervisor.attempt, restored + 1, last)


def change_digest(server: LiveServer, job_id: str, step: int) -> None:
    """Change one digest of a job in the database."""
    with sqlite3.connect(server.settings.data_dir / "holdfast.db", timeout=60) as database:
        query = 'SELECT digests FROM digest_chunks WHERE job_id = ? AND "window" = 0'
        (text,) = database.execute(query, (job_id,)).fetchone()
        changed = json.dumps({**json.loads(text), str(step): "changed"})
        update = 'UPDATE digest_chunks SET digests = ? WHERE job_id = ? AND "window" = 0'
        database.execute(update, (changed, job_id))
