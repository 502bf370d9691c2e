"""The intervals and deadlines of a supervisor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SupervisorTimes:
    """Intervals and deadlines of the shell, in seconds."""

    first_contact_s: float = 3.0
    hello_s: float = 2.0
    exchange_s: float = 5.0
    """Deadline of one exchange of bytes between two nodes."""
    refresh_s: float = 0.5
    """The time between two looks for a successor too: much less than `lease_margin_s`."""
    starting_s: float = 0.1
    """How often an agent that still starts its processes is asked whether they are ready."""
    starting_for_s: float = 15.0
    """An agent that takes longer, such as for packages, is asked every `refresh_s` from then on."""
    poll_s: float = 1.0
    """Between two polls of an agent; while the ranks train, twice as long."""
    drains_s: float = 2.0
    """Between two looks for nodes that the cluster drains."""
    inventory_s: float = 3.0
    first_inventory_s: float = 10.0
    adoption_inventory_s: float = 3.0
    """How long a supervisor that finds agents waits for the remote tier before it adopts them."""
    call_s: float = 10.0
    """Deadline of a call to an agent, as are the next three."""
    form_call_s: float = 100.0
    """Long enough for an agent whose zygote has just died to start another, which imports torch.
    The lifeline detects an agent that dies meanwhile."""
    finalize_s: float = 120.0
    check_s: float = 45.0
    """How long the check of a node before it is used may take."""
    fence_store_s: float = 2.0
    """How long the orders of a new world wait for the storage of the fence."""
    heartbeat_timeout_s: float = 2.0
    probe_s: float = 1.0
    """How long the node of a lost agent is probed."""
    final_collect_s: float = 3.0
    """How long the end of a job waits for the last output if nothing of it arrives."""
    final_s: float = 60.0
    """The same if something does."""
    fresh_collect_s: float = 2.0
    """How long the last rows are awaited for a server that is about to end, whose call waits."""
