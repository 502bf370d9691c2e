"""Classifies points on two spirals. An unchanged Ray Train function; the import of the trainer is
the one line that names Holdfast."""

import argparse
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.ray_train import TorchTrainer  # was: from ray.train.torch import ...


def train_loop_per_worker(config):
    radius = torch.linspace(0.1, 1.0, 400).repeat(2)
    label = torch.arange(800) // 400
    angle = 6 * radius + torch.pi * label
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
    loader = DataLoader(TensorDataset(points, label), batch_size=40, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    torch.manual_seed(0)
    layers = (torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), config["lr"])
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch}, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--storage", type=Path, default=Path("~/ray_results").expanduser())
    options = parser.parse_args()
    result = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 0.02, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(options.storage), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    ).fit()
    print(f"loss {result.metrics['loss']:.4f}, checkpoint {result.checkpoint.path}")
