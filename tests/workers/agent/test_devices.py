"""Devices are passed on to workers in the form in which the agent's environment names them."""

from __future__ import annotations

import pytest

from holdfast_workers.agent.devices import Devices, NoDeviceFree
from holdfast_workers.ipc import environment
from holdfast_workers.ipc.visible_devices import VisibleDevices

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-a1b2")
SLICES = ("MIG-b41a0c8a-7d2b-5b5e-9e5d-ec0e4a1c2f11", "MIG-GPU-8932f937-d72c/1/0")


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("CUDA_VISIBLE_DEVICES", ("0", "1")),
        ("CUDA_VISIBLE_DEVICES", ("5", "2")),
        ("CUDA_VISIBLE_DEVICES", UUIDS),
        ("CUDA_VISIBLE_DEVICES", SLICES),
        ("HIP_VISIBLE_DEVICES", ("3", "0")),
    ],
)
def test_each_worker_gets_a_device_of_its_own_by_the_name_that_the_agent_knows(
    variable: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, ",".join(names))
    devices = Devices(1)
    assert [devices.assign(f"w{n}") for n in range(2)] == [{variable: name} for name in names]
    with pytest.raises(NoDeviceFree, match=variable):
        devices.assign("third")
    devices.free("w0")
    assert devices.assign("third") == {variable: names[0]}


def test_a_variable_without_devices_does_not_hide_those_of_the_other() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "1"}
    assert VisibleDevices.of(both) == VisibleDevices("HIP_VISIBLE_DEVICES", ("1",))
    assert VisibleDevices.of({}).names == ()


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_job_may_not_choose_its_devices_itself(variable: str) -> None:
    assert environment.is_reserved(variable)
    assert variable in environment.for_users_code({variable: "0"})
