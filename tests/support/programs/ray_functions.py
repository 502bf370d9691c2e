"""Small Ray Train functions as users write them, which name nothing of Holdfast."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.train import Checkpoint
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> dict[str, float]:
    """Dropout, a shuffled loader, and a checkpoint per epoch to which each rank brings a part.

    `kills`: a list of [rank, epoch, attempt]; that rank kills itself in the middle of the epoch.
    `loses_storage`: the run's folder is gone then too.
    """
    context = ray.train.get_context()
    rank, attempt = context.get_world_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(rank)
    points = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    )
    layers = (torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), config.get("lr", 0.01))
    first, loss = _resume(rank, model, optimizer), torch.zeros(())
    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == 3 and [rank, epoch, attempt] in config.get("kills", []):
                if config.get("loses_storage"):
                    shutil.rmtree(context.get_storage().experiment_fs_path)
                os.kill(os.getpid(), signal.SIGKILL)
        _report(rank, model, optimizer, epoch, loss)
    return {"loss": loss.item()}


def _resume(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "model.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(torch.load(Path(folder) / f"random-{rank}.pt"))
    return int(state["epoch"]) + 1


def _report(
    rank: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    loss: torch.Tensor,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.get_rng_state(), Path(folder) / f"random-{rank}.pt")
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, Path(folder) / "model.pt")
        metrics = {"epoch": epoch, "loss": loss.item()}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def describe(config: dict[str, Any]) -> None:
    """Write all attributes of each rank's context, and what its calls return."""
    context = ray.train.get_context()
    found = {
        "world_rank": context.get_world_rank(),
        "world_size": context.get_world_size(),
        "local_rank": context.get_local_rank(),
        "local_world_size": context.get_local_world_size(),
        "node_rank": context.get_node_rank(),
        "experiment": context.get_experiment_name(),
        "storage": context.get_storage().experiment_fs_path,
        "device": str(ray.train.torch.get_device()),
        "word": ray.train.collective.broadcast_from_rank_zero(f"of {context.get_world_rank()}"),
        "preemption": ray.train.get_preemption_info(),
        "checkpoint": ray.train.get_checkpoint(),
        "reported": len(ray.train.get_all_reported_checkpoints()),
        "config": config,
    }
    ray.train.collective.barrier()
    (Path(config["folder"]) / f"{found['world_rank']}.json").write_text(json.dumps(found))


def report_three(config: dict[str, Any]) -> None:
    """Report a checkpoint of one rank, of both, and of none; then write what is known of them."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    for number, ranks in enumerate(([1], [0, 1], []), start=1):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / f"part-{rank}").write_text(f"{number} of {rank}")
            checkpoint = Checkpoint.from_directory(folder) if rank in ranks else None
            ray.train.report({"number": number}, checkpoint=checkpoint)
    found = [
        {
            "metrics": each.metrics,
            "files": sorted(path.name for path in Path(each.checkpoint.path).iterdir()),
        }
        for each in ray.train.get_all_reported_checkpoints()
    ]
    newest = ray.train.get_checkpoint().path
    document = {"reported": found, "newest": newest}
    (Path(config["folder"]) / f"{rank}.json").write_text(json.dumps(document))


def fail_to_report(config: dict[str, Any]) -> None:
    """Rank 1 reports a folder that is gone."""
    rank = ray.train.get_context().get_world_rank()
    missing = Path(config["folder"]) / "gone"
    checkpoint = Checkpoint(str(missing)) if rank == 1 else None
    try:
        ray.train.report({}, checkpoint=checkpoint)
    except Exception as error:
        (Path(config["folder"]) / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


def all_calls(config: dict[str, Any]) -> str:
    """The three above in one run, each with a folder of its own."""
    for function in (describe, report_three, fail_to_report):
        folder = Path(config["folder"]) / function.__name__
        folder.mkdir(exist_ok=True)
        function({"folder": str(folder)})
    return "done"


def report_for_ever(config: dict[str, Any]) -> None:
    """Report a checkpoint every 50 ms, without end; it does not look whether it is to stop."""
    number = _number_in(ray.train.get_checkpoint())
    while True:
        number += 1
        time.sleep(0.05)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "number").write_text(str(number))
            checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"number": number}, checkpoint=checkpoint)


def _number_in(checkpoint: Checkpoint | None) -> int:
    return int((Path(checkpoint.path) / "number").read_text()) if checkpoint else 0
