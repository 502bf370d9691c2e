"""The device's communicators and its probes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.gpu_parts.figures import CommunicatorFigures, ProbeFigures, Setting
from holdfast_workers.agent import reforming
from holdfast_workers.agent.reforming import Reform
from holdfast_workers.health.nvml import Accelerators
from holdfast_workers.parallelize import process_groups

WAIT = timedelta(seconds=30)


def communicator(setting: Setting) -> CommunicatorFigures:
    """Raises ValueError if a collective of a formed world gives a wrong sum."""
    os.environ.update(reforming.communicator_variables(Reform.IN_PLACE, setting.device))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WAIT)
    with _formed(store, 1, setting) as form_s:
        began = time.monotonic()
        aborted = process_groups.abort_device_groups()
        abort_s = time.monotonic() - began
    with _formed(store, 2, setting) as reform_s:
        pass
    if setting.on_device and aborted < 2:
        raise ValueError(f"{aborted} communicators were aborted, and two groups were formed")
    return CommunicatorFigures(
        backend="nccl" if setting.on_device else "gloo",
        aborted=aborted,
        form_s=round(form_s, 4),
        abort_s=round(abort_s, 4),
        reform_s=round(reform_s, 4),
    )


def nvml(setting: Setting) -> ProbeFigures:
    """Raises NvmlUnavailable, or ValueError if a device that is there counts as lost."""
    accelerators = Accelerators.of_this_node()
    try:
        began = time.monotonic()
        readings = accelerators.read()
        read_s = time.monotonic() - began
        xids = accelerators.xids(time.time())
    finally:
        accelerators.close()
    if not readings or any(reading.lost for reading in readings):
        raise ValueError(f"no device, or a lost one: {readings}")
    names = [each.name for each in fields(readings[0]) if each.name not in ("device", "lost")]
    measured = [n for n in names if all(getattr(reading, n) is not None for reading in readings)]
    return ProbeFigures(
        devices=len(readings),
        measured=measured,
        not_measured=[name for name in names if name not in measured],
        xids=len(xids),
        read_s=round(read_s, 4),
    )


@contextmanager
def _formed(store: TCPStore, attempt: int, setting: Setting) -> Iterator[float]:
    """A world of one rank with two groups, each of which has summed; yields the seconds that took.
    It is left at the end."""
    began = time.monotonic()
    process_groups.form(PrefixStore(f"attempt/{attempt}", store), 0, 1, WAIT, setting.device)
    try:
        for group in (dist.group.WORLD, dist.new_group([0], timeout=WAIT)):
            ones = torch.ones(1024, device=setting.device)
            dist.all_reduce(ones, group=group)
            if float(ones.sum()) != 1024:
                raise ValueError(f"the sum of one rank in attempt {attempt} is {ones.sum()}")
        yield time.monotonic() - began
    finally:
        process_groups.leave()
