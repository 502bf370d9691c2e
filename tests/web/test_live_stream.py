"""The live stream of a tab: after an interruption no message is missed or repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from tests.support.service.live_server import LiveServer
from tests.support.waiting import DEADLINE_S, eventually
from tests.web.conftest import submitted

from holdfast_service.job_model.supervisor_protocol import Phase

RECORD_MESSAGES = """
window.received = [];
const plain = window.fetch;
window.fetch = async (address, options) => {
  const response = await plain(address, options);
  if (!String(address).includes('/live')) return response;
  const opened = new Headers(options?.headers).get('Last-Event-ID');
  window.received.push({ opened, of_job: String(address).includes('job=') });
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
        if (event) window.received.push({ event, data: JSON.parse(/^data: (.*)$/m.exec(part)[1]) });
      }
    }
  })();
  return new Response(theirs, response);
};
"""


def test_an_interrupted_stream_resumes_at_its_position(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    job = submitted(dashboard_server, name="cut")
    of_job_at = f"{dashboard_server.address}/api/v1/jobs/{job}"
    supervisor = dashboard_server.run_job(job, 2, end=False)
    page = open_page(f"{dashboard_server.address}/cluster")
    page.add_init_script(RECORD_MESSAGES)
    page.goto(f"{dashboard_server.address}/jobs/{job}")
    of_job = "received.findIndex(message => message.of_job)"
    page.wait_for_function(
        f"() => received.slice({of_job}).some(message => message.event === 'hello')"
    )

    def received(kind: str) -> list[Any]:
        messages: list[Any] = page.evaluate(
            "kind => received.filter(({ event }) => event === kind).map(({ data }) => data)",
            kind,
        )
        return messages

    def sequence() -> list[int]:
        return [item["seq"] for item in received("event")]

    supervisor.enter(Phase.RECOVERING)
    page.wait_for_function("() => received.some(message => message.event === 'event')")
    before = sequence()
    dashboard_server.stop()
    page.wait_for_selector("[data-live=waiting]")
    supervisor.enter(Phase.RUNNING)  # while the server is down
    supervisor.run(1, 3, 4)
    dashboard_server.start()
    page.wait_for_selector("[data-live=live]")
    supervisor.run(1, 5, 5)
    supervisor.end()
    eventually(
        lambda: httpx.get(of_job_at, timeout=DEADLINE_S).json()["released"]
    )  # no event follows
    last = httpx.get(f"{of_job_at}/events", timeout=DEADLINE_S).json()["items"][-1]["seq"]
    page.wait_for_function(
        "last => received.some(message => message.event === 'event' && message.data.seq >= last)",
        arg=last,
    )
    page.wait_for_function(
        "() => received.some(({ event, data }) => event === 'row' && data.state === 'SUCCEEDED')"
    )

    numbers = sequence()
    assert numbers[: len(before)] == before
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # no gap, no repeat
    assert numbers[-1] == last
    opened = page.evaluate(
        "received.filter(message => 'opened' in message).map(message => message.opened)"
    )
    assert opened[-1] is not None  # resumed, not started anew
    open_page.errors[:] = [error for error in open_page.errors if "ERR_" not in error]  # type: ignore[attr-defined]


def test_a_tab_has_a_single_stream(
    open_page: Callable[..., Any], dashboard_server: LiveServer
) -> None:
    streams: list[str] = []
    page = open_page("about:blank")

    def record_stream(request: Any) -> None:
        if "/api/v1/live" in request.url:
            streams.append(request.url)

    page.on("request", record_stream)
    page.goto(f"{dashboard_server.address}/jobs")
    page.wait_for_selector("[data-live=live]")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Cluster").wait_for()
    page.wait_for_timeout(200)
    assert len(streams) == 1
