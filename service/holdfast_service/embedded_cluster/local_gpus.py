"""Finds the GPUs of this machine for its embedded cluster: by NVML, else as Ray finds them.

Neither creates a context on a device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_service.embedded_cluster.node_shares import visible_gpus
from holdfast_workers.health.nvml import Nvml

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LocalGpus:
    """`variable`: the environment variable that names the devices of a process. `ids`: the devices,
    as that variable names them."""

    variable: str = CUDA_VARIABLE
    ids: tuple[str, ...] = ()


def find(environment: Mapping[str, str] = os.environ) -> LocalGpus:
    """The GPUs that this process may use. Imports Ray where NVML finds no NVIDIA device."""
    uuids = nvml_uuids(_installed_nvml())
    if uuids:
        return LocalGpus(CUDA_VARIABLE, visible_gpus(uuids, environment.get(CUDA_VARIABLE)))
    return _as_ray_finds_them()


def named(ids: Sequence[str]) -> LocalGpus:
    """The GPUs that the operator names, unseen; `ids` may be empty."""
    return LocalGpus(_ray_manager().get_visible_accelerator_ids_env_var(), tuple(ids))


def nvml_uuids(nvml: Nvml | None) -> tuple[str, ...]:
    """UUIDs of all NVIDIA devices, in the order of their indices; none without a driver."""
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return ()
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(nvml.nvmlDeviceGetUUID(handle) for handle in handles)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _installed_nvml() -> Nvml | None:
    try:
        module: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    return module  # type: ignore[no-any-return]


def _as_ray_finds_them() -> LocalGpus:
    manager = _ray_manager()
    count = int(manager.get_current_node_num_accelerators())
    allowed = manager.get_current_process_visible_accelerator_ids()
    ids = [str(index) for index in range(count)] if allowed is None else allowed[:count]
    return LocalGpus(manager.get_visible_accelerator_ids_env_var(), tuple(ids))


def _ray_manager() -> Any:
    """Ray's own detection of GPUs of the vendor that this machine has."""
    from ray._private import accelerators  # late: Ray reads its environment on import

    return accelerators.get_accelerator_manager_for_resource("GPU")
