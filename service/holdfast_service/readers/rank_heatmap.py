"""Resamples stored rank times to the buckets of a rank × time heatmap. Pure."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from holdfast_service.store.rank_series import RankTimes, Values
from holdfast_service.views.ranks import RankMeasure

Rows = tuple[tuple[float | None, ...], ...]


def measure(of: RankMeasure, times: RankTimes, ranks: int) -> Values:
    """Seconds by bucket and rank for a measure; NaN where there was no step."""
    compute = times.compute[:, :ranks]
    match of:
        case RankMeasure.COMPUTE_S:
            return compute
        case RankMeasure.STEP_S:
            has_step = np.where(np.isnan(compute), np.nan, np.float32(1.0))
            values: Values = has_step * times.steps[:, None]
            return values
        case RankMeasure.LAG:
            with _empty_is_nan():
                lag: Values = compute - np.nanmin(compute, axis=1, keepdims=True)
            return lag


def rebucket(
    values: Values, starts: npt.NDArray[np.float64], since: float, bucket_s: float, buckets: int
) -> Values:
    """Values by rank and new bucket: the mean of the old buckets that begin in the new bucket. A
    new bucket narrower than the old ones takes the value of the old bucket around it."""
    found = np.full((buckets, values.shape[1]), np.nan, np.float32)
    if not len(starts):
        return found.T
    width = float(starts[1] - starts[0]) if len(starts) > 1 else bucket_s
    edges = since + bucket_s * np.arange(buckets + 1)
    firsts = np.searchsorted(starts, edges, "left")
    filled = firsts[1:] > firsts[:-1]
    if filled.any():
        begins, upto = firsts[:-1][filled], int(firsts[-1])
        finite = np.isfinite(values[:upto])
        total = np.add.reduceat(np.where(finite, values[:upto], np.float32(0)), begins, axis=0)
        count = np.add.reduceat(finite, begins, axis=0, dtype=np.int32)
        means = np.full(total.shape, np.nan, np.float32)
        np.divide(total, count, out=means, where=count > 0, casting="unsafe")
        found[filled] = means
    within = np.searchsorted(starts, edges[:-1], "right") - 1
    narrow = (firsts[1:] == firsts[:-1]) & (within >= 0) & (starts[within] + width > edges[:-1])
    found[narrow] = values[within[narrow]]
    return found.T


def to_json_rows(values: Values) -> Rows:
    """Values rounded to four digits for JSON; null for NaN."""
    digits = np.where(values > 0, 3 - np.floor(np.log10(np.where(values > 0, values, 1.0))), 6)
    scale = 10.0 ** np.nan_to_num(np.clip(digits, 0, 9), nan=0.0)
    rounded = np.round(values.astype(np.float64) * scale) / scale
    return tuple(
        tuple(None if value != value else value for value in row)  # noqa: PLR0124  (NaN != NaN)
        for row in rounded.tolist()
    )


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Silences numpy's warnings about all-NaN slices: their result, NaN, is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
