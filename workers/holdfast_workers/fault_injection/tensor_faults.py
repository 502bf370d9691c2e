"""Faults in the numbers of a living model: not a number, or one bit changed, on one rank, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast_workers.fault_injection.kinds import FaultKind, Injection

if TYPE_CHECKING:
    from holdfast_workers.training.recipe import Recipe

USUAL_BIT = 20
"""Of a float32's 23 bits of mantissa: seen in no loss, and in every digest."""


def tamper(recipe: Recipe, fault: Injection, point: str) -> None:
    """Do it to the recipe's living state. Raises LookupError if there is no such target."""
    print(f"injected fault: {fault} (at {point})", flush=True)
    if fault.kind is FaultKind.NAN:
        _spoil_output(_module(recipe.model, fault.target), fault.where == "gradient")
    else:
        _flip_bit(recipe.local_tensors(fault.where or "gradient"), fault)


def _module(model: nn.Module, target: str | None) -> nn.Module:
    return model if target is None else model.get_submodule(target)


def _spoil_output(module: nn.Module, in_gradient: bool) -> None:
    """The next output of `module`, or the gradient that comes back to it, is not a number."""

    def spoil(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        handle.remove()
        if not in_gradient:
            return _spoiled(output)
        output.register_hook(_spoiled)  # type: ignore[no-untyped-call]
        return None

    handle = module.register_forward_hook(spoil)


def _spoiled(values: Tensor) -> Tensor:
    return values * float("nan")


def _flip_bit(tensors: dict[str, Tensor], fault: Injection) -> None:
    present = {name: one for name, one in tensors.items() if one.numel()}
    if fault.target is not None and fault.target not in present:
        raise LookupError(f"no parameter {fault.target!r} on this rank: {', '.join(present)}")
    name = fault.target or max(present, key=lambda one: present[one].numel())
    with torch.no_grad():
        words = present[name].view(-1).view(torch.int32)
        mask = 1 << (USUAL_BIT if fault.bit is None else fault.bit)
        words[words.numel() // 2] ^= mask - (1 << 32) if mask == 1 << 31 else mask
