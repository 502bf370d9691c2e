"""A job without a memory tier has none for any plug-in."""

from __future__ import annotations

from holdfast.integrations.memory_setting import keeps_in_memory


def test_memory_is_used_if_the_spec_has_a_memory_tier() -> None:
    name = "HOLDFAST_MEMORY_STEPS"
    assert [keeps_in_memory({name: text}) for text in ("0", "1", "auto")] == [False, True, True]
    assert not keeps_in_memory({})
