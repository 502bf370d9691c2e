"""A real recovery appears on the open page of the job, without a reload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.end_to_end.conftest import WITHOUT_STANDBY, Product, served, spec
from tests.web.conftest import save_screenshot

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(300)]
TIMEOUT_MS = 60_000
WATCH = """() => {
  window.seen = [];
  const record = () => {
    const card = document.querySelector('#incident-1');
    const status = !card ? 'none' : card.querySelector('.tag.warn') ? 'open' : 'closed';
    if (seen.at(-1) !== status) seen.push(status);
  };
  record();
  new MutationObserver(record).observe(document.querySelector('#incidents'),
    { childList: true, subtree: true, characterData: true });
}"""
STEP = "Number(document.querySelector('.verdict-numbers dd').innerText.replace(/\\D/g, ''))"


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with served(tmp_path_factory.mktemp("seen"), nodes=2) as started:
        yield started


def test_a_fault_and_its_recovery_appear_on_the_open_page(
    product: Product, open_page: Callable[..., Any]
) -> None:
    # Without a standby the job waits for the agent's next process: long enough to observe.
    train = {**spec()["train"], "steps": 5000}
    job = product.client.submit(spec(train=train, resources=WITHOUT_STANDBY))
    page = open_page(f"{product.client.address}/jobs/{job.id}")
    page.set_default_timeout(TIMEOUT_MS)
    page.locator(".verdict-doing").wait_for()
    page.wait_for_function(
        f"() => {STEP} >= 20", timeout=150_000
    )  # the job has started and makes steps
    page.locator(".attempt-label", has_text="1").first.wait_for()
    page.locator("#incidents", has_text="No fault and no resize so far").wait_for()
    page.evaluate(WATCH)

    page.get_by_role("button", name="Inject a fault").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Fault", exact=True).select_option("agent_death")
    dialog.get_by_label("Rank").fill("0")
    dialog.get_by_role("button", name="Inject", exact=True).click()
    page.locator("#incident-1").wait_for()
    page.locator("#incident-1 .tag.warn", has_text="open").wait_for(state="detached")

    at_closing = page.evaluate(STEP)
    page.wait_for_function(f"before => {STEP} > before + 10", arg=at_closing)
    page.get_by_role("button", name="Incident 1:").wait_for()  # on the ribbon
    page.locator(".attempt-label", has_text="2").first.wait_for()
    page.locator(".legend", has_text="productive").wait_for()
    page.locator("[data-live=live]").wait_for()
    save_screenshot(page, "recovery")
    assert page.evaluate("seen") == ["none", "open", "closed"], "without a reload"
    product.client.cancel(job.id, now=True)
