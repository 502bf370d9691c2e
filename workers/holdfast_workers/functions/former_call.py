"""Deletes what a call of the user's function has left behind, before the next call."""

from __future__ import annotations

import gc
from typing import Any

from torch.utils.data import _utils

LOADER_ENDS_S = 0.01


def delete_objects() -> None:
    """Delete the objects that nothing refers to any more.

    Among them may be iterators of data loaders. The collector closes their queues first, so they
    cannot tell their workers to end any more, and would wait 5 s for each worker before they end it
    by a signal. They wait for `LOADER_ENDS_S` here.
    """
    settings: Any = _utils
    usual = settings.MP_STATUS_CHECK_INTERVAL
    settings.MP_STATUS_CHECK_INTERVAL = LOADER_ENDS_S
    try:
        gc.collect()
    finally:
        settings.MP_STATUS_CHECK_INTERVAL = usual
