"""Transformers: a callback for its `Trainer`, and the checkpoint that a restarted script resumes.

    trainer = Trainer(..., callbacks=[HoldfastCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

The Trainer saves its random state and skips the batches of an interrupted epoch by itself, so that
a resumed run has the same losses. Outside of Holdfast the callback does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from holdfast.integrations.agreed_stop import AgreedStop
from holdfast.integrations.memory_folders import MemoryFolders
from holdfast.integrations.trainer_folders import FOLDER_PREFIX, newest_whole
from holdfast_workers.programs.attachment import attach


class HoldfastCallback(TrainerCallback):
    """Reports each step, saves and stops when Holdfast asks for it, and keeps a copy of every
    checkpoint in memory."""

    def __init__(self) -> None:
        self._attachment = attach("transformers")
        self._stop: AgreedStop | None = None
        self._memory: MemoryFolders | None = None
        self._tokens_seen = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._attachment.active:
            self._stop = AgreedStop()
            self._memory = MemoryFolders(self._attachment, self._stop.gather)
            self._tokens_seen = _tokens(state)
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._stop is None:
            return control
        if not control.should_log:  # otherwise the log of this step follows, with its loss
            self._report(args, state, {})
        if self._stop.ask(self._attachment.should_stop):
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
        if self._stop is not None and logs and "loss" in logs:
            self._report(args, state, logs)
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """An evaluation makes no steps, and may take long."""
        self._attachment.alive()
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._memory is not None:
            folder = Path(args.output_dir) / f"{FOLDER_PREFIX}{state.global_step}"
            self._memory.keep_copy(state.global_step, folder)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._stop is not None:
            self._stop.close()
        return control

    def _report(self, args: Any, state: Any, logs: Mapping[str, Any]) -> None:
        """The Trainer's loss is the mean since its last log: reading it costs nothing here."""
        seen = _tokens(state)
        tokens, self._tokens_seen = seen - self._tokens_seen, seen
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._attachment.step(
            state.global_step,
            loss=logs.get("loss"),
            grad_norm=logs.get("grad_norm"),
            lr=logs.get("learning_rate"),
            tokens=tokens or samples,
        )


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The folder of the newest whole checkpoint, in memory or in `output_dir`, for
    `resume_from_checkpoint`; None if there is none. Call it on every rank, after the
    `TrainingArguments` are made: all ranks get the same step. Raises StateMissing."""
    folder, gather = Path(output_dir), AgreedStop().gather
    saved = gather(_newest_whole(folder))[0]
    step = int(saved.removeprefix(FOLDER_PREFIX)) if saved else None
    in_memory = MemoryFolders(attach("transformers"), gather).load(newer_than=step)
    if in_memory is not None:
        return str(in_memory)
    return str(folder / saved) if saved else None


def _newest_whole(folder: Path) -> str | None:
    names = {
        path.name: [file.name for file in path.iterdir()]
        for path in folder.glob(f"{FOLDER_PREFIX}*")
    }
    return newest_whole(names, int(os.environ.get("WORLD_SIZE", "1")))


def _tokens(state: Any) -> int:
    """Tokens of all ranks so far; 0 unless the script counts them (`include_num_input_tokens_seen`
    of its arguments)."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)
