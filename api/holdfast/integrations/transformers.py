"""Transformers: a callback for its `Trainer`, and the checkpoint that a restarted script resumes.

    trainer = Trainer(..., callbacks=[HoldfastCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

The Trainer saves its random state and skips the batches of an interrupted epoch by itself, so that
a resumed run has the same losses. Outside of Holdfast the callback does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from holdfast.integrations.agreed_stop import AgreedStop
from holdfast_workers.programs.attachment import attach

FOLDER_PREFIX = "checkpoint-"
STATE_FILE = "trainer_state.json"
"""The last file of a checkpoint that rank 0 writes."""


class HoldfastCallback(TrainerCallback):
    """Reports each step; saves and stops when Holdfast asks for it."""

    def __init__(self) -> None:
        self._attachment = attach("transformers")
        self._stop: AgreedStop | None = None
        self._tokens_seen = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self._attachment.active:
            self._stop = AgreedStop()
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
    """The folder of the newest whole checkpoint in `output_dir`, for `resume_from_checkpoint`; None
    if there is none. Call it on every rank, after the `TrainingArguments` are made: all ranks get
    the choice of rank 0."""
    folder = Path(output_dir)
    return _same_on_all_ranks(lambda: _newest_whole(folder))


def _newest_whole(folder: Path) -> str | None:
    names = {
        path.name: [file.name for file in path.iterdir()]
        for path in folder.glob(f"{FOLDER_PREFIX}*")
    }
    chosen = newest_whole(names, int(os.environ.get("WORLD_SIZE", "1")))
    return str(folder / chosen) if chosen else None


def newest_whole(checkpoints: Mapping[str, Iterable[str]], world_size: int) -> str | None:
    """The name of the checkpoint to resume. `checkpoints`: name -> names of its files.

    A rank that is killed may leave a checkpoint without its last files. One that lacks a rank's
    random state is chosen only if all do: it was saved by fewer ranks.
    """
    wanted = {"rng_state.pth"}
    if world_size > 1:
        wanted = {f"rng_state_{rank}.pth" for rank in range(world_size)}
    whole: list[tuple[bool, int, str]] = []
    for name, files in checkpoints.items():
        step = name.removeprefix(FOLDER_PREFIX)
        present = set(files)
        if step.isdecimal() and STATE_FILE in present:
            whole.append((wanted <= present, int(step), name))
    return max(whole)[-1] if whole else None


def _same_on_all_ranks(choose: Any) -> str | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        found: str | None = choose()
        return found
    choice = [choose() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(choice)
    return choice[0]


def _tokens(state: Any) -> int:
    """Tokens of all ranks so far; 0 unless the script counts them (`include_num_input_tokens_seen`
    of its arguments)."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)
