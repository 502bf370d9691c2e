"""A process of `benchmarks.data` that reads as one side; imports no other side.

    python -m benchmarks.data_parts.reader write SIDE FOLDER
    python -m benchmarks.data_parts.reader read SIDE FOLDER SETTING BATCH WARM_UP STEPS STEP_S
    python -m benchmarks.data_parts.reader digest SIDE FOLDER SETTING BATCH

The last two end with a line of JSON: the figures of the loop, and the digest of an epoch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from itertools import chain
from pathlib import Path

from benchmarks.data_parts.read_loop import beside_steps, window_digest


def main(what: str, side: str, folder: str, *options: str) -> None:
    module = import_module(f"benchmarks.data_parts.{side}_side")
    if what == "write":
        module.write(Path(folder))
        return
    setting, batch, *loop = options
    epochs = module.epochs(Path(folder), int(batch), setting)
    if what == "digest":
        print(json.dumps(window_digest(next(epochs))))
        return
    warm_up, steps, step_s = loop
    batches = chain.from_iterable(epochs)
    print(json.dumps(asdict(beside_steps(batches, int(warm_up), int(steps), float(step_s)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
