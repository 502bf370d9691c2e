"""The one stream of a tab: cut and resumed, nothing is missed and nothing is told twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from tests.support.service.live_server import SPEC, LiveServer
from tests.support.waiting import eventually

from holdfast_service.job_model.supervisor_protocol import Phase

HEARD = """
window.heard = [];
const plain = window.fetch;
window.fetch = async (address, options) => {
  const response = await plain(address, options);
  if (!String(address).includes('/live')) return response;
  const opened = options?.headers?.['Last-Event-ID'] ?? null;
  window.heard.push({ opened, of_job: String(address).includes('job=') });
  const [ours, theirs] = response.body.tee();
  (async () => {
    let text = '';
    const reader = ours.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read().catch(() => ({ done: true }));
      if (done) return;
      text += value;
      const parts = text.split('\\n\\n');
      text = parts.pop();
      for (const part of parts) {
        const event = /^event: (.*)$/m.exec(part)?.[1];
        if (event) window.heard.push({ event, data: JSON.parse(/^data: (.*)$/m.exec(part)[1]) });
      }
    }
  })();
  return new Response(theirs, response);
};
"""


def test_a_stream_that_was_cut_goes_on_where_it_was(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    job = httpx.post(
        f"{dashboard_server.address}/api/v1/jobs", json={**SPEC, "name": "cut"}
    ).json()["id"]
    of_job_at = f"{dashboard_server.address}/api/v1/jobs/{job}"
    supervisor = dashboard_server.run_job(job, 2, end=False)
    page = open_page(f"{dashboard_server.address}/cluster")
    page.add_init_script(HEARD)
    page.goto(f"{dashboard_server.address}/jobs/{job}")
    of_job = "heard.findIndex(one => one.of_job)"
    page.wait_for_function(f"() => heard.slice({of_job}).some(one => one.event === 'hello')")

    def heard(kind: str) -> list[Any]:
        return page.evaluate(
            "kind => heard.filter(one => one.event === kind).map(one => one.data)", kind
        )

    def sequence() -> list[int]:
        return [item["seq"] for item in heard("event")]

    supervisor.enter(Phase.RECOVERING)
    page.wait_for_function("() => heard.some(one => one.event === 'event')")
    before = sequence()
    dashboard_server.stop()
    page.wait_for_selector("[data-live=waiting]")
    supervisor.enter(Phase.RUNNING)  # nobody is there to tell it
    supervisor.run(1, 3, 4)
    dashboard_server.start()
    page.wait_for_selector("[data-live=live]")
    supervisor.run(1, 5, 5)
    supervisor.end()
    eventually(lambda: httpx.get(of_job_at).json()["released"])  # nothing happens after that
    last = httpx.get(f"{of_job_at}/events").json()["events"][-1]["seq"]
    page.wait_for_function(
        "last => heard.some(one => one.event === 'event' && one.data.seq >= last)", arg=last
    )
    page.wait_for_function(
        "() => heard.some(one => one.event === 'row' && one.data.state === 'SUCCEEDED')"
    )

    told = sequence()
    assert told[: len(before)] == before
    assert told == list(range(told[0], told[0] + len(told)))  # no gap, no repeat
    assert told[-1] == last
    opened = page.evaluate("heard.filter(one => 'opened' in one).map(one => one.opened)")
    assert opened[-1] is not None  # it was resumed, not begun anew
    open_page.errors[:] = [error for error in open_page.errors if "ERR_" not in error]  # type: ignore[attr-defined]


def test_a_tab_has_one_stream(open_page: Callable[..., Any], dashboard_server: LiveServer) -> None:
    streams: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda one: "/api/v1/live" in one.url and streams.append(one.url))
    page.goto(f"{dashboard_server.address}/jobs")
    page.wait_for_selector("[data-live=live]")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Cluster").wait_for()
    page.wait_for_timeout(200)
    assert len(streams) == 1
