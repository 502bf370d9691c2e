"""A control plane with a big job and a small job, and the condition for a completely drawn page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.service.databases import run_in_thread
from tests.support.service.live_server import LiveServer
from tests.support.web import seed

from holdfast_service.store.engine import Store

TIMEOUT_MS = 60_000
"""A timeout for busy machines; other tests measure the durations."""
PAINTED = """const painted = (canvas) => canvas && canvas.width > 0 && canvas.getContext('2d')
  .getImageData(0, 0, canvas.width, Math.min(canvas.height, 120)).data.some((byte) => byte !== 0);
"""
DRAWN = f"""() => {{
  {PAINTED}
  const has = (selector) => document.querySelector(selector);
  const canvases = document.querySelectorAll('.heat-canvas, [data-metric=loss] canvas');
  return has('.job-bar [aria-current]') && !has('main .ghost, main [aria-busy=true]')
    && (!has('.verdict') || has('.verdict-doing'))
    && (!has('#time') || has('.ribbon-drawing rect'))
    && (!has('#charts') || has('[data-metric=loss] canvas'))
    && [...canvases].every(painted)
    && performance.now() / 1000;
}}"""
"""Whether the shown tab of a job of the scene is completely drawn."""


@dataclass
class Scene:
    """A server with a big job and a small job."""

    server: LiveServer
    big: seed.Seeded
    small: seed.Seeded

    @property
    def address(self) -> str:
        return f"{self.server.address}/jobs/{self.big.job_id}"

    def write(self, change: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
        """Change the store like another server does."""

        async def apply() -> None:
            store = await Store.open(self.server.settings)
            try:
                await change(store)
            finally:
                await store.close()

        run_in_thread(apply())


@contextmanager
def open_scene(folder: Path, size: seed.Size) -> Iterator[Scene]:
    """`size`: the size of the big job."""
    server = LiveServer(folder)

    async def fill() -> tuple[seed.Seeded, seed.Seeded]:
        store = await Store.open(server.settings)
        small = seed.Size(ranks=16, steps=400, events=60, log_lines=100)
        try:
            other = await seed.big_job(store, small, name="atlas-probe")
            return await seed.big_job(store, size), other
        finally:
            await store.close()

    big, small = asyncio.run(fill())
    server.start()
    try:
        yield Scene(server, big, small)
    finally:
        server.stop()


def open_drawn_page(open_page: Callable[..., Any], address: str, **options: Any) -> Any:
    """The page at that address, after its first data and its charts are drawn."""
    page = open_page(address, timezone_id="UTC", **options)
    page.set_default_timeout(TIMEOUT_MS)
    page.wait_for_function(DRAWN)
    return page
