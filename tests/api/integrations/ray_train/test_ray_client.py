"""A rank that cannot reach the Ray cluster says so at once."""

from __future__ import annotations

import signal
import socket

import pytest

from holdfast.integrations.ray_train.errors import ClusterUnusable, FunctionUnusable
from holdfast.integrations.ray_train.rank_place import ClusterPlace, cluster_of
from holdfast.integrations.ray_train.ray_client import connect


def test_a_cluster_that_does_not_answer_is_named_and_sigterm_is_as_before() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ClusterUnusable, match=f"{address}.*RAY_AUTH_TOKEN_PATH"):
        connect(ClusterPlace(address, "127.0.0.1", ""), "job", ships_code=True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_of_other_jobs_do_not_know_the_cluster() -> None:
    with pytest.raises(FunctionUnusable, match="HOLDFAST_TRAIN_CLUSTER is not set"):
        cluster_of({})
