"""Imported by the fork server before it forks ranks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import holdfast_workers.recipes.pretrain
import holdfast_workers.training.step_loop  # noqa: F401

torch.set_num_threads(1)
