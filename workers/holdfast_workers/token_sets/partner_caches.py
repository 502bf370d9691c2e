"""Files of token sets that a node has from the caches of other nodes of its job.

Each shard has an owner, the node that brings it from the store, and the others have it from there:
so it leaves the store about once for all of them. All nodes agree on the owner without a message,
by rendezvous hashing (Thaler and Ravishankar 1998): they rank the nodes by a hash of file and node,
and the first is the owner. Nobody depends on it: an owner that brings nothing for some time owns
nothing for a while, and a node that fails is not asked either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog
import xxhash

from holdfast_workers.data.token_set import BadTokenSet
from holdfast_workers.memory.cache_transfer import (
    CachedReader,
    CacheUnreachable,
    NotCached,
    RemoteCache,
)
from holdfast_workers.protocol.messages import Partner

LATE_AFTER_S = 10.0
"""How long an owner may bring nothing of what it is waited for."""
LATE_S = 300.0
"""How long it owns nothing then."""
AWAY_S = 30.0
"""How long a node that failed is not asked; twice as long after each further failure."""
MOST_AWAY_S = 480.0
ASK_S = 0.2
"""Between two questions to all nodes."""
_SLOW_READS = 3
"""An owner also has the time for so many reads, as long as those of this node take."""
_HOLDERS_TRIED = 3

_log = structlog.get_logger()


def ranked(name: str, nodes: Iterable[str]) -> list[str]:
    """The nodes in the order in which they are to bring a file. Whether others come or go does not
    change the order of the rest."""
    hashes = {node: xxhash.xxh3_64_intdigest(f"{name} {node}".encode()) for node in nodes}
    return sorted(hashes, key=lambda node: (hashes[node], node))


class PartnerCaches:
    """For one thread. `connect` makes the client of a node's cache; `caches()` are the nodes of
    now, this one among them if it may own files."""

    def __init__(
        self,
        agent: str,
        connect: Callable[[Partner], RemoteCache],
        caches: Callable[[], Sequence[Partner]],
        late_after_s: float = LATE_AFTER_S,
    ) -> None:
        self._agent = agent
        self._connect = connect
        self._caches = caches
        self._late_after_s = late_after_s
        self.taken = 0
        """The files that came from other nodes."""
        self._begun_with: tuple[Partner, ...] = ()
        self._slowest_read_s = 0.0
        self._remote: dict[Partner, RemoteCache] = {}
        self._asked_at = 0.0
        self._asked: set[str] = set()
        """What was missing then."""
        self._holders: dict[str, Partner] = {}
        """File → a node that has it, as it last said."""
        self._waits_since: dict[str, float] = {}
        """Owner → since when it has brought nothing of what is missing."""
        self._late: dict[str, float] = {}
        """Owner → until when it owns nothing."""
        self._away: dict[Partner, float] = {}
        """Until when it is not asked."""
        self._failures: dict[Partner, int] = {}
        """Since it was last of use."""

    def begin(self) -> None:
        """Other files are missing than before: nobody is waited for yet."""
        self._begun_with = tuple(self._caches())
        self._asked_at = 0.0
        self._holders = {}
        self._waits_since = {}

    @property
    def are_new(self) -> bool:
        """Whether the nodes are others than when it began."""
        return tuple(self._caches()) != self._begun_with

    def rest(self) -> None:
        """No file is missing: nothing is asked for some time."""
        while self._remote:
            self._remote.popitem()[1].close()

    def look(self, missing: Collection[str]) -> None:
        """Learn what other nodes have of the files that are missing, `MOST_NAMES` at most, and
        which owners are late. Asks nobody if it has asked just now, and some of them can be had, or
        it knows that none can."""
        is_known = self._holders.keys() & set(missing) or self._asked >= set(missing)
        if is_known and time.monotonic() < self._asked_at + ASK_S:
            return
        brought, self._asked_at = set[str](), 0.0
        while not self._asked_at:  # once more after each failure
            self._asked, self._asked_at = set(missing), time.monotonic()
            brought |= self._ask([name for name in missing if name not in self._holders])
        now = self._asked_at
        left = [name for name in missing if name not in self._holders]
        owners = {self._owner(name) for name in left} - {self._agent}
        since = {node: self._waits_since.get(node, now) for node in owners}
        self._waits_since = {**since, **dict.fromkeys(owners & brought, now)}
        patience_s = max(self._late_after_s, _SLOW_READS * self._slowest_read_s)
        for node in [node for node, at in self._waits_since.items() if now >= at + patience_s]:
            _log.warning("token sets are not waited for any more", agent=node)
            self._late[node] = now + LATE_S
            del self._waits_since[node]

    def have(self, name: str) -> bool:
        """Whether a node had the file when it was asked."""
        return name in self._holders

    def is_own(self, name: str) -> bool:
        """Whether this node is the owner of a file."""
        return self._owner(name) == self._agent

    def take(self, name: str, use: Callable[[CachedReader], None]) -> bool:
        """Let `use` read the file from nodes that have it, until it succeeds; False: it did with
        none of them. It raises BadTokenSet if the content is not right; what else it raises,
        except CacheUnreachable, is raised here."""
        for _ in range(_HOLDERS_TRIED):
            if (partner := self._holders.get(name)) is None:
                return False
            try:
                with self._client(partner).open(name) as reader:
                    use(reader)
            except (CacheUnreachable, NotCached, BadTokenSet) as error:
                del self._holders[name]
                if not isinstance(error, NotCached):
                    self._leave_out(partner, error)
                self._ask([name])
            else:
                self._failures.pop(partner, None)
                self.taken += 1
                return True
        return False

    def note_read(self, seconds: float) -> None:
        """This node has read a shard from the store: others do not read much faster."""
        self._slowest_read_s = max(seconds, self._slowest_read_s / 2)

    def _owner(self, name: str) -> str:
        """This node, if there is none, or all others fail."""
        now = time.monotonic()
        self._late = {node: until for node, until in self._late.items() if until > now}
        nodes = self._reached().keys() - self._late.keys()
        return next(iter(ranked(name, nodes)), self._agent)

    def _reached(self) -> dict[str, Partner]:
        now = time.monotonic()
        self._away = {partner: until for partner, until in self._away.items() if until > now}
        return {each.agent: each for each in self._caches() if each not in self._away}

    def _ask(self, names: Collection[str]) -> set[str]:
        """Learn who has the files: of several, the one that is ranked first. Returns the nodes
        that have any."""
        there: dict[str, dict[str, Partner]] = {}
        for node, partner in self._reached().items() if names else ():
            if node == self._agent:
                continue
            try:
                for name in self._client(partner).which(names):
                    there.setdefault(name, {})[node] = partner
            except (CacheUnreachable, NotCached) as error:
                self._leave_out(partner, error)
        for name, nodes in there.items():
            self._holders[name] = nodes[ranked(name, nodes)[0]]
        return {node for nodes in there.values() for node in nodes}

    def _client(self, partner: Partner) -> RemoteCache:
        if partner not in self._remote:
            for gone in self._remote.keys() - {*self._caches()}:
                self._remote.pop(gone).close()
            self._remote[partner] = self._connect(partner)
        return self._remote[partner]

    def _leave_out(self, partner: Partner, why: Exception) -> None:
        _log.warning("token sets do not come from a node", agent=partner.agent, why=str(why))
        failures = self._failures[partner] = self._failures.get(partner, 0) + 1
        self._away[partner] = time.monotonic() + min(AWAY_S * 2 ** (failures - 1), MOST_AWAY_S)
        self._holders = {n: holder for n, holder in self._holders.items() if holder != partner}
        self._asked_at = 0.0  # others may have what it had
