"""Files of token sets that a node has from the caches of other nodes of its job.

Each file has a node that brings it from the store, and the others have it from there: so it leaves
the store about once for all of them. All nodes agree on that node without a message, by rendezvous
hashing (Thaler and Ravishankar 1998): they rank the nodes by a hash of file and node. A node that
fails is left out for a while, so its files have another node then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import xxhash

from holdfast_workers.memory.cache_transfer import (
    CachedReader,
    CacheUnreachable,
    NotCached,
    RemoteCache,
)
from holdfast_workers.protocol.messages import Partner

ASKED = 3
"""The nodes that are asked for a file: its own, and those that were it before others came."""
AWAY_S = 30.0
"""How long a node that failed is left out."""
LATE_S = 300.0
"""How long a node that brings nothing is left out."""

_log = structlog.get_logger()


def ranked(name: str, nodes: Iterable[str]) -> list[str]:
    """The nodes in the order in which they are to bring a file. Whether others come or go does not
    change the order of the rest."""
    hashes = {node: xxhash.xxh3_64_intdigest(f"{name} {node}".encode()) for node in nodes}
    return sorted(hashes, key=lambda node: (hashes[node], node))


class PartnerCaches:
    """For one thread. `connect` makes the client of a node's cache; `caches()` are the nodes of
    now, this one among them if it is one of those that others ask."""

    def __init__(
        self,
        agent: str,
        connect: Callable[[Partner], RemoteCache],
        caches: Callable[[], Sequence[Partner]],
    ) -> None:
        self._agent = agent
        self._connect = connect
        self._caches = caches
        self._remote: dict[Partner, RemoteCache] = {}
        self._away: dict[Partner, float] = {}
        """Until when it is left out."""
        self._holders: dict[str, Partner] = {}
        """File → a node that has it, as it last said."""

    def ask(self, names: Collection[str]) -> None:
        """Learn which of the files, `MOST_NAMES` at most, others have."""
        self._holders = {}
        nodes = self._nodes()
        asked: dict[str, list[str]] = {}
        for name in names:
            for node in [node for node in ranked(name, nodes) if node != self._agent][:ASKED]:
                asked.setdefault(node, []).append(name)
        for node, wanted in asked.items():
            partner = nodes[node]
            try:
                there = self._client(partner).which(wanted)
            except (CacheUnreachable, NotCached) as error:
                self._leave_out(partner, error, AWAY_S)
                continue
            for name in there:
                self._holders.setdefault(name, partner)

    def have(self, name: str) -> bool:
        """Whether a node had the file when it was asked."""
        return name in self._holders

    def is_own(self, name: str) -> bool:
        """Whether this node is the one that brings the file from the store."""
        nodes = self._nodes()
        return not nodes.keys() - {self._agent} or ranked(name, nodes)[0] == self._agent

    @contextmanager
    def open(self, name: str) -> Iterator[CachedReader]:
        """Read a file that a node has. Raises CacheUnreachable and NotCached, and so does the
        reader; `refuse` if it is not what it should be."""
        partner = self._holders[name]
        with self._client(partner).open(name) as reader:
            yield reader

    def refuse(self, name: str, why: Exception) -> None:
        """The file did not come from the node that had it."""
        partner = self._holders.pop(name)
        if isinstance(why, NotCached):
            return
        self._leave_out(partner, why, AWAY_S)

    def give_up(self, name: str) -> None:
        """The node that is to bring the file has not brought it."""
        nodes = self._nodes()
        first = next((node for node in ranked(name, nodes) if node != self._agent), None)
        if first is not None:
            self._leave_out(nodes[first], f"it has not brought {name}", LATE_S)

    def _nodes(self) -> dict[str, Partner]:
        now = time.monotonic()
        self._away = {partner: until for partner, until in self._away.items() if until > now}
        return {each.agent: each for each in self._caches() if each not in self._away}

    def _client(self, partner: Partner) -> RemoteCache:
        if partner not in self._remote:
            for gone in self._remote.keys() - {*self._caches()}:
                self._remote.pop(gone).close()
            self._remote[partner] = self._connect(partner)
        return self._remote[partner]

    def _leave_out(self, partner: Partner, why: object, away_s: float) -> None:
        _log.warning("token sets do not come from a node", agent=partner.agent, why=str(why))
        self._away[partner] = time.monotonic() + away_s
        self._holders = {n: holder for n, holder in self._holders.items() if holder != partner}
