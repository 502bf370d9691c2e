"""A series that is thinned out for a chart still shows what matters."""

from __future__ import annotations

from holdfast_service.readers.metric_series import Row, thinned_with_extremes
from holdfast_service.store import series


def test_a_thinned_series_keeps_every_spike_and_dip() -> None:
    rows: list[Row] = [(step, 1, [1.0] * len(series.COLUMNS)) for step in range(1, 201)]
    column = series.COLUMNS.index("loss")
    rows[90][2][column], rows[140][2][column] = 9.0, 0.1
    thin = thinned_with_extremes(rows, ["loss"], 20)
    assert len(thin) <= 20
    assert {91, 141, 200} <= {step for step, _, _ in thin}
