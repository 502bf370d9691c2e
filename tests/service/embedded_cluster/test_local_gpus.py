"""GPUs of this machine: found by NVML, else by Ray, or named by the operator."""

from __future__ import annotations

import pynvml
import pytest
from tests.support.faults.fake_nvml import FakeDevice, FakeNvml

from holdfast_service.embedded_cluster import local_gpus
from holdfast_service.embedded_cluster.local_gpus import LocalGpus


def test_nvml_names_the_gpus_and_the_device_variable_selects_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml(FakeDevice("GPU-a"), FakeDevice("GPU-b"))
    monkeypatch.setattr(local_gpus, "_installed_nvml", lambda: nvml)
    assert local_gpus.find({}) == LocalGpus("CUDA_VISIBLE_DEVICES", ("GPU-a", "GPU-b"))
    assert local_gpus.find({"CUDA_VISIBLE_DEVICES": "1"}).ids == ("1",)
    assert local_gpus.find({"CUDA_VISIBLE_DEVICES": ""}).ids == ()
    assert nvml.open == 0


def test_without_a_driver_there_is_no_uuid() -> None:
    assert local_gpus.nvml_uuids(None) == ()
    no_driver = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    nvml = FakeNvml(FakeDevice(), fails=no_driver)
    assert local_gpus.nvml_uuids(nvml) == ()


def test_named_gpus_are_taken_unseen() -> None:
    assert local_gpus.named(["GPU-x"]) == LocalGpus("CUDA_VISIBLE_DEVICES", ("GPU-x",))
    assert local_gpus.named([]).ids == ()
