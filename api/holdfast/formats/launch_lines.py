"""Reads the command line with which a program is started elsewhere, such as torchrun's, as what a
spec needs. Pure.

`torchrun --nproc-per-node 2 train.py --lr 1` and `python train.py` become a `script`; any other
executable becomes a `command`, word by word. An option without meaning here gives a notice of what
Holdfast does instead; an unknown option is a fault, because its value could be taken for a script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from pathlib import PurePath
from typing import Any

from holdfast.errors import HoldfastError
from holdfast_workers.spec import MESH_AXES

_STORE = "each attempt gets a new rendezvous store and address"
_OUTPUT = "the output of all ranks is kept: see `holdfast logs`"
_IGNORED: Mapping[str, str] = {
    "--rdzv-backend": _STORE,
    "--rdzv-endpoint": _STORE,
    "--rdzv-id": _STORE,
    "--rdzv-conf": _STORE,
    "--master-addr": _STORE,
    "--master-port": _STORE,
    "--local-addr": _STORE,
    "--standalone": _STORE,
    "--node-rank": "the ranks are placed on the nodes of the cluster",
    "--max-restarts": "`recovery.max_failures` limits restarts: 20 in an hour, see --set",
    "--monitor-interval": "the end of a process is seen at once",
    "--start-method": "ranks are forked from a process that has imported torch: see --preload",
    "--shutdown-timeout": "`program.grace_s` is the time between SIGTERM and SIGKILL, see --set",
    "--signals-to-handle": "Holdfast sends SIGTERM when a rank is to end",
    "--role": "the role of all ranks is `default`",
    "--log-dir": _OUTPUT,
    "--redirects": _OUTPUT,
    "--tee": _OUTPUT,
    "--local-ranks-filter": _OUTPUT,
    "--duplicate-stdout-filters": _OUTPUT,
    "--duplicate-stderr-filters": _OUTPUT,
    "--logs-specs": _OUTPUT,
    "--event-log-handler": "`holdfast events` shows what happens to the job",
    "--numa-binding": "ranks are not bound to processors",
}
"""Option of torchrun -> what Holdfast does instead."""
_FLAGS = frozenset(
    {"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank"}
)
"""Options of torchrun without a value."""
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_NPROC, _NNODES = "--nproc-per-node", "--nnodes"
TORCHRUN_OPTIONS = frozenset({*_IGNORED, *_FLAGS, _NPROC, _NNODES})
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCH = "write: holdfast run --nproc-per-node N -- "
_REFUSED: Mapping[str, str] = {
    "accelerate": f"{_LAUNCH}train.py ...; Accelerate reads the environment that Holdfast sets, "
    "and what `accelerate config` asks for belongs into the script (Accelerator(...))",
    "deepspeed": f"{_LAUNCH}train.py --deepspeed ...; deepspeed.init_distributed() reads the "
    "environment that Holdfast sets",
    "mpirun": f"{_LAUNCH}train.py ...; the ranks get the environment of torchrun",
    "srun": f"{_LAUNCH}train.py ...; nodes and ranks are those of the job, not of Slurm",
    "horovodrun": f"{_LAUNCH}train.py ...; the ranks get torchrun's environment, not Horovod's",
}
_USUAL_CPUS = 0.5
"""Default of `resources.cpus_per_worker`."""
_OF_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_NAME = 63


class UnreadableLaunchLine(HoldfastError, code="unreadable_launch_line", status=400):
    """The words after `--` cannot become a job."""


@dataclass(frozen=True)
class LaunchLine:
    """What is to be started, and how often."""

    script: tuple[str, ...] = ()
    """Path (or `-m` and a module) and arguments; empty: a command."""
    command: tuple[str, ...] = ()
    nproc: int | None = None
    """Ranks of a node; None: not said."""
    nodes: tuple[int, int] | None = None
    """Least and most nodes; None: not said."""
    notices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for the job, from the script's."""
        words = self.script or self.command
        subject = words[1] if words[0] == "-m" else PurePath(words[0]).name
        name = _OF_NAME.sub("-", subject.removesuffix(".py")).lstrip("._-")
        return name[:_MOST_NAME] or "run"


@dataclass
class _Options:
    """torchrun's options, as far as they have been read."""

    nproc: int | None = None
    nodes: tuple[int, int] | None = None
    notices: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)


def read(words: Sequence[str], folder: PurePath | None = None) -> LaunchLine:
    """The words of a command line. `folder`: the code folder, to which an absolute path of a script
    becomes relative. Raises UnreadableLaunchLine."""
    if not words:
        raise UnreadableLaunchLine(f"nothing to start: {_LAUNCH}train.py --lr 3e-4")
    program = PurePath(words[0]).name
    if program in _REFUSED:
        raise UnreadableLaunchLine(f"{program} starts ranks itself: {_REFUSED[program]}")
    if program == "torchrun":
        return _torchrun(words[1:], folder)
    if _PYTHON.fullmatch(program):
        return _python(words, folder)
    if words[0].endswith(".py") or words[0] == "-m":
        return _script(words, folder)
    if program.endswith(".sh") and not PurePath(words[0]).is_absolute():
        notice = f"{words[0]} is run by bash: files of the code folder are not executable"
        return LaunchLine(command=("bash", *words), notices=(notice,))
    return LaunchLine(command=tuple(words))


def combined(line: LaunchLine, nproc: str | None, nnodes: str | None) -> LaunchLine:
    """`line` with the sizes that were given to Holdfast itself, which come first. Raises
    UnreadableLaunchLine."""
    return replace(
        line,
        nproc=line.nproc if nproc is None else _ranks(nproc),
        nodes=line.nodes if nnodes is None else _nodes(nnodes),
    )


