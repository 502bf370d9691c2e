"""The environment variables that a process gets from the one that starts it, by allow-list.

A node's environment may hold passwords, tokens and cloud keys. Processes that run users' code get
the variables that programs need to run, those that the operator names in `HOLDFAST_WORKER_ENV`, and
the job's own `env`; nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

PASSED_ON_VARIABLE = "HOLDFAST_WORKER_ENV"
"""Environment variable of a node: names of further variables that users' code gets, separated by
commas; `*` stands for any characters."""

CODE_FOLDER = "users-code"
"""Name of the folder of a job's code package, in the working folder of its agent. No module can
have this name: the working folder is on the agent's module path."""

_PROGRAM = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "TZ", "LANG", "LC_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_*", "XDG_CACHE_HOME", "CC", "CXX"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
)
"""Variables that programs of any kind need to find their files, libraries and caches."""
_TRAINING = (
    *("OMP_*", "KMP_*", "GOMP_*", "MKL_*", "OPENBLAS_*", "TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*"),
    *("TRITON_*", "CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_*"),
    *("HIP_*", "HSA_*", "ROCR_*", "ROCM_*", "MIOPEN_*", "NCCL_*", "RCCL_*", "GLOO_*", "UCX_*"),
    *("FI_*", "RDMAV_*"),
)
"""The settings of numerical libraries, devices and networks."""
_MARKS = ("HOLDFAST_CLUSTER_ID", "HOLDFAST_NODE_NAME", "HOLDFAST_CHAOS")
"""Marks by which an embedded cluster finds its processes, and the tests' plan of faults."""
_CACHES = ("HOLDFAST_CACHE_LIMIT_GB",)
"""The limit of the caches, which processes with users' code fill, and those that fetch tokens."""
_NODE = (
    *("HOLDFAST_SHM_ROOT", "HOLDFAST_MEMORY_FLOOR_GB_PER_S", "HOLDFAST_NODE_LOGS"),
    *("HOLDFAST_CACHE_DIR", "HOLDFAST_PORT_RANGE", "HOLDFAST_WORKER_DEVICE"),
    *("HOLDFAST_REFORM", "HOLDFAST_CUTTABLE_LINKS", "HOLDFAST_TLS_DIR", PASSED_ON_VARIABLE),
    *("RAY_USE_TLS", "RAY_TLS_*"),
)
"""The settings of node agents, and of TLS between Ray's processes."""
PROXIES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "no_proxy"),
)
PACKAGES = ("PIP_*", "NETRC", *PROXIES)
"""Variables that say where packages come from. Only the installation of packages gets them."""
STORAGE = ("AWS_*", *PROXIES)
"""Access to a bucket without a named secret. Users' code does not get it."""

RAY_CLIENT = (
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TLS_*"),
    *("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"),
    "RAY_gcs_rpc_server_reconnect_timeout_s",
)
"""Variables that a client of the node's Ray cluster needs; for the token, the path of its file.
Only the ranks of jobs that use Ray datasets get them."""

RESERVED = (
    *("HOLDFAST_*", "RAY_*", "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("OMP_DYNAMIC", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Variables that Holdfast sets for its processes; a job's own `env` may not."""


_OF_RAY = ("PYTHONBREAKPOINT",)
"""What Ray sets in its own processes: with its debugger, users' `breakpoint()` does nothing."""


def for_users_code(node: Mapping[str, str]) -> dict[str, str]:
    """The part of a node's environment that processes with users' code get."""
    return _selected(node, (*_PROGRAM, *_TRAINING, *_MARKS, *_CACHES, *passed_on(node)))


def for_nodes(server: Mapping[str, str]) -> dict[str, str]:
    """The part of the server's environment that the nodes of its embedded cluster get."""
    names = (*_PROGRAM, *_TRAINING, *_MARKS, *_CACHES, *_NODE, *STORAGE, *PACKAGES)
    return _selected(server, (*names, *passed_on(server)))


def for_packages(node: Mapping[str, str]) -> dict[str, str]:
    """The part of a node's environment that the installation of a job's packages gets, which may
    run programs of these."""
    return _selected(node, (*_PROGRAM, *_TRAINING, *_MARKS, *passed_on(node), *PACKAGES))


def for_storage(node: Mapping[str, str], code: str) -> dict[str, str]:
    """The part of a node's environment that processes with access to a bucket get: they import
    nothing from `code`, the folder of users' code."""
    found = _selected(node, (*_PROGRAM, *_TRAINING, *_MARKS, *_CACHES, *STORAGE))
    paths = [path for path in node.get("PYTHONPATH", "").split(os.pathsep) if path]
    apart = (path for path in paths if os.path.realpath(path) != os.path.realpath(code))
    found["PYTHONPATH"] = os.pathsep.join(apart)
    found["PYTHONSAFEPATH"] = "1"  # the working folder is not searched for modules
    return found


def for_ray_clients(node: Mapping[str, str]) -> dict[str, str]:
    """The part of a node's environment by which its processes are clients of its Ray cluster."""
    return _selected(node, RAY_CLIENT)


def passed_on(node: Mapping[str, str]) -> tuple[str, ...]:
    """The further names that the operator allows."""
    names = (name.strip() for name in node.get(PASSED_ON_VARIABLE, "").split(","))
    return tuple(name for name in names if name)


def is_reserved(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in RESERVED)


def _selected(given: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    allowed = tuple(patterns)
    return {
        name: value
        for name, value in given.items()
        if any(fnmatchcase(name, pattern) for pattern in allowed) and name not in _OF_RAY
    }
