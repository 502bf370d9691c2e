"""A real recovery as somebody sees it who has the job's page open: nothing is loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.end_to_end.conftest import WITHOUT_STANDBY, Product, served, spec
from tests.web.conftest import picture

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
PATIENCE_MS = 60_000
WATCH = """() => {
  window.seen = [];
  const note = () => {
    const card = document.querySelector('#incident-1');
    const said = !card ? 'none' : card.querySelector('.tag.warn') ? 'open' : 'closed';
    if (seen.at(-1) !== said) seen.push(said);
  };
  note();
  new MutationObserver(note).observe(document.querySelector('#incidents'),
    { childList: true, subtree: true, characterData: true });
}"""
STEP = "Number(document.querySelector('.verdict-numbers dd').innerText.replace(/\\D/g, ''))"


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("seen")) as started:
        yield started


def test_a_fault_and_its_recovery_are_seen_as_they_happen(
    product: Product, open_page: Callable[..., Any]
) -> None:
    # Without a standby the agent's next life is waited for: long enough to be looked at.
    train = {**spec()["train"], "steps": 5000}
    job = product.client.submit(spec(train=train, resources=WITHOUT_STANDBY))
    page = open_page(f"{product.client.address}/jobs/{job.id}")
    page.set_default_timeout(PATIENCE_MS)
    page.locator(".verdict-doing").wait_for()
    page.wait_for_function(
        f"() => {STEP} >= 20", timeout=150_000
    )  # it starts, and makes steps, before our eyes
    page.locator(".attempt-label", has_text="1").first.wait_for()
    page.locator("#incidents", has_text="No fault so far").wait_for()
    page.evaluate(WATCH)

    page.get_by_role("button", name="Inject a fault").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("What happens").select_option("agent_death")
    dialog.get_by_label("Rank").fill("0")
    dialog.get_by_role("button", name="Inject it").click()
    page.locator("#incident-1").wait_for()
    page.locator("#incident-1 .tag.warn", has_text="open").wait_for(state="detached")

    at_closing = page.evaluate(STEP)
    page.wait_for_function(f"before => {STEP} > before + 10", arg=at_closing)
    page.get_by_role("button", name="Incident 1:").wait_for()  # on the ribbon
    page.locator(".attempt-label", has_text="2").first.wait_for()
    page.locator(".legend", has_text="productive").wait_for()
    page.locator("[data-live=live]").wait_for()
    picture(page, "recovery")
    assert page.evaluate("seen") == ["none", "open", "closed"], "and nothing was loaded again"
    product.client.cancel(job.id, now=True)