def notice(option: str) -> str:
    """What Holdfast does instead of an option of torchrun that has no meaning here."""
    return f"{option} is ignored: {_IGNORED[option]}"


def spec_of(line: LaunchLine, *, name: str | None = None) -> dict[str, Any]:
    """The spec of a job that runs it: what is started, and on how many ranks."""
    nproc, (least, most) = line.nproc or 1, line.nodes or (1, 1)
    spec: dict[str, Any] = {"name": name or line.name}
    spec["script" if line.script else "command"] = [*(line.script or line.command)]
    resources: dict[str, Any] = {"workers_per_node": nproc}
    if least < most:
        resources["nodes"] = {"min": least, "max": most}
    return {
        **spec,
        "parallel": {"dp_shard": "auto" if least < most else most * nproc},
        "resources": resources,
    }


def ranks_of(spec: Mapping[str, Any]) -> int | None:
    """The ranks of a spec; None: elastic, or not a number."""
    parallel = _part(spec, "parallel")
    ranks = 1
    for axis in MESH_AXES:
        size = parallel.get(axis, 1)
        if not isinstance(size, int) or isinstance(size, bool):
            return None
        ranks *= size
    return ranks


def nodes_of(spec: Mapping[str, Any]) -> int:
    """The most nodes that a spec may use; 1 where that is not said by numbers."""
    resources = _part(spec, "resources")
    most = _part(resources, "nodes").get("max")
    per_node, standbys = resources.get("workers_per_node", 1), resources.get("standby_nodes", 0)
    if most is None:
        ranks = ranks_of(spec) or 1
        most = -(-ranks // per_node) if isinstance(per_node, int) and per_node > 0 else 1
    numbers = [number for number in (most, standbys) if isinstance(number, int)]
    return max(1, sum(numbers))


def cpus_per_rank(ranks_per_node: int, cpus_of_nodes: Iterable[float]) -> float:
    """CPUs that each rank reserves where a node has to hold the ranks however few it has: the
    usual number, or an equal part of the smallest node."""
    part = min(cpus_of_nodes, default=float(ranks_per_node)) / max(1, ranks_per_node)
    return min(_USUAL_CPUS, max(0.001, floor(part * 1000) / 1000))


def gpus_per_rank(gpus_of_nodes: Iterable[float]) -> int:
    """GPUs of each rank where no option says how many: one, if a node of the cluster has any."""
    return int(any(gpus > 0 for gpus in gpus_of_nodes))


def _part(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def _torchrun(words: Sequence[str], folder: PurePath | None) -> LaunchLine:
    options, at = _Options(), 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += _take_option(options, words, at)
    rest = words[at + (at < len(words) and words[at] == "--") :]
    if not rest:
        raise UnreadableLaunchLine("torchrun is given no script: name it after its options")
    if "--no-python" in options.flags:
        line = LaunchLine(command=tuple(rest))
    elif "--module" in options.flags:
        line = _script(("-m", *rest), folder)
    else:
        line = _script(rest, folder)
    notices = (*options.notices.values(), *line.notices)
    return replace(line, nproc=options.nproc, nodes=options.nodes, notices=notices)


def _take_option(options: _Options, words: Sequence[str], at: int) -> int:
    """Read the option at `at`. Returns the number of its words."""
    given, separator, value = words[at].partition("=")
    name = _SHORT.get(given, given.replace("_", "-"))
    if name not in TORCHRUN_OPTIONS:
        raise UnreadableLaunchLine(f"{given!r} is not an option of torchrun: remove it")
    if name in _FLAGS:
        options.flags.add(name)
        if name in _IGNORED:
            options.notices[_IGNORED[name]] = notice(name)
        return 1
    if not separator:
        if at + 1 == len(words):
            raise UnreadableLaunchLine(f"{given} needs a value")
        value = words[at + 1]
    if name == _NPROC:
        options.nproc = _ranks(value)
    elif name == _NNODES:
        options.nodes = _nodes(value)
    else:
        options.notices.setdefault(_IGNORED[name], notice(name))
    return 1 if separator else 2


def _python(words: Sequence[str], folder: PurePath | None) -> LaunchLine:
    rest = list(words[1:])
    while rest[:1] == ["-u"]:  # the output of ranks is never buffered
        rest.pop(0)
    if rest[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        return _torchrun(rest[2:], folder)
    if rest[:1] == ["-m"] and rest[1:2] and rest[1].split(".")[0] in _REFUSED:
        return read([rest[1].split(".")[0], *rest[2:]], folder)
    if rest[:1] == ["-m"] or (rest and not rest[0].startswith("-")):
        return _script(rest, folder)
    if not rest:
        raise UnreadableLaunchLine("python is given no script: name it after python")
    return LaunchLine(command=tuple(words))  # with options of the interpreter


def _script(words: Sequence[str], folder: PurePath | None) -> LaunchLine:
    if words[0] == "-m" and len(words) < 2:
        raise UnreadableLaunchLine("after -m comes the name of a module: -m package.module")
    path = PurePath(words[0])
    if folder is not None and path.is_absolute() and path.is_relative_to(folder):
        return LaunchLine(script=(str(path.relative_to(folder)), *words[1:]))
    return LaunchLine(script=tuple(words))


def _ranks(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text, re.ASCII):
        raise UnreadableLaunchLine(
            f"--nproc-per-node {text} is not a number: write how many ranks a node has; each gets "
            "a GPU if the nodes have any, and with --gpus 1 in any case"
        )
    return int(text)


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9][0-9]{0,5})(?::([1-9][0-9]{0,5}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if least > most:
        raise UnreadableLaunchLine(
            f"--nnodes {text} is not a number of nodes: write 2, or 1:4 for 1 to 4"
        )
    return least, most
