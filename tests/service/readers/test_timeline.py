"""The timeline joins the spans of a job that continue each other."""

from __future__ import annotations

from holdfast_service.job_model.goodput import TimeKind, TimeSpan
from holdfast_service.job_model.world_history import FormedWorld, WorldPeriod, mesh_changes
from holdfast_service.readers.timeline import timeline_spans, world_views


def test_spans_of_two_attempts_are_not_joined() -> None:
    steps = ((0.0, 5.0), (5.0, 9.0))
    held = [TimeSpan(TimeKind.PRODUCTIVE, since, until, None) for since, until in steps]
    spans = timeline_spans(held, [], [(0.0, 1), (5.0, 2)], 0.0, 9.0)
    assert [(span.attempt, span.since, span.until) for span in spans] == [(1, 0, 5), (2, 5, 9)]


def test_meshes_over_time_have_nodes_and_are_cut_to_the_timeline() -> None:
    periods = [
        WorldPeriod(0.0, 5.0, {"dp_shard": 4, "tp": 2}, 8),
        WorldPeriod(5.0, 9.0, {"dp_shard": 3, "tp": 1}, 3),
        WorldPeriod(9.0, 12.0, {"dp_shard": 4, "tp": 2}, 8),
    ]
    views = world_views(periods, 2, 2.0, 9.0)
    assert [(view.since, view.until, view.world_size, view.nodes) for view in views] == [
        (2.0, 5.0, 8, 4),
        (5.0, 9.0, 3, 2),
    ]


def test_an_incident_changes_the_mesh_from_the_one_before_it_to_its_newest() -> None:
    sizes = [(4, None), (4, 1), (3, 2), (2, 2), (4, 3), (2, None)]
    formed = [
        FormedWorld(float(at), {"dp_shard": size}, size, incident)
        for at, (size, incident) in enumerate(sizes)
    ]
    found = {
        number: (before.world_size, after.world_size)
        for number, (before, after) in mesh_changes(formed).items()
    }
    assert found == {2: (4, 2), 3: (2, 4)}
