"""What `train.deterministic` sets in torch, so that a repeated step has the same bits.

On an accelerator many kernels add numbers in an order that differs from run to run. `strict` lets
torch choose kernels that repeat their bits; an operation that has none raises an error that names
it. On the CPU, kernels repeat their bits with the same number of threads, so such an operation is
only warned of. `fast` sets nothing: two runs may differ in their last bits on an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from holdfast_workers.spec import Determinism

_NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
"""Part of torch's error for an operation without such a kernel."""


@dataclass(frozen=True)
class KernelChoice:
    """Settings of torch and of its libraries."""

    algorithms: bool = False
    """`torch.use_deterministic_algorithms`; also turns off the measurements by which inductor
    chooses kernels."""
    only_warn: bool = False
    """Whether an operation without such an algorithm causes a warning instead of an error."""
    cudnn: bool = False
    """`torch.backends.cudnn.deterministic`, without its choice by measurements."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables, where the user has set none."""


def kernel_choice(mode: Determinism, device: str) -> KernelChoice:
    """The choice of kernels for processes that compute on `device`. Pure."""
    if mode == "fast":
        return KernelChoice()
    if device == "cpu":
        return KernelChoice(algorithms=True, only_warn=True)
    # cuBLAS repeats its bits with a workspace of fixed size (cuBLAS documentation, "Results
    # Reproducibility"). It reads the variable when the process first uses it.
    return KernelChoice(
        algorithms=True, cudnn=True, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    )


def advice(error: BaseException) -> str:
    """Advice on an operation that `strict` does not allow; "" for every other error."""
    if _NO_DETERMINISTIC_KERNEL not in str(error):
        return ""
    return "; use another operation, or train.deterministic: fast, which promises no equal bits"


def choose_kernels(
    mode: Determinism, device: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the choice of kernels for this process and those forked from it. Touches no device."""
    import torch  # late: a spec is checked without torch
    import torch.utils.deterministic

    choice = kernel_choice(mode, device)
    for name, value in choice.variables.items():
        environ.setdefault(name, value)
    torch.use_deterministic_algorithms(choice.algorithms, warn_only=choice.only_warn)
    # Filling new memory costs time, and no recipe's result may depend on what is in there.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = choice.cudnn
    torch.backends.cudnn.benchmark = False
