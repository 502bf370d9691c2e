"""Jobs of a busy service, written directly into its database.

The jobs are never due, so no reconciler changes them.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tests.support.service.live_server import SPEC
from tests.support.web.seed_events import NEVER
from uuid_utils import uuid7

from holdfast_service.job_model.job_spec import parse
from holdfast_service.settings import Settings
from holdfast_service.store.engine import Store
from holdfast_service.store.models import JobRecord

MODELS = ("llama", "mixtral", "qwen", "pythia", "olmo", "t5", "vit", "whisper")
TASKS = ("pretrain", "sft", "ablation", "long-context", "tokenizer", "scaling", "baseline", "dedup")
PEOPLE = ("ada", "grace", "edsger", "barbara", "donald", "margaret")
STATES = (
    *(("RUNNING",) * 9),
    *(("SUCCEEDED",) * 11),
    *("RECOVERING", "QUEUED", "QUEUED", "STARTING", "PAUSED", "FAILED", "FAILED", "CANCELLED"),
)
OVER = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


async def add_crowd(
    settings: Settings, count: int, seed: int = 7, spec: dict[str, Any] = SPEC
) -> None:
    """`count` jobs; equal for equal seeds, except for ids and times."""
    resolved = parse(spec, None).model_dump(mode="json")
    rng = random.Random(seed)
    store = await Store.open(settings)
    try:
        async with store.write() as session:
            # In order of creation, like the ids.
            session.add_all(_job(rng, count - number, resolved) for number in range(count))
    finally:
        await store.close()


def _job(rng: random.Random, place: int, spec: dict[str, Any]) -> JobRecord:
    state = rng.choice(STATES)
    owner = rng.choice(PEOPLE)
    steps = rng.choice((2_000, 10_000, 40_000, 120_000))
    created = time.time() - 1800 * place * rng.uniform(0.9, 1.1) / 10
    started = state != "QUEUED"
    step = steps if state == "SUCCEEDED" else int(steps * rng.uniform(0.02, 0.98)) if started else 0
    if state == "STARTING":
        step = 0
    has_steps = started and step > 0
    incidents = rng.choice((0, 0, 0, 1, 2, 5)) if has_steps else 0
    return JobRecord(
        id=str(uuid7()),
        name=f"{rng.choice(MODELS)}-{rng.choice(TASKS)}-{place:04}",
        spec={**spec, "labels": {"owner": owner}},
        desired={"PAUSED": "paused", "CANCELLED": "cancelled"}.get(state, "running"),
        state=state,
        waiting=_waiting(created) if state == "QUEUED" else None,
        outcome_code=_outcome(rng, state),
        created_at=created,
        started_at=created + 9 if started else None,
        ended_at=created + (time.time() - created) * rng.uniform(0.2, 0.9)
        if state in OVER
        else None,
        request_digest="",
        step=step,
        steps=steps,
        attempt=1 + incidents if started else 0,
        incidents=incidents,
        loss=round(1.4 + 6 * (1 - step / steps) ** 2 * rng.uniform(0.8, 1), 3)
        if has_steps
        else None,
        tokens_per_second=rng.uniform(9e4, 9e5) if has_steps and state not in OVER else None,
        due_at=NEVER,
        cleaned=state in OVER,
        event_seq=3,
        owner=owner,
        goodput=rng.uniform(0.86, 0.999) if has_steps else None,
        productive_s=900.0 * (place % 7 != 3),  # the others have just started
        step_s=rng.uniform(0.2, 0.9) if state == "RUNNING" else None,
    )


def _waiting(since: float) -> dict[str, Any]:
    return {
        "resource": "nodes",
        "reason": "needs 3 nodes of 1 CPU, and 1 is free",
        "since": since,
        "until": None,
    }


def _outcome(rng: random.Random, state: str) -> str | None:
    failures = ("user_error", "no_progress", "out_of_failures")
    return {"SUCCEEDED": "succeeded", "CANCELLED": "cancelled", "FAILED": rng.choice(failures)}.get(
        state
    )
