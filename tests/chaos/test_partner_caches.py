"""A node is replaced while the store of the tokens is away: it has them from its partner."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.data.token_sets import MadeSet, random_shards
from tests.support.nodes.history_proof import incidents
from tests.support.nodes.supervised import small_training, supervised

from holdfast_service.job_model.supervisor_protocol import EventKind
from holdfast_workers.data.token_cache import shard_file
from holdfast_workers.data.token_corpus import order_of
from holdfast_workers.node_cache.cached_file import LIMIT_VARIABLE
from holdfast_workers.spec import DataSpec

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
STEPS = 60
MADE = MadeSet("web", random_shards(1, [500 + n for n in range(60)]))
GROUP_BYTES = 6 * max(shard.nbytes for shard in MADE.shards)
"""Six shards, of eight samples each: four samples are a step."""


@pytest.mark.cell("P5", "token fetcher")
def test_a_replaced_node_trains_on_what_its_partner_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataSpec(prepared=(MADE.store(tmp_path / "store"),), shuffle_gb=GROUP_BYTES / 1e9)
    spec = small_training(STEPS, data=data)
    for name in ("undisturbed", "small"):
        (tmp_path / name).mkdir()
    with supervised(tmp_path / "undisturbed", spec, standbys=0) as run:
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        expected = dict(run.digests)
    order = order_of(data, [MADE.facts], spec.model.sequence_length, spec.train.seed)
    limit = len(MADE.facts.encode()) + 3 * GROUP_BYTES
    monkeypatch.setenv(LIMIT_VARIABLE, f"{limit / 1e9:.9f}")
    with supervised(tmp_path / "small", spec, own_caches=True) as run:
        run.wait_step(10)
        lost = run.seat_of(0)
        (standby,) = {*run.agents.seats} - {lost, run.seat_of(3)}
        caches = {n: Path(agent.config.cache_dir) for n, agent in run.agents.agents.items()}

        def partner_has_the_next_steps() -> bool:
            start = run.newest_step() * spec.train.global_batch
            groups = order.groups_between(start, start + 6 * spec.train.global_batch)
            shards = [MADE.shards[number] for group in groups for number in group.shards]
            return all(shard_file(caches[run.seat_of(3)], shard).exists() for shard in shards)

        run.wait(partner_has_the_next_steps)
        assert not [shard for shard in MADE.shards if shard_file(caches[standby], shard).exists()]
        (tmp_path / "store").rename(tmp_path / "away")
        run.agents.kill_node(lost)
        run.wait(lambda: len(incidents(run)) == 1)
        assert run.seat_of(0) == standby
        run.wait_step(run.of(EventKind.ATTEMPT_FORMING)[-1]["restore"]["step"] + 1)
        assert run.newest_step() < STEPS
        (tmp_path / "away").rename(tmp_path / "store")
        assert run.wait_end()["outcome"] == "SUCCEEDED", run.story()
        assert run.digests == expected, run.story()
        (incident,) = incidents(run)
        assert incident["steps_lost"] <= 1
