"""The node agents' rank metrics appear in Ray's own exporter (extra `ray-metrics`)."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import httpx
import pytest
from tests.end_to_end.conftest import ONE_NODE, served, spec
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.embedded_cluster import local_cluster
from holdfast_service.embedded_cluster.local_cluster import KeeperOptions, LocalClusterError

SERIES = re.compile(r"^ray_(holdfast_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
EXPORTED_WITHIN_S = 60.0
MISSING = local_cluster.missing_for_metrics()


def test_without_the_extra_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "missing_for_metrics", lambda: "opencensus")
    with pytest.raises(LocalClusterError, match=r"opencensus.*holdfast-train\[ray-metrics\]"):
        local_cluster.ensure(tmp_path, KeeperOptions(1, metrics_port=9300))
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.skipif(MISSING is not None, reason=f"Ray exports nothing without {MISSING}")
def test_every_rank_of_a_job_is_exported_by_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_ports(3)
    monkeypatch.setenv("HOLDFAST_RAY_METRICS_PORT", str(port))
    with served(tmp_path) as product:
        job = product.client.submit(spec(**ONE_NODE, train={**spec()["train"], "steps": 100_000}))

        def exported() -> dict[str, set[str]]:
            """Series -> the job's ranks in it."""
            found: dict[str, set[str]] = {}
            for node in range(3):
                for name, labels, value in SERIES.findall(scraped(port + node)):
                    if f'job="{job.id}"' in labels and float(value) > 0:
                        rank = re.search(r'rank="(\d+)"', labels)
                        found.setdefault(name, set()).add(rank[1] if rank else "")
            return found

        eventually(lambda: exported().get("holdfast_rank_step") == {"0", "1"}, EXPORTED_WITHIN_S)
        ranks_by_series = exported()
        assert (
            ranks_by_series["holdfast_rank_compute_seconds"]
            == ranks_by_series["holdfast_rank_phase"]
            == {"0", "1"}
        )
        assert ranks_by_series["holdfast_step_seconds"] == {""}
        product.client.cancel(job.id)


def scraped(port: int) -> str:
    try:
        return httpx.get(
            f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=DEADLINE_S
        ).text
    except httpx.TransportError:
        return ""


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
            return first
        except OSError:
            continue
    raise AssertionError("no ports are free")
