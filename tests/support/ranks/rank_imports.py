"""Imported by the fork server before it forks ranks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

torch.set_num_threads(1)
