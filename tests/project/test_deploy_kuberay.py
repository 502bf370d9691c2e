"""`deploy/kuberay` fits the schemas of Kubernetes, our commands and settings, and itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.support.base_installation import project

from holdfast.cli.main import build
from holdfast_service.embedded_cluster.ray_settings import HEAD_MAY_BE_AWAY
from holdfast_service.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deploy/kuberay"
PAGE = (ROOT / "docs/deploy/kubernetes.md").read_text()
KUBERNETES = ("1.33", "1.37")
WITHOUT_SCHEMA = {"RayCluster", "ServiceMonitor"}


@cache
def documents() -> tuple[dict[str, Any], ...]:
    """All objects, those of the components included."""
    files = [file for file in KUBERAY.rglob("*.yaml") if file.name != "kustomization.yaml"]
    return tuple(each for file in files for each in yaml.safe_load_all(file.read_text()))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in documents() if each["kind"] == kind]


@cache
def cluster() -> dict[str, Any]:
    (found,) = of_kind("RayCluster")
    return dict(found["spec"])


def templates() -> dict[str, dict[str, Any]]:
    """The templates of pods, by group."""
    groups = {each["groupName"]: each["template"] for each in cluster()["workerGroupSpecs"]}
    return {"head": cluster()["headGroupSpec"]["template"], **groups}


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Group, pod and container of each group's only container."""
    for group, template in templates().items():
        (container,) = template["spec"]["containers"]
        yield group, template["spec"], container


def values_of(container: dict[str, Any]) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in container["env"]}


