"""The environment of a program: what torchrun sets for a rank, and the way to its launcher. Pure.

Names and values are those of `torch.distributed.run` (torch 2.13). A script that runs under
torchrun finds the same here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_workers.protocol.messages import JoinOrder
from holdfast_workers.protocol.programs import SOCKET_VARIABLE

MAX_RESTARTS = 1_000_000
"""The value of torchrun's variable, which only programs read that print it: the budget of failures
decides how often a job restarts."""


@dataclass(frozen=True)
class ProgramLinks:
    """The places at which a program finds its launcher."""

    socket: str
    """Name of the launcher's socket, in the abstract namespace."""
    error_file: str
    """Path of the file in which `torch.distributed.elastic` records an exception."""


def program_variables(order: JoinOrder, job_id: str, links: ProgramLinks) -> dict[str, str]:
    """The variables of the rank of `order`, by name."""
    return {
        "RANK": str(order.rank),
        "LOCAL_RANK": str(order.local_rank),
        "WORLD_SIZE": str(order.form.world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.form.node_rank),
        "GROUP_WORLD_SIZE": str(order.form.nodes),
        "NODE_RANK": str(order.form.node_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(order.rank),
        "ROLE_WORLD_SIZE": str(order.form.world_size),
        "MASTER_ADDR": order.form.store_host,
        "MASTER_PORT": str(order.form.store_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": str(order.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": links.error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HOLDFAST_JOB_ID": job_id,
        "HOLDFAST_ATTEMPT": str(order.attempt),
        SOCKET_VARIABLE: links.socket,
    }


def ordered_devices(own: Sequence[str], of_node: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """The devices that a program sees, in an order in which number `local_rank` is its own.

    Programs take device number `LOCAL_RANK`, as under torchrun, which hides none. `own`: those of
    this rank; of several, the first is the one with that number.
    """
    if not own:
        return ()
    others = [device for device in of_node if device not in own]
    before = others[:local_rank]
    return (*before, *own, *others[len(before) :])


def with_variables(base: Mapping[str, str], program: Mapping[str, str]) -> dict[str, str]:
    """The whole environment; the job's own variables do not replace those of its rank."""
    return {**base, **program}
