"""Inputs that cannot be applied yet: they wait for an adopted world, or for an agent."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.recovery.core_state.inputs import FaultRequested
from holdfast_workers.protocol.signals import Signal


@dataclass
class Inbox:
    """Inputs in the order of their arrival."""

    early_signals: tuple[Signal, ...] = ()
    """Signals that arrived before their world was adopted."""
    requested_faults: tuple[FaultRequested, ...] = ()
    """Requested faults that no agent can inject yet."""

    def keep_signal(self, signal: Signal) -> None:
        self.early_signals = (*self.early_signals, signal)

    def take_signals(self) -> tuple[Signal, ...]:
        taken, self.early_signals = self.early_signals, ()
        return taken

    def keep_fault(self, fault: FaultRequested) -> None:
        self.requested_faults = (*self.requested_faults, fault)

    def take_faults(self) -> tuple[FaultRequested, ...]:
        taken, self.requested_faults = self.requested_faults, ()
        return taken
