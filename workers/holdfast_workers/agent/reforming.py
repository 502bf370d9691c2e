"""How the ranks that survive a fault come into the next attempt. Pure."""

from __future__ import annotations

from enum import StrEnum

VARIABLE = "HOLDFAST_REFORM"
"""Environment variable of a node; without it the device decides."""


class Reform(StrEnum):
    IN_PLACE = "in_place"  # survivors keep their processes, with model and state
    FORK = "fork"  # every rank is forked anew, and takes its state from memory


def reform_of(setting: str, device: str) -> Reform:
    """`setting`: the variable's value, "" if it is not set. Raises ValueError.

    On accelerators the default is `fork`: whether a survivor can abort its communicators and form
    new ones has not been seen on two GPUs.
    """
    if setting:
        try:
            return Reform(setting)
        except ValueError:
            known = " or ".join(Reform)
            raise ValueError(f"{VARIABLE}={setting!r} is not known: use {known}") from None
    return Reform.IN_PLACE if device == "cpu" else Reform.FORK


def communicator_variables(reform: Reform, device: str) -> dict[str, str]:
    """Environment of ranks that abort their communicators themselves: torch's watchdog must not
    abort them too, nor end the process."""
    if device == "cpu" or reform is Reform.FORK:
        return {}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
