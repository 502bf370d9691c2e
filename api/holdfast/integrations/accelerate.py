"""Accelerate: the progress of a loop of its `Accelerator`, its checkpoints, and its place in them.

    progress = track(accelerator, "checkpoints")
    progress.resume()
    while progress.step < steps:
        for batch in progress.batches(loader):
            ...
            progress.advance(loss=loss)
            if progress.step % 100 == 0 or progress.should_stop:
                progress.save()

`save_state` of Accelerate contains the random state, but not the position of the loader, and a new
iterator of the loader draws random numbers: `batches` skips what was read, then puts the state
back. For the same losses the loader's order must be repeatable: `use_seedable_sampler=True`.

Outside of Holdfast all of this works too, without reports and without memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.integrations import random_state
from holdfast.integrations.agreed_stop import AgreedStop
from holdfast.integrations.batches import samples_of
from holdfast.integrations.memory_folders import MemoryFolders
from holdfast_workers.programs.attachment import attach

FOLDER_PREFIX = "step-"
KEPT = 2
"""Number of newest checkpoints that are kept in the folder."""


def track(accelerator: Any, folder: str | Path) -> AccelerateProgress:
    """The progress of the loop of this accelerator, whose checkpoints are in `folder`. Call it on
    every rank, after `prepare`."""
    return AccelerateProgress(accelerator, Path(folder))


class AccelerateProgress:
    """All ranks make the same calls in the same order."""

    def __init__(self, accelerator: Any, folder: Path) -> None:
        self.step = 0
        """Steps applied."""
        self.epoch = 0
        self.should_stop = False
        """Whether all ranks are to save and to return now."""
        self._accelerator = accelerator
        self._folder = folder
        self._position = 0
        self._random_state: random_state.RandomState | None = None
        self._samples = 0
        self._attachment = attach("accelerate")
        self._stop = AgreedStop()
        self._memory = MemoryFolders(self._attachment, self._stop.gather)
        accelerator.register_for_checkpointing(self)

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns its step, or 0."""
        saved = self._stop.gather(_newest(self._folder))[0]
        path = self._memory.load(newer_than=saved)
        if path is None and saved is not None:
            path = self._folder / _name(saved)
        if path is not None:
            self._accelerator.load_state(str(path))
            self._random_state = random_state.capture()
        return self.step

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of the present epoch, the first time those that are left of it."""
        if self._position and self._position >= _length(loader):
            self.epoch, self._position = self.epoch + 1, 0
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        resumed, self._random_state = self._random_state, None
        if self._position:
            loader = self._accelerator.skip_first_batches(loader, self._position)
        elif resumed is not None:
            random_state.put_back(resumed)
        for index, batch in enumerate(loader):
            if index == 0 and self._position and resumed is not None:
                random_state.put_back(resumed)
            self._position += 1
            self._samples += samples_of(batch)
            yield batch
        self.epoch, self._position = self.epoch + 1, 0

    def advance(self, *, loss: Any = None, lr: float | None = None, **metrics: float) -> None:
        """A step is applied: call it after every step of the optimizer. `loss`: a number, or a
        tensor, which is read only if that does not wait for a device."""
        self.step += 1
        samples, self._samples = self._samples, 0
        read = loss is None or isinstance(loss, (int, float)) or loss.device.type == "cpu"
        self._attachment.step(
            self.step,
            loss=float(loss) if loss is not None and read else None,
            lr=lr,
            tokens=samples * self._accelerator.num_processes,
            **metrics,
        )
        self.should_stop = self._stop.ask(self._attachment.should_stop)

    def save(self, *, to_memory_only: bool = False) -> None:
        """Save everything to the folder, and to memory under Holdfast. `to_memory_only`: not to the
        folder, unless the ranks stop now; outside of Holdfast then nothing is saved."""
        if not to_memory_only or self.should_stop:
            self._save_to_folder()
        self._memory.keep(self.step, lambda folder: self._accelerator.save_state(str(folder)))

    def state_dict(self) -> dict[str, int]:
        """The method that `register_for_checkpointing` asks for."""
        return {"step": self.step, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The method that `register_for_checkpointing` asks for."""
        self.step, self.epoch = state["step"], state["epoch"]
        self._position = state["position"]

    def _save_to_folder(self) -> None:
        """Commit by a rename: of rank 0 first, then of nodes that do not share its folder."""
        accelerator = self._accelerator
        new = self._folder / f"{_name(self.step)}.new"
        accelerator.save_state(str(new))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self._commit(new)
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process and new.exists():
            self._commit(new)

    def _commit(self, new: Path) -> None:
        whole = new.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        new.rename(whole)
        for step in sorted(_steps(self._folder))[:-KEPT]:
            shutil.rmtree(self._folder / _name(step), ignore_errors=True)


def _name(step: int) -> str:
    return f"{FOLDER_PREFIX}{step:08d}"


def _steps(folder: Path) -> list[int]:
    names = (path.name.removeprefix(FOLDER_PREFIX) for path in folder.glob(f"{FOLDER_PREFIX}*"))
    return [int(name) for name in names if name.isdecimal()]


def _newest(folder: Path) -> int | None:
    return max(_steps(folder), default=None)


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")
