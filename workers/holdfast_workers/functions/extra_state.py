"""The state of modules that is neither a parameter nor a buffer: what `get_extra_state` returns."""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast_workers.functions.replicated_modules import bare_name, bare_names


class ExtraState:
    """The extra state of the parts of one module, by their bare names."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, module: nn.Module) -> ExtraState | None:
        """The extra state of `module`, or None if no part of it has any."""
        replaced = [*bare_names(module)]
        parts = {
            bare_name(f"{path}." if path else "", replaced): part
            for path, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }
        return cls(parts) if parts else None

    def state_dict(self) -> dict[str, Any]:
        return {name: part.get_extra_state() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.set_extra_state(state[name])
