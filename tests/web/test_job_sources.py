"""The sources on a job's page: what each has, and how often it was read; also on a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect
from tests.support.service.fake_cluster import three_nodes
from tests.support.service.live_server import SPEC, LiveServer
from tests.web.conftest import PHONE, assert_no_violations

from holdfast import Client
from holdfast_workers.spec import DataSpec

LONG = f"s3://lab/{'deep/' * 20}part-*.parquet"
SOURCES = (
    {"path": "/data/code/**/*.jsonl.zst", "weight": 0.75},
    {"path": LONG, "weight": 0.25},
)


def prepare_server(server: LiveServer) -> None:
    server.cluster.nodes = three_nodes(roomy=True)


def test_a_job_shows_what_it_has_read_of_each_source(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    section = DataSpec.model_validate({"sources": SOURCES})
    sets = [
        {
            "uri": f"{dashboard_server.settings.data_dir.absolute()}/tokens/{at:032}",
            "origin": section.origin_of(source),
            "digest": "0" * 32,
            "vocabulary": 256,
            "tokens": 10_000,
            "sequence_length": 256,
            "samples": 40,
            "tokenizer": "ab" * 16,
        }
        for at, source in enumerate(section.sources)
    ]
    with Client(dashboard_server.address) as client:
        data = {"sources": [*SOURCES], "prepared": sets, "special_tokens": {"pad": {"id": 3}}}
        job = client.submit({**SPEC, "data": data}).id
        batch = client.get(job).spec["train"]["global_batch"]
    dashboard_server.run_job(job, 3, end=False)
    page = open_page(f"{dashboard_server.address}/jobs/{job}", viewport=PHONE)
    shown = page.locator("#sources")
    expect(shown).to_contain_text(f"bytes, 256 tokens, digest {'ab' * 16}, pad 3")
    read = 3 * batch
    rows = shown.locator("tbody tr")
    for row, weight in zip(rows.all(), (0.75, 0.25), strict=True):
        expect(row).to_contain_text(str(weight))
        expect(row).to_contain_text("10K")
        expect(row).to_contain_text(f"{read * weight / 40:.2f}")
    cell = rows.nth(1).locator("td").first
    expect(cell).to_have_text("s3://lab/deep/d…ep/deep/deep/deep/part-*.parquet")
    expect(cell).to_have_attribute("title", LONG)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
    assert_no_violations(page)