def labels_of(group: str) -> dict[str, str]:
    """The labels of a group's pods: of the template, and what KubeRay adds."""
    return {
        "ray.io/cluster": "holdfast",
        "ray.io/node-type": "head" if group == "head" else "worker",
        "ray.io/group": "headgroup" if group == "head" else group,
        **templates()[group]["metadata"]["labels"],
    }


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector, with expressions or without, selects a pod with these labels."""
    for expression in selector.get("matchExpressions", []):
        among = labels.get(expression["key"]) in expression["values"]
        if among is not {"In": True, "NotIn": False}[expression["operator"]]:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def rules(labels: dict[str, str], direction: str) -> Iterator[tuple[dict[str, Any], set[int]]]:
    """What pods with these labels may reach (Egress), or be reached by (Ingress): each peer, with
    its TCP ports."""
    policies = [each["spec"] for each in of_kind("NetworkPolicy")]
    own = [
        each
        for each in policies
        if selects(each["podSelector"], labels) and direction in each["policyTypes"]
    ]
    assert own, "everything would be allowed"
    for rule in (rule for policy in own for rule in policy.get(direction.lower(), [])):
        for port in rule.get("ports", [{"protocol": "TCP", "port": 1, "endPort": 65535}]):
            if port["protocol"] == "TCP":
                ports = set(range(port["port"], port.get("endPort", port["port"]) + 1))
                for peer in rule["from" if direction == "Ingress" else "to"]:
                    yield peer, ports


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_and_pod_fits_its_schema(version: str) -> None:
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        for template in templates().values()
    ]
    known = [each for each in documents() if each["kind"] not in WITHOUT_SCHEMA]
    for document in (*known, *pods):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
def test_kustomize_builds_all_of_it(tmp_path: Path) -> None:
    copy = shutil.copytree(KUBERAY, tmp_path / "kuberay")
    file = copy / "kustomization.yaml"
    file.write_text(file.read_text().replace("# components:", "components:"))
    command = ["kubectl", "kustomize", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == len(documents()) + 1, "the settings are added"


def test_every_file_is_a_resource_and_the_image_and_ray_are_those_of_the_project() -> None:
    named = set()
    for file in KUBERAY.rglob("kustomization.yaml"):
        named |= {file.parent / name for name in yaml.safe_load(file.read_text())["resources"]}
    assert named == set(KUBERAY.rglob("*.yaml")) - set(KUBERAY.rglob("kustomization.yaml"))
    (image,) = yaml.safe_load((KUBERAY / "kustomization.yaml").read_text())["images"]
    assert image["newTag"] == f"{project()['version']}-cuda"
    for command in ("docker build -f deploy/Dockerfile -t", "docker push"):
        assert f"{command} {image['newName']}:{image['newTag']}" in PAGE
    assert {each["image"] for _, _, each in containers()} == {image["name"]}
    assert f"ray=={cluster()['rayVersion']}\n" in (ROOT / "requirements.lock").read_text()
    users = {pod["securityContext"]["runAsUser"] for _, pod, _ in containers()}
    assert f"USER {users.pop()}:" in (ROOT / "deploy/Dockerfile").read_text()
    assert not users


def test_each_pod_runs_a_command_that_exists_with_settings_that_exist() -> None:
    settings = {f"HOLDFAST_{name.upper()}" for name in Settings.model_fields}
    for group, _, container in containers():
        words = " ".join(container["args"])
        assert set(re.findall(r"\$\((\w+)\)", words)) <= values_of(container).keys()
        program, *rest = re.sub(r"\$\(\w+\)", "8", words).split()
        assert program == ("holdfast-server" if group == "servers" else "holdfast")
        rest = ["serve", *rest] if group == "servers" else rest
        build().parse_args(rest, exit_on_error=False, print_error=False)
        ours = {name for name in values_of(container) if name.startswith("HOLDFAST_")}
        assert ours <= settings | {"HOLDFAST_SETTINGS_DIR"}
    lines = (KUBERAY / "settings.env").read_text().splitlines()
    assert {line.partition("=")[0] for line in lines} <= settings


def test_the_control_plane_runs_no_ranks_and_outlives_an_absence_of_the_head() -> None:
    groups = {each["groupName"]: each["rayStartParams"] for each in cluster()["workerGroupSpecs"]}
    none = {"num-cpus": "0", "num-gpus": "0"}
    assert cluster()["headGroupSpec"]["rayStartParams"] == groups["servers"] == none
    (server,) = templates()["servers"]["spec"]["containers"]
    assert HEAD_MAY_BE_AWAY.items() <= values_of(server).items()
    for probe in ("readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] == "/healthz", "/readyz asks Ray's head"


def test_the_head_and_kuberay_use_the_same_redis() -> None:
    options = cluster()["gcsFaultToleranceOptions"]
    (head,) = templates()["head"]["spec"]["containers"]
    assert f"--redis-address={options['redisAddress']}" in head["args"]
    assert "--redis-password-file=/run/holdfast/redis/password" in head["args"]
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "holdfast-redis", "key": "password"}


def test_pods_are_confined_and_have_only_the_secrets_that_they_need_from_the_page() -> None:
    allowed = {"head": {"ray", "redis"}, "servers": {"ray", "keys", "settings"}}
    for group, pod, container in containers():
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["automountServiceAccountToken"] is False
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes.keys() == {each["name"] for each in container["volumeMounts"]}, group
        secrets = {name: each["secret"] for name, each in volumes.items() if "secret" in each}
        assert secrets.keys() == allowed.get(group, {"ray"}), "nodes run users' code"
        for secret in secrets.values():
            assert secret["defaultMode"] == 0o440
            assert f"create secret generic {secret['secretName']} " in PAGE
    (certificate,) = re.findall(r"sslrootcert=/run/holdfast/settings/([\w.]+)", PAGE)
    assert f"--from-file={certificate}" in PAGE


def test_selectors_and_ports_agree() -> None:
    services = {each["metadata"]["name"]: each for each in of_kind("Service")}
    for service in services.values():
        selector = {"matchLabels": service["spec"]["selector"]}
        ((_, _, container),) = (
            each for each in containers() if selects(selector, labels_of(each[0]))
        )
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    (monitor,) = of_kind("ServiceMonitor")
    assert selects(monitor["spec"]["selector"], services["holdfast"]["metadata"]["labels"])
    (rule,) = (each for ingress in of_kind("Ingress") for each in ingress["spec"]["rules"])
    backend = rule["http"]["paths"][0]["backend"]["service"]
    (port,) = services[backend["name"]]["spec"]["ports"]
    assert port["name"] == backend["port"]["name"]
    assert port["name"] == monitor["spec"]["endpoints"][0]["port"]
    (server,) = templates()["servers"]["spec"]["containers"]
    hosts = str(values_of(server)["HOLDFAST_ALLOWED_HOST"]).split(",")
    assert {f"https://{rule['host']}", f"http://{backend['name']}:{port['port']}"} <= set(hosts)


def test_each_group_of_workers_has_a_budget_of_its_replicas_less_one() -> None:
    budgets = {}
    for budget in (each["spec"] for each in of_kind("PodDisruptionBudget")):
        (group,) = (each for each in templates() if selects(budget["selector"], labels_of(each)))
        budgets[group] = budget["minAvailable"]
    replicas = {each["groupName"]: each["replicas"] for each in cluster()["workerGroupSpecs"]}
    assert budgets == {group: max(0, number - 1) for group, number in replicas.items()}


def test_pods_of_the_cluster_reach_each_other_but_not_the_api() -> None:
    (server,) = templates()["servers"]["spec"]["containers"]
    (http,) = (each["containerPort"] for each in server["ports"] if each["name"] == "http")
    for group in templates():
        for source in map(labels_of, templates()):
            reached: set[int] = set()
            for peer, ports in rules(labels_of(group), "Ingress"):
                if "podSelector" in peer and selects(peer["podSelector"], source):
                    reached |= ports
            assert reached == set(range(1, 65536)) - ({http} if group == "servers" else set())
    outer = [
        each for each in rules(labels_of("servers"), "Ingress") if "podSelector" not in each[0]
    ]
    assert [ports for _, ports in outer] == [{http}]


def test_only_the_head_reaches_redis_and_only_servers_the_database() -> None:
    redis = int(cluster()["gcsFaultToleranceOptions"]["redisAddress"].rpartition(":")[2])
    bucket, database = 443, 5432
    further = {"head": {redis}, "servers": {database}}
    cleanup = {**labels_of("head"), "ray.io/node-type": "redis-cleanup"}
    pods = [(group, labels_of(group)) for group in templates()]
    for group, labels in (*pods, ("head", cleanup)):
        found = set()
        for peer, ports in rules(labels, "Egress"):
            if "ipBlock" in peer:
                assert peer["ipBlock"]["except"] == ["169.254.0.0/16"], "the cloud's metadata"
                found |= ports
        assert found == {bucket} | further.get(group, set())
