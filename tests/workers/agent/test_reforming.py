"""Survivors keep their processes on the CPU; on accelerators only if the operator asks for it."""

from __future__ import annotations

import pytest

from holdfast_workers.agent.reforming import Reform, communicator_variables, reform_of
from holdfast_workers.ipc.environment import is_reserved


def test_the_device_decides_unless_the_operator_does() -> None:
    assert reform_of("", "cpu") is Reform.IN_PLACE
    assert reform_of("", "cuda:0") is Reform.FORK
    for device in ("cpu", "cuda:0"):
        assert [reform_of(value, device) for value in Reform] == list(Reform)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"HOLDFAST_REFORM='inplace'.*in_place or fork"):
        reform_of("inplace", "cpu")


def test_the_watchdog_of_communicators_is_off_only_where_ranks_abort_them_themselves() -> None:
    variables = communicator_variables(Reform.IN_PLACE, "cuda:0")
    assert variables == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert all(is_reserved(name) for name in variables), "a job must not turn it on again"
    assert communicator_variables(Reform.FORK, "cuda:0") == {}
    assert communicator_variables(Reform.IN_PLACE, "cpu") == {}
