"""Checks at submission that a job's data exists, with bounded work and time.

With an embedded cluster the server searches its own file systems, in a few threads that no other
call uses: a file system may hang. With another cluster a node searches its own. A path of which it
is not known whether it exists is not refused: the ranks check it, too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.supervisor_protocol import Cluster, ClusterUnavailable
from holdfast_service.settings import Settings
from holdfast_workers.data.source_search import is_folder, may_exist
from holdfast_workers.spec import SpecFault

BUNDLED_SOURCES = ("python-stdlib",)
_OF_TEXT = f"the path or glob of text files that every node can read, or {BUNDLED_SOURCES[0]!r}"
_OF_SOURCE = "a file, folder or glob that every node can read"
_OF_TOKENIZER = "the tokenizer.json, or the folder of a model with one, that every node can read"
_OF_WEIGHTS = (
    "the folder of a published model, with config.json and safetensors, that every node can read"
)
_OF_IMAGES = "a folder that every node can read, with a subfolder of images for each class"
SEARCH_S = 5.0
"""Deadline of the search for a job's data at submission."""
MAX_SEARCHES = 4
"""Searches at the same time, here or on nodes."""

_log = structlog.get_logger()


class DataPaths:
    """The checks of one service, each within `deadline_s`."""

    def __init__(self, settings: Settings, cluster: Cluster, deadline_s: float = SEARCH_S) -> None:
        self._deadline_s = deadline_s
        self._cluster = cluster
        self.on_nodes = settings.ray_address is not None
        """Whether nodes have file systems of their own, which this server does not see."""
        self._threads = DaemonThreads(MAX_SEARCHES, "data-path")
        self._tasks = asyncio.Semaphore(MAX_SEARCHES)

    async def find_faults(self, spec: JobSpec) -> list[SpecFault]:
        """Each at the path of its field."""
        look = self.look_on_a_node if self.on_nodes else self._look_here
        places = [] if spec.has_own_model else _places(spec)
        reasons = await asyncio.gather(*(look(at.source, folder=at.folder) for at in places))
        return [
            SpecFault(path=at.path, message=f"{at.source!r} {why}: give {at.wanted}")
            for at, why in zip(places, reasons, strict=True)
            if why is not None
        ]

    async def _look_here(self, source: str, *, folder: bool) -> str | None:
        """The fault of the path on this machine; None if there is none, or it is not known."""
        search = self._threads.submit(is_folder if folder else may_exist, source)
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(search), self._deadline_s)
            return None if found else _missing(folder=folder)
        except TimeoutError:
            if search.cancelled():  # not begun: the file systems of other paths hang
                return None
            return f"cannot be read: its file system did not answer in {self._deadline_s:g} s"
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    async def look_on_a_node(self, source: str, *, folder: bool = False) -> str | None:
        """The fault of the path on one of the nodes that run jobs; None if there is none, or it is
        not known."""
        try:
            async with asyncio.timeout(self._deadline_s), self._tasks:
                answer = await self._cluster.look_for_path(source, folder, self._deadline_s)
        except (ClusterUnavailable, TimeoutError) as error:
            _log.warning("a path was not looked for on a node", path=source, why=str(error))
            return None
        if answer.exists:
            return None
        where = f"on the node {answer.host}"
        return f"{answer.error} {where}" if answer.error else f"{_missing(folder=folder)} {where}"


@dataclass(frozen=True)
class _Place:
    """A path that a spec names, and what has to be there."""

    path: str
    """Of the field."""
    source: str
    wanted: str
    folder: bool = False


def _places(spec: JobSpec) -> list[_Place]:
    """What a recipe reads: not the sources of token sets that are there, nor weights in place of
    which it loads a checkpoint; nor buckets and what is no whole path."""
    data, model = spec.data, spec.model
    if model.family == "vit":
        return [_Place("data.source", data.source, _OF_IMAGES, folder=True)]
    if not data.sources:
        is_bundled = data.source in BUNDLED_SOURCES
        return [] if is_bundled else [_Place("data.source", data.source, _OF_TEXT)]
    found = []
    if model.source is not None and not (model.published and spec.init_from):
        found.append(_Place("model.from", model.source, _OF_WEIGHTS, folder=True))
    if not data.prepared:
        if data.tokenizer != model.source:
            found.append(_Place("data.tokenizer", data.tokenizer, _OF_TOKENIZER))
        found += [
            _Place(f"{place}.path", source.path, _OF_SOURCE)
            for place, source in data.read_sources.items()
        ]
    return [place for place in found if place.source.startswith("/")]


def _missing(*, folder: bool) -> str:
    return "is not a folder" if folder else "does not exist"
