"""A reconciler waits at the supervisor for events and for the first step of an attempt."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.service.supervisor.test_supervisor_shell import row
from tests.support.waiting import DEADLINE_S, eventually

from holdfast_service.job_model.events.attempts import StandbyEvent
from holdfast_service.job_model.supervisor_protocol import Cursors
from holdfast_service.supervisor.event_log import EventLog
from holdfast_service.supervisor.news import News
from holdfast_service.supervisor.run_buffer import RunBuffer


def test_a_waiter_returns_as_soon_as_there_is_news_and_at_once_if_there_is() -> None:
    news, there = News(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(news.wait, there.is_set, 600.0)
        news.tell()  # of something else
        time.sleep(0.05)
        assert not waiting.done()
        there.set()
        news.tell()
        assert waiting.result(DEADLINE_S) is True
    assert news.wait(there.is_set, 0.001) is True
    there.clear()
    assert news.wait(there.is_set, 0.001) is False


def test_a_later_waiter_ends_an_earlier_one() -> None:
    news = News()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(news.wait, lambda: False, 600.0)
        eventually(lambda: news._waiter == 1)
        second = pool.submit(news.wait, lambda: False, 0.2)
        assert first.result(DEADLINE_S) is False
        assert second.result(DEADLINE_S) is False


def test_news_are_events_and_first_steps() -> None:
    events, buffer = EventLog(), RunBuffer()
    stored = Cursors(event=0, row=(1, 5))
    buffer.add("n0", "a", [row(1, 6)], {}, [], {})
    assert not buffer.has_attempt_after(stored.row[0])
    buffer.add("n0", "a", [row(2, 6)], {}, [], {})
    assert buffer.has_attempt_after(stored.row[0])
    assert not events.has_after(stored.event)
    events.append(StandbyEvent(agent="n1", state="ready"))
    assert events.has_after(stored.event)
    assert not events.has_after(events.after(0)[-1].seq)


def test_a_waiter_hears_of_events_that_a_successor_takes_over() -> None:
    news = News()
    before, events = EventLog(), EventLog(on_events=news.tell)
    before.append(StandbyEvent(agent="n1", state="ready"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(news.wait, lambda: events.has_after(0), 600.0)
        eventually(lambda: news._waiter == 1)
        events.adopt(before.not_backed_up_by("n0", "a"), 2)
        assert waiting.result(DEADLINE_S) is True
