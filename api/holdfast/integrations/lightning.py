"""Lightning: steps, metrics and stops of an unchanged script, and its random state.

Lightning calls `pytorch_lightning_callbacks` or `lightning_callbacks` for every `Trainer`, because
the installation registers them as entry points (`callbacks_factory`). Outside of Holdfast they
return no callback.

Lightning's checkpoints lack the state of the random number generators; the callback adds that of
every rank. They contain the position of a data loader only if the loader has `state_dict`.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.integrations.batches import samples_of
from holdfast.integrations.memory_setting import keeps_in_memory
from holdfast_workers.programs.attachment import Attachment, attach
from holdfast_workers.protocol.messages import Tier

if TYPE_CHECKING:
    from holdfast.integrations.agreed_stop import AgreedStop
    from holdfast.integrations.memory_folders import MemoryFolders

STATE_KEY = "holdfast"
"""The key in a Lightning checkpoint below which the callback adds its own state."""
EVERY_STEPS_VARIABLE = "LIGHTNING_MEMORY_EVERY_STEPS"
"""Steps between two checkpoints in memory; not set: none."""
PACKAGES = ("pytorch_lightning", "lightning.pytorch")
CHECKPOINT = "memory.ckpt"
STOP_FILE = "last-holdfast.ckpt"
"""Name of the checkpoint that is saved before a stop."""


def pytorch_lightning_callbacks() -> list[Any]:
    """Entry point of the package `pytorch_lightning`."""
    return _callbacks("pytorch_lightning")


def lightning_callbacks() -> list[Any]:
    """Entry point of the package `lightning`."""
    return _callbacks("lightning.pytorch")


def memory_checkpoints(every_n_train_steps: int) -> Any:
    """A callback for a script's own `callbacks`: a checkpoint in memory after so many steps, from
    which a restarted `fit` continues. Without a line in the script: the job's environment sets
    `LIGHTNING_MEMORY_EVERY_STEPS`. Outside of Holdfast, and in a job without a memory tier, it
    does nothing."""
    package = next((name for name in PACKAGES if name in sys.modules), PACKAGES[0])
    attachment = attach("lightning")
    if not (attachment.active and keeps_in_memory()):
        return importlib.import_module(package).Callback()
    return _memory_callback(package, attachment, every_n_train_steps)


def _callbacks(package: str) -> list[Any]:
    attachment = attach("lightning")
    if not attachment.active:
        return []
    base = importlib.import_module(package).Callback
    found = [type("HoldfastProgress", (TrainerProgress, base), {})(attachment)]
    every = _steps_between(os.environ.get(EVERY_STEPS_VARIABLE, ""))
    if every and keeps_in_memory():
        found.append(_memory_callback(package, attachment, every))
    return found


def _steps_between(text: str) -> int:
    """The number of steps between two checkpoints in memory; 0 for none. Raises ValueError."""
    if text and not text.isdecimal():
        raise ValueError(
            f"{EVERY_STEPS_VARIABLE} is {text!r}: set it to a whole number of steps, or not at all"
        )
    return int(text or "0")


def _memory_callback(package: str, attachment: Attachment, every: int) -> Any:
    """Lightning resumes by itself from a callback that is an OnExceptionCheckpoint, if the file
    exists to which its `ckpt_path` leads."""
    callbacks = importlib.import_module(f"{package}.callbacks")
    bases = (TrainerMemory, callbacks.OnExceptionCheckpoint)
    return type("HoldfastMemory", bases, {})(attachment, every)


class TrainerProgress:
    """The hooks of a `Callback` that shows a Trainer's progress; combined with the class
    `Callback` of the package that the script uses."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._stop: Any = None
        self._step = 0
        self._samples = 0
        self._random_state: Any = None
        self._stopping = False
        self._saved: Path | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from holdfast.integrations import random_state
        from holdfast.integrations.agreed_stop import AgreedStop

        self._stop = AgreedStop()
        self._step, self._samples = trainer.global_step, 0
        if self._random_state is not None:  # the iterator of the loader, which draws, exists
            random_state.put_back(self._random_state)
            self._random_state = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += samples_of(batch)
        step = trainer.global_step
        if step == self._step:
            return  # gradients accumulate
        samples, self._step, self._samples = self._samples, step, 0
        self._attachment.step(
            step,
            loss=_loss_of(outputs, read=step % max(1, trainer.log_every_n_steps) == 0),
            lr=_learning_rate(trainer.optimizers),
            tokens=samples * trainer.world_size,
        )
        if self._stop.ask(self._attachment.should_stop) and not self._stopping:
            self._stopping = True
            self._save(trainer)
            _stop(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """An evaluation makes no steps, and may take long."""
        self._attachment.alive()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        from holdfast.integrations import random_state

        if self._stop is not None:  # every rank dumps a checkpoint, and rank 0 writes it
            states = self._stop.gather(random_state.capture())
            checkpoint[STATE_KEY] = {"random": states}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get(STATE_KEY, {}).get("random", [])
        if trainer.global_rank < len(states):
            self._random_state = states[trainer.global_rank]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Keep the checkpoint of the stop the newest: a Trainer that stops within an epoch ends the
        epoch, and a later checkpoint of that end would lead to the next one."""
        if self._saved is not None and trainer.is_global_zero and self._saved.exists():
            os.utime(self._saved)

    def _save(self, trainer: Any) -> None:
        """Save beside the script's own checkpoints, with a name that `ckpt_path="last"` finds."""
        own = [each for each in trainer.checkpoint_callbacks if not isinstance(each, TrainerMemory)]
        folders = [getattr(callback, "dirpath", None) for callback in own]
        if folder := next(filter(None, folders), None):
            self._saved = Path(folder) / STOP_FILE
            trainer.save_checkpoint(self._saved)


class TrainerMemory:
    """The hooks of a callback that keeps the Trainer's checkpoints in memory; combined with the
    class `OnExceptionCheckpoint` of the package that the script uses."""

    _has_resumed: ClassVar[bool] = False
    """The first Trainer of a process resumes; a later one starts as its script says."""

    def __init__(self, attachment: Attachment, every: int) -> None:
        self._attachment = attachment
        self._every = every
        self._memory: MemoryFolders | None = None
        self._agreed: AgreedStop | None = None
        self._last = 0
        self.dirpath = ""
        self._resumed = Path()
        place = attachment.place
        in_memory = place is not None and place.restore.tier in (Tier.OWN_RAM, Tier.PARTNER_RAM)
        if place is not None and in_memory and not TrainerMemory._has_resumed:
            room = Path(place.segment_path).parent / "resumed"
            room.mkdir(exist_ok=True)
            self._resumed = room / CHECKPOINT
            self._resumed.touch()

    @property
    def ckpt_path(self) -> str:
        """The path at which Lightning looks for a checkpoint to resume: a file that stands for the
        one in memory, whose content arrives in `setup`."""
        return str(self._resumed) if self._resumed.name else ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The process group exists, and nothing is restored yet."""
        if stage != "fit" or not self._attachment.active:
            return
        from holdfast.integrations.agreed_stop import AgreedStop
        from holdfast.integrations.memory_folders import MemoryFolders

        self._agreed = AgreedStop()
        self._memory = MemoryFolders(self._attachment, self._agreed.gather)
        if self._resumed.name:
            loaded = self._memory.load(newer_than=None)
            if loaded is not None and self._memory.gives:
                _remove(self._resumed)
                (loaded / CHECKPOINT).replace(self._resumed)
            TrainerMemory._has_resumed = True
            self._agreed.gather(None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = trainer.global_step
        if self._resumed.name:
            _remove(self._resumed)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._memory is None or step == self._last or step % self._every:
            return
        self._last = step
        self._memory.keep(step, lambda folder: _save_to(trainer, folder / CHECKPOINT))

    def on_exception(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Make no further collective call after an error: the peers may be gone."""

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing left to remove."""


def _save_to(trainer: Any, path: Path) -> None:
    """Raises OSError, on the rank that could not write."""
    try:
        trainer.save_checkpoint(path)
    except OSError:
        trainer.strategy.barrier()  # where the other ranks wait at the end of `save_checkpoint`
        raise


def _remove(path: Path) -> None:
    """Remove a file or a folder: a sharded checkpoint is a folder. Ranks of a node share it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _stop(trainer: Any) -> None:
    """Stop after this step, even before a minimum that the script sets: the node may be about to
    go, and the next attempt continues."""
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True


def _loss_of(outputs: Any, *, read: bool) -> float | None:
    """The loss of a training step. `read`: also if reading it waits for an accelerator."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None or not (read or getattr(loss, "device", None) is None or loss.is_cpu):
        return None
    return float(loss)


def _learning_rate(optimizers: list[Any]) -> float | None:
    if not optimizers or not optimizers[0].param_groups:
        return None
    rate = optimizers[0].param_groups[0].get("lr")
    return float(rate) if isinstance(rate, (int, float)) or getattr(rate, "is_cpu", False) else None
