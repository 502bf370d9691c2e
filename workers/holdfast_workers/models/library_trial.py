"""Tries a model of the library `transformers` before it is trained: both passes, on tensors that
have no values. So what does not work here is refused in a sentence, and nothing is guessed from the
name of a model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast_workers.models.library_model import LibraryModel, UnfitModel, said

_BATCH, _MOST_POSITIONS = 2, 16
_WITHOUT_VALUES = "batched_mm"
"""How experts are computed where no tensor has values, by the library's name of it."""


def try_model(model: LibraryModel, dtype: torch.dtype, positions: int | None) -> int:
    """The number of tokens that the model knows. It cannot be used afterwards. `dtype`: in which it
    is computed; `positions`: of its longest sequence, if that is known. Raises UnfitModel."""
    _check_parameters(model)
    _check_buffers(model)
    _check_blocks(model)
    shape = (_BATCH, min(positions or _MOST_POSITIONS, _MOST_POSITIONS))
    calls: Counter[nn.Module] = Counter()
    for block in model.blocks.values():
        block.register_forward_hook(lambda module, _inputs, _output: calls.update([module]))
    embedding = getattr(model, "get_input_embeddings")()  # noqa: B009 (of the library's class)
    rows = 0 if getattr(embedding, "weight", None) is None else len(embedding.weight)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _replace_tensors(model, dtype)
        before = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
        model.train()
        try:
            logits = model(torch.zeros(shape, dtype=torch.int64))
            torch.autograd.backward(logits.float().sum())
        except Exception as error:  # of any kind
            raise UnfitModel(f"a step cannot be computed in {dtype}: {said(error)}") from error
    if logits.shape[:2] != shape or len(logits.shape) != 3:
        raise UnfitModel(f"for tokens of the shape {shape} its logits have {tuple(logits.shape)}")
    for name, buffer in model.named_buffers():
        if before.get(name, ("", 0))[0] == id(buffer) and before[name][1] != buffer._version:
            raise UnfitModel(f"a step changes its buffer {name}, which is no parameter")
    for name, block in model.blocks.items():
        if calls[block] != 1:
            raise UnfitModel(f"a step uses its block {name} {calls[block]} times, and not once")
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if unused:
        raise UnfitModel(f"{_listed(unused)}: the loss of the next token does not depend on it")
    return min(rows, int(logits.shape[2]))


def _check_parameters(model: LibraryModel) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise UnfitModel(f"its parameter {name} is not trained")
        if parameter.dtype is not torch.float32 or not parameter.dim():
            kind = str(parameter.dtype).removeprefix("torch.")
            what = kind if parameter.dim() else f"{kind} without a dimension"
            raise UnfitModel(f"its parameter {name} is {what}, and cannot be divided among ranks")


def _check_buffers(model: LibraryModel) -> None:
    constants = model.constants()
    for name, buffer in constants.items():
        if buffer.dtype is not torch.float32:
            kind = str(buffer.dtype).removeprefix("torch.")
            raise UnfitModel(f"its buffer {name} is saved with its weights, and is {kind}")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in constants:
            raise UnfitModel(f"its buffer {name} has no value without the weights")


def _check_blocks(model: LibraryModel) -> None:
    if not model.blocks:
        raise UnfitModel("the library names no blocks of it that stay whole (_no_split_modules)")
    block_of = {
        part: name for name, block in model.blocks.items() for part in block.modules()
    }  # of each module
    for places in model.ties:
        if len({block_of.get(module) for module, _ in places}) > 1:
            raise UnfitModel(f"two of its blocks share the parameter {places[0][1]}")
    for name, module in model.named_modules():
        if getattr(module, "is_causal", None) is False:
            raise UnfitModel(f"{name} attends to later tokens, too: it does not predict the next")


def _replace_tensors(model: LibraryModel, dtype: torch.dtype) -> None:
    """Give the model parameters of `dtype`, and buffers, without values."""
    config = getattr(model, "config")  # noqa: B009
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = _WITHOUT_VALUES
    fresh: dict[int, nn.Parameter] = {}
    old: list[Tensor] = []  # which keep their ids
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                old.append(parameter)
                if id(parameter) not in fresh:
                    fresh[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
                module._parameters[name] = fresh[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"
