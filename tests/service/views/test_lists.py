"""Two specs are compared path by path."""

from __future__ import annotations

from holdfast_service.views.lists import SpecDifferenceView, differences


def test_paths_of_either_spec_are_compared() -> None:
    assert differences({"a": {"x": 1}, "b": 2}, {"a": {"x": 1, "y": 3}}) == [
        SpecDifferenceView(path="a.y", left=None, right=3),
        SpecDifferenceView(path="b", left=2, right=None),
    ]
