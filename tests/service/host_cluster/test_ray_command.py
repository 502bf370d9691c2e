"""What is handed to `ray start`, and what users may write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_service.host_cluster.endpoint import LARGEST_PORT, Endpoint, parse_endpoint
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.ray_command import (
    NodeOptions,
    NodePlaces,
    Ports,
    arguments,
    check_ports,
    parse_labels,
    parse_port_range,
    parse_resources,
    passed_on,
    variables,
)

PLACES = NodePlaces(
    "0123abcd", Path("/tmp/holdfast-0123abcd"), Path("/dev/shm/holdfast-0123abcd"), Path("/h/token")
)
HEAD = NodeOptions(name="head", address="10.0.0.1")
NODE = NodeOptions(name="a", address="10.0.0.2", head=Endpoint("10.0.0.1", 6379))
PORT = st.integers(1, LARGEST_PORT)
NAME = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True)
WORD = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True)


def named(options: NodeOptions) -> dict[str, str]:
    """The arguments with a value."""
    words = [word for word in arguments(options, PLACES, block=False) if "=" in word]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_a_head_starts_the_service_that_a_node_is_pointed_to() -> None:
    assert "--head" in arguments(HEAD, PLACES, block=False)
    assert named(HEAD)["port"] == "6379"
    assert named(HEAD)["include-dashboard"] == "false"
    assert "--head" not in arguments(NODE, PLACES, block=False)
    assert named(NODE)["address"] == "10.0.0.1:6379"
    assert "port" not in named(NODE)  # Ray refuses it


def test_every_port_that_another_machine_uses_is_fixed() -> None:
    ports = Ports(gcs=7000, node_manager=7001, object_manager=7002, workers=(7100, 7200))
    given = named(NodeOptions("head", "10.0.0.1", ports=ports))
    assert given["port"] == "7000"
    assert (given["node-manager-port"], given["object-manager-port"]) == ("7001", "7002")
    assert (given["min-worker-port"], given["max-worker-port"]) == ("7100", "7200")


def test_a_machine_offers_all_it_has_unless_options_say_otherwise() -> None:
    assert not {"num-cpus", "num-gpus", "labels", "resources"} & named(NODE).keys()
    limited = NodeOptions(
        "a",
        "10.0.0.2",
        NODE.head,
        cpus=0,
        gpus=2,
        labels={"holdfast.io/domain": "rack-1", "zone": "b"},
        resources={"fast_disk": 1.0},
    )
    assert (named(limited)["num-cpus"], named(limited)["num-gpus"]) == ("0", "2")
    assert named(limited)["labels"] == "holdfast.io/domain=rack-1,zone=b"
    assert json.loads(named(limited)["resources"]) == {"fast_disk": 1.0}


def test_ray_stays_in_the_foreground_only_when_asked() -> None:
    assert "--block" not in arguments(NODE, PLACES, block=False)
    assert "--block" in arguments(NODE, PLACES, block=True)


def test_all_processes_are_marked_authenticated_and_wait_for_a_lost_head() -> None:
    found = variables(NODE, PLACES)
    assert found["HOLDFAST_CLUSTER_ID"] == "0123abcd"
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", "/h/token")
    assert int(found["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 86400
    assert found["HOLDFAST_SHM_ROOT"] == "/dev/shm/holdfast-0123abcd"
    assert found["TMPDIR"].startswith("/tmp/holdfast-0123abcd/")


def test_the_processes_of_a_node_find_its_certificates() -> None:
    assert "HOLDFAST_TLS_DIR" not in variables(NODE, PLACES)
    assert variables(replace(NODE, tls_dir=Path("/h/tls")), PLACES)["HOLDFAST_TLS_DIR"] == "/h/tls"


def test_only_a_head_uses_redis() -> None:
    redis = "10.0.0.9:6379"
    assert (
        variables(NodeOptions("h", "10.0.0.1", redis=redis), PLACES)["RAY_REDIS_ADDRESS"] == redis
    )
    joined = NodeOptions("a", "10.0.0.2", NODE.head, redis=redis)
    assert "RAY_REDIS_ADDRESS" not in variables(joined, PLACES)


def test_rays_own_folder_lies_in_a_private_one() -> None:
    assert Path(named(NODE)["temp-dir"]).parent == PLACES.temp_dir
    assert all(PLACES.mark in str(folder) for folder in PLACES.made)


@given(st.one_of(NAME, st.ip_addresses().map(str)), PORT)
def test_an_address_is_read_as_it_is_printed(host: str, port: int) -> None:
    assert parse_endpoint(str(Endpoint(host, port)), 1) == Endpoint(host, port)


@given(NAME, PORT)
def test_an_address_without_a_port_has_the_default(host: str, port: int) -> None:
    assert parse_endpoint(host, port) == Endpoint(host, port)
    assert parse_endpoint("[fd00::1]", port) == Endpoint("fd00::1", port)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        found = parse_endpoint(text, 6379)
    except HostClusterError:
        return
    assert found.host
    assert 0 < found.port <= LARGEST_PORT


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:65536", "a:b", "http://a:1", "a b", "::1:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(HostClusterError, match="is not an address"):
        parse_endpoint(text, 6379)


@given(st.dictionaries(WORD, WORD, max_size=4))
def test_labels_are_read_as_written(labels: dict[str, str]) -> None:
    assert parse_labels([f"{key}={value}" for key, value in labels.items()]) == labels


def test_only_the_head_gets_the_settings_of_tls_to_redis() -> None:
    machine = {"RAY_REDIS_CA_CERT": "/etc/redis-ca.pem", "RAY_REDIS_PASSWORD": "word", "HOME": "/"}
    assert passed_on(HEAD, machine) == {"RAY_REDIS_CA_CERT": "/etc/redis-ca.pem"}
    assert passed_on(NODE, machine) == {}


@pytest.mark.parametrize("text", ["", "a", "=b", "a=", "a=b=c", "a=b,c=d", "a b=c", "ray.io/x=1"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(HostClusterError, match="label"):
        parse_labels([text])


@pytest.mark.parametrize("text", ["", "a", "a=", "a=x", "a=-1", "a=1e3", "=1", "CPU=2", "GPU=1"])
def test_what_is_no_resource_is_refused(text: str) -> None:
    with pytest.raises(HostClusterError, match="resource"):
        parse_resources([text])
    assert parse_resources(["fast_disk=1", "tokens=0.5"]) == {"fast_disk": 1.0, "tokens": 0.5}


@pytest.mark.parametrize("text", ["", "1", "80-90", "20000-10000", "1024-65536", "a-b"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(HostClusterError, match="range of ports"):
        parse_port_range(text)
    assert parse_port_range("20000-20100") == (20000, 20100)


@given(
    st.tuples(PORT, PORT, PORT),
    st.tuples(PORT, st.integers(0, 50)),
    st.none() | st.tuples(PORT, st.integers(0, 50)),
)
def test_no_port_has_two_purposes(
    single: tuple[int, int, int], workers: tuple[int, int], agents: tuple[int, int] | None
) -> None:
    ranges = [(first, first + more) for first, more in (workers, agents or (0, -1))]
    ports = Ports(*single, ranges[0], ranges[1] if agents else None)
    used = [*single, *(port for first, last in ranges for port in range(first, last + 1))]
    if len(used) == len(set(used)):
        check_ports(ports)
    else:
        with pytest.raises(HostClusterError, match="two purposes"):
            check_ports(ports)
