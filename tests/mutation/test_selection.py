"""Which mutations a seed chooses, from the product and from small rooms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.mutants import Kind, sites
from tests.mutation.rooms import LEFT_OUT, ON_ACCELERATORS, ROOMS, room_sites
from tests.mutation.selection import RoomSite, choose

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(["x = a < b", "x = a is b", "f(a, b)", "y = b[1:]"] * 4)


def sites_of(room: str) -> list[RoomSite]:
    return [RoomSite(f"{room}.py", site) for site in sites(SOURCE)]


def test_each_room_is_mutated_before_one_is_mutated_twice_and_kinds_have_equal_parts() -> None:
    rooms = {room: sites_of(room) for room in "abcdefghijkl"}
    chosen = choose(rooms, 16, seed=35)
    assert [mutation.number for mutation in chosen] == list(range(1, 17))
    assert {mutation.room for mutation in chosen[:12]} == set(rooms)
    assert len({mutation.room for mutation in chosen[12:]}) == 4
    assert set(Counter(mutation.site.kind for mutation in chosen).values()) == {4}


def test_the_choice_depends_on_the_seed_alone() -> None:
    rooms = {room: sites_of(room) for room in ("one", "two")}
    assert choose(rooms, 8, seed=1) == choose(dict(reversed(rooms.items())), 8, seed=1)
    assert choose(rooms, 8, seed=1) != choose(rooms, 8, seed=2)


def test_a_room_without_sites_is_refused() -> None:
    with pytest.raises(ValueError, match="room two has no site left"):
        choose({"one": sites_of("one"), "two": []}, 2, seed=1)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_of_the_product_has_sites(room: str) -> None:
    assert next(room_sites(ROOT, room), None) is not None


def test_what_is_left_out_exists() -> None:
    assert [name for name in LEFT_OUT if not (ROOT / name).exists()] == []
    for path, functions in ON_ACCELERATORS.items():
        text = (ROOT / path).read_text()
        assert [name for name in functions if f"def {name}(" not in text] == [], path


def test_a_released_migration_is_never_mutated(tmp_path: Path) -> None:
    folder = tmp_path / ROOMS["store"]
    (folder / "migrations/versions").mkdir(parents=True)
    (folder / "migrations/versions/0001.py").write_text(SOURCE)
    (folder / "leases.py").write_text(SOURCE)
    assert {found.path for found in room_sites(tmp_path, "store")} == {
        f"{ROOMS['store']}/leases.py"
    }
    assert {found.site.kind for found in room_sites(tmp_path, "store")} == set(Kind)
