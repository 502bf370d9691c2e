"""Only ranks that read Ray datasets learn how to reach the cluster, and none gets the token."""

from __future__ import annotations

import json
from typing import Any

from holdfast.integrations.ray_train.rank_place import ClusterPlace, cluster_of
from holdfast_service.cluster.ray_for_ranks import NodesCluster, uses_ray, variables_for_ranks
from holdfast_service.job_model.job_spec import parse

NODE = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": "/private/token",
    "RAY_AUTH_TOKEN": "the-token",
    "RAY_JOB_ID": "01000000",
    "AWS_SECRET_ACCESS_KEY": "key",
    "PATH": "/bin",
}
RUN = {"datasets": "my_module:datasets"}


def test_only_ray_train_functions_with_datasets_use_ray() -> None:
    jobs: dict[str, tuple[dict[str, Any], bool]] = {
        "with": ({"ray_train": "a:b", "ray_run": RUN}, True),
        "without": ({"ray_train": "a:b"}, False),
        "script": ({"script": "-m a"}, False),
        "recipe": ({}, False),
    }
    for name, (document, uses) in jobs.items():
        spec = parse({"name": name, **document}, None)
        assert uses_ray(spec) is uses, name


def test_ranks_get_the_address_and_the_path_of_the_token() -> None:
    cluster = NodesCluster("10.0.0.1:6379", "10.0.0.2", "/code")
    found = variables_for_ranks(cluster, NODE)
    assert cluster_of(found) == ClusterPlace("10.0.0.1:6379", "10.0.0.2", "/code")
    del found["HOLDFAST_TRAIN_CLUSTER"]
    assert found == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/private/token"}
    assert "the-token" not in json.dumps(found)
