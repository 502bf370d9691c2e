"""A recipe whose module, once imported, has a thread that nearly always holds a lock."""

from __future__ import annotations

import threading
import time

from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import World

THREAD_NAME = "lock-holder"
_lock = threading.Lock()


def _hold_nearly_always() -> None:
    while True:
        with _lock:
            time.sleep(0.05)
        time.sleep(0.002)


threading.Thread(target=_hold_nearly_always, name=THREAD_NAME, daemon=True).start()


class LocksInThread(PretrainRecipe):
    """In a process forked from one that has imported this module, the lock is held for ever."""

    def build(self, world: World) -> None:
        with _lock:
            super().build(world)
