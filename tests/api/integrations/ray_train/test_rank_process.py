"""A rank finds its function and its options, or says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrations.ray_train.errors import FunctionUnusable
from holdfast.integrations.ray_train.rank_place import (
    CONFIG_VARIABLE,
    RUN_VARIABLE,
    WorldPlace,
    config_of,
    run_of,
)
from holdfast.integrations.ray_train.rank_process import call, load

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
}


def test_the_place_is_that_of_torchruns_variables() -> None:
    assert WorldPlace.of(TORCHRUN) == WorldPlace(3, 4, 1, 2, 1)
    assert WorldPlace.of({**TORCHRUN, "GROUP_RANK": "0"}).node_rank == 0
    assert WorldPlace.of(TORCHRUN).has_other_nodes


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(FunctionUnusable, match=name):
        WorldPlace.of({key: value for key, value in TORCHRUN.items() if key != name})


def test_the_configuration_and_the_options_are_read() -> None:
    assert config_of({}) == {}
    assert config_of({CONFIG_VARIABLE: '{"lr": 0.1}'}) == {"lr": 0.1}
    assert run_of({RUN_VARIABLE: json.dumps({"num_to_keep": 2})}).num_to_keep == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"unknown": 1}', '{"num_to_keep": 0}'])
def test_unusable_options_are_refused(text: str) -> None:
    with pytest.raises(FunctionUnusable, match=RUN_VARIABLE):
        run_of({RUN_VARIABLE: text})


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("train", "module:function"),
        ("no_such_module:train", "no module no_such_module"),
        ("json:no_such", "has no no_such"),
        ("json:__name__", "no function but a str"),
    ],
)
def test_a_function_that_is_not_there_is_refused(reference: str, why: str) -> None:
    with pytest.raises(FunctionUnusable, match=why):
        load(reference)


def test_an_import_that_a_module_lacks_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_one.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load("lacks_one:train")


def test_a_function_gets_its_configuration_if_it_takes_one() -> None:
    config = {"lr": 0.1}
    without: Callable[[], str] = lambda: "nothing"  # noqa: E731
    assert call(without, config) == "nothing"
    assert call(lambda given: given, config) == config
    with pytest.raises(FunctionUnusable, match="takes 2 arguments"):
        call(lambda first, second: None, config)


def test_fit_in_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.programs.ray_functions import train

    from holdfast.integrations.ray_train import TorchTrainer

    monkeypatch.setenv("HOLDFAST_PROGRAM_SOCKET", "name")
    trainer: Any = TorchTrainer(train)
    with pytest.raises(FunctionUnusable, match="__main__"):
        trainer.fit()
