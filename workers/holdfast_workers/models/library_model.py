"""Models of the library `transformers`, built from a configuration, as the library computes them.

A model stays the library's object, with the names of its parameters. Its class gets a mixin that
makes it a `BlockModel`: its blocks are the modules that the library says not to split. Parameters
are built on the meta device; buffers, such as tables of rotary angles, have the values that the
library computes for them.

Code that a folder brings is never run, and nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast_workers.errors import WorkersError
from holdfast_workers.models.transformer import BlockModel

_OF_A_RUN = (
    *("attn_implementation", "_attn_implementation", "experts_implementation"),
    *("_experts_implementation", "dtype", "torch_dtype", "use_kernels"),
)
"""Keys that say how the model was computed where it was saved. Some name code of a hub."""
_TAG = "__float__"
"""The only key of an object that stands for a number that JSON lacks, as the library writes it."""
_LARGE_BYTES = 16 << 20
"""Of a tensor for which there should be no memory while a model is built."""
_MOST_SAID = 300
"""Characters of an error of the library in a sentence."""


class UnfitModel(WorkersError):
    """The library cannot build the model, or it cannot be trained here; says why."""


class LibraryModel(BlockModel):
    """Maps token ids (batch, sequence) to logits (batch, sequence, vocabulary)."""

    ties: list[list[tuple[nn.Module, str]]]
    """The places of each parameter that has several, in the order of the modules."""
    tables: list[tuple[nn.Module, str, Tensor]]
    """The place of each buffer, and its value."""

    def forward(self, inputs: Tensor) -> Tensor:
        # Of the library's class, which follows in the order of resolution.
        found: Tensor = super().forward(input_ids=inputs, use_cache=False, return_dict=True).logits
        return found

    def to_empty(self, *, device: Any, recurse: bool = True) -> LibraryModel:
        super().to_empty(device=device, recurse=recurse)
        for (first, name), *others in self.ties:
            for module, other in others:
                setattr(module, other, getattr(first, name))
        return self

    def constants(self) -> dict[str, Tensor]:
        """The buffers that the library saves."""
        saved = self.state_dict().keys()
        return {name: buffer for name, buffer in self.named_buffers() if name in saved}

    @torch.no_grad()
    def reset_tables(self) -> None:
        for module, name, value in self.tables:
            module.get_buffer(name).copy_(value)


def new_library_model(document: Mapping[str, Any]) -> LibraryModel:
    """The model of a `config.json`, with parameters in float32 on the meta device. Raises
    UnfitModel."""
    library = _library()
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        raise UnfitModel(f"transformers {library.__version__} has no model_type {str(kind)[:80]!r}")
    with torch.random.fork_rng([]), _parameters_on_meta():
        torch.manual_seed(0)  # of buffers that begin with random numbers
        try:
            model = library.AutoModelForCausalLM.from_config(
                library.CONFIG_MAPPING[kind].from_dict(_untagged(document)),
                trust_remote_code=False,
                dtype=torch.float32,
            )
        except Exception as error:  # of any kind, as the library checks little
            raise UnfitModel(
                f"transformers {library.__version__} cannot build it: {said(error)}"
            ) from error
    return _adapted(model)


def _untagged(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with what determines the model, and with numbers in place of tags. Raises
    ValueError."""
    found = {key: document[key] for key in document if key not in _OF_A_RUN}
    copied: dict[str, Any] = json.loads(json.dumps(found), object_hook=_number_of_tag)
    return copied


def _number_of_tag(found: dict[str, Any]) -> Any:
    return float(found[_TAG]) if found.keys() == {_TAG} else found


def said(error: BaseException) -> str:
    """An error of another library as a part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_SAID]


def _library() -> Any:
    """The module `transformers`, loaded late: it takes seconds, and few jobs need it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnfitModel(
            f"model.family transformers needs the library transformers, which this node lacks "
            f"({error}): pip install 'holdfast-train[transformers]' on each node"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, each parameter is on the meta device once a module has it. `torch.device("meta")`
    would take the values of buffers, too."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    """Inside, a large tensor without values is on the meta device: not even for a moment is there
    memory for it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is torch.empty and given.get("device") is None:
            on_meta = func(*args, **{**given, "device": "meta"})
            if on_meta.nbytes >= _LARGE_BYTES:
                return on_meta
        return func(*args, **given)


def _adapted(model: nn.Module) -> LibraryModel:
    of_library = type(model)
    model.__class__ = type(of_library.__name__, (LibraryModel, of_library), {})
    assert isinstance(model, LibraryModel)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.ties = [places_of_one for places_of_one in places.values() if len(places_of_one) > 1]
    model.tables = [
        (module, name, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    model.blocks = _blocks(model)
    return model


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By their names in the model; none is a part of another."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__ in kinds and not is_inside:
            found[name] = module
    return found
