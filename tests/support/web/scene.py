"""A control plane with a big job and a small one, and when the page of the big one is drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.service.live_server import LiveServer
from tests.support.web import seed
from tests.web.conftest import completed

from holdfast_service.store.engine import Store

PATIENCE_MS = 40_000
"""Of what a busy machine may take; how long things may take is measured by tests of their own."""
PAINTED = """const painted = (one) => one && one.width > 0 && one.getContext('2d')
  .getImageData(0, 0, one.width, Math.min(one.height, 120)).data.some((byte) => byte !== 0);
"""
DRAWN = f"""() => {{
  {PAINTED}
  return document.querySelector('.verdict-doing')
    && document.querySelector('.ribbon-drawing rect')
    && painted(document.querySelector('.heat-canvas'))
    && painted(document.querySelector('[data-metric=loss] canvas'))
    && performance.now() / 1000;
}}"""


@dataclass
class Scene:
    """A server with the big job and a small one."""

    server: LiveServer
    big: seed.Seeded
    small: seed.Seeded

    @property
    def address(self) -> str:
        return f"{self.server.address}/jobs/{self.big.job_id}"

    def write(self, change: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
        """Change the store, as another server would."""

        async def through() -> None:
            store = await Store.open(self.server.settings)
            try:
                await change(store)
            finally:
                await store.close()

        completed(through())


@contextmanager
def opened(folder: Path, size: seed.Size) -> Iterator[Scene]:
    """`size`: of the big job."""
    server = LiveServer(folder)

    async def filled() -> tuple[seed.Seeded, seed.Seeded]:
        store = await Store.open(server.settings)
        small = seed.Size(ranks=16, steps=400, events=60, log_lines=100)
        try:
            other = await seed.big_job(store, small, name="atlas-probe")
            return await seed.big_job(store, size), other
        finally:
            await store.close()

    big, small = asyncio.run(filled())
    server.start()
    try:
        yield Scene(server, big, small)
    finally:
        server.stop()


def drawn(open_page: Callable[..., Any], address: str, **options: Any) -> Any:
    """The page at that address, once its first things and its charts are drawn."""
    page = open_page(address, timezone_id="UTC", **options)
    page.set_default_timeout(PATIENCE_MS)
    page.wait_for_function(DRAWN)
    return page
