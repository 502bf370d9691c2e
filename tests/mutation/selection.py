"""Which mutations are made for a seed: a fixed number of each kind, in every room. Pure.

The choice depends on the seed and the sites alone. Every mutation draws from a generator of its
own, so a change of one room moves the mutations of the other rooms only if it takes away the last
site of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tests.mutation.mutants import Kind, Site


@dataclass(frozen=True)
class RoomSite:
    path: str
    """Relative to the checkout."""
    site: Site


@dataclass(frozen=True)
class Mutation:
    number: int
    """From 1."""
    room: str
    path: str
    site: Site


def choose(sites: Mapping[str, Sequence[RoomSite]], count: int, seed: int) -> list[Mutation]:
    """`count` mutations: every room once, in a random order, before a room has its second; the
    kinds in equal parts. Raises ValueError if that is impossible."""
    kinds = _kinds(count)
    chosen: list[Mutation] = []
    for number, room in enumerate(_rooms(sorted(sites), count, seed), 1):
        random = Random(f"{seed}/{number}")
        taken = {(mutation.path, mutation.site.line) for mutation in chosen}
        free = [found for found in sites[room] if (found.path, found.site.line) not in taken]
        possible = [kind for kind in kinds if any(found.site.kind is kind for found in free)]
        if not possible:
            wanted = " or ".join(sorted(set(kinds)))
            raise ValueError(f"room {room} has no site left for {wanted}: take another seed")
        kind = random.choice(possible)
        kinds.remove(kind)
        found = _draw([found for found in free if found.site.kind is kind], random)
        chosen.append(Mutation(number, room, found.path, found.site))
    return chosen


def _kinds(count: int) -> list[Kind]:
    return [kind for _ in range(-(-count // len(Kind))) for kind in Kind][:count]


def _rooms(rooms: Sequence[str], count: int, seed: int) -> list[str]:
    """All rooms in a random order, then all in another one, until there are `count`."""
    random = Random(f"{seed}/rooms")
    rounds = -(-count // len(rooms))
    return [room for _ in range(rounds) for room in random.sample(rooms, len(rooms))][:count]


def _draw(found: Sequence[RoomSite], random: Random) -> RoomSite:
    """A line, then a site of it: a call with many arguments counts like one with two."""
    lines = sorted({(site.path, site.site.line) for site in found})
    path, line = random.choice(lines)
    return random.choice([site for site in found if (site.path, site.site.line) == (path, line)])
