"""The state of the random number generators that a training program draws from by default: those of
Python, numpy and torch, and of each CUDA device.

The state consists of plain values and tensors, so that `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

RandomState = dict[str, Any]


def capture() -> RandomState:
    """The present state."""
    version, words, gauss = random.getstate()
    state: RandomState = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def put_back(state: RandomState) -> None:
    """Continue from `state`. Generators that it does not contain stay as they are."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    devices = state.get("cuda", ())
    if devices and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in devices])
