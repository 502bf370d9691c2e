"""A recipe is found by its built-in name or as module:attribute, or refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast_workers.recipes.lookup import UnknownRecipe, resolve
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.training.recipe import World


def test_names_lead_to_recipes() -> None:
    assert resolve("pretrain") is PretrainRecipe
    assert resolve("holdfast_workers.recipes.pretrain:PretrainRecipe") is PretrainRecipe


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pretrian", "no built-in recipe"),
        ("no_such_package.module:Recipe", "no module named 'no_such_package'"),
        ("holdfast_workers.training.recipe:Nothing", "no callable 'Nothing'"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(UnknownRecipe, match=reason):
        resolve(name)


def test_an_import_error_inside_a_users_module_passes_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_recipe_module.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        resolve("broken_recipe_module:Recipe")
    sys.modules.pop("broken_recipe_module", None)


def test_a_rank_has_its_mesh_coordinates() -> None:
    world = World(5, 8, {"dp_shard": 4, "tp": 2}, attempt=1, device="cpu")
    assert (world.coordinate("dp_shard"), world.coordinate("tp")) == (2, 1)
    assert (world.size("pp"), world.coordinate("pp")) == (1, 0)


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (4, 4), (-1, 4)])
def test_an_inconsistent_world_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="world"):
        World(rank, size, {"dp_shard": 2, "tp": 2}, attempt=1, device="cpu")
