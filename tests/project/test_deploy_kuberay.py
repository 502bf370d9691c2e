"""`deploy/kuberay` fits the schemas of Kubernetes, the used fields of KubeRay, and our commands."""

from __future__ import annotations

import json
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
from pydantic import BaseModel
from tests.support.base_installation import project
from tests.support.deploy.kuberay import (
    Kustomization,
    KustomizeComponent,
    RayCluster,
    ServiceMonitor,
)

from holdfast.cli.main import build
from holdfast_service.embedded_cluster.ray_settings import HEAD_MAY_BE_AWAY
from holdfast_service.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deploy/kuberay"
PAGE = ROOT / "docs/deploy/kubernetes.md"
KUBERNETES = ("1.33", "1.37")
CUSTOM: dict[str, type[BaseModel]] = {"RayCluster": RayCluster, "ServiceMonitor": ServiceMonitor}
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
IMAGE_USER = 10001


def kustomization() -> Kustomization:
    text = (KUBERAY / "kustomization.yaml").read_text()
    return Kustomization.model_validate(yaml.safe_load(text))


@cache
def documents() -> tuple[dict[str, Any], ...]:
    """All objects, those of the components included."""
    files = [KUBERAY / name for name in kustomization().resources]
    for folder in ("monitoring", "ingress"):
        text = (KUBERAY / folder / "kustomization.yaml").read_text()
        component = KustomizeComponent.model_validate(yaml.safe_load(text))
        files += [KUBERAY / folder / name for name in component.resources]
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    assert {file.resolve() for file in files} == {
        file for file in KUBERAY.rglob("*.yaml") if file.name != "kustomization.yaml"
    }
    return tuple(found)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in documents() if each["kind"] == kind]


@cache
def cluster() -> RayCluster:
    (found,) = of_kind("RayCluster")
    return RayCluster.model_validate(found)


def templates() -> dict[str, dict[str, Any]]:
    """The templates of pods, by group."""
    spec = cluster().spec
    groups = {group.group_name: group.template for group in spec.worker_group_specs}
    return {"head": spec.head_group_spec.template, **groups}


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Group, pod and container of each group's only container."""
    for group, template in templates().items():
        (container,) = template["spec"]["containers"]
        yield group, template["spec"], container


def label_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def labels_of(group: str) -> dict[str, str]:
    """The labels of a group's pods: of the template, and what KubeRay adds."""
    return {
        "ray.io/cluster": cluster().metadata.name,
        "ray.io/node-type": "head" if group == "head" else "worker",
        "ray.io/group": "headgroup" if group == "head" else group,
        **templates()[group]["metadata"]["labels"],
    }


def selected(labels: dict[str, str]) -> list[str]:
    """The groups whose pods have the labels."""
    return [group for group in templates() if labels.items() <= labels_of(group).items()]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector of a policy selects a pod with these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        among = labels.get(expression["key"]) in expression["values"]
        if among is not {"In": True, "NotIn": False}[expression["operator"]]:
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def rules(labels: dict[str, str], direction: str) -> Iterator[tuple[dict[str, Any], range]]:
    """What pods with these labels may reach (Egress), or be reached by (Ingress): each peer, with
    a range of TCP ports."""
    policies = [each["spec"] for each in of_kind("NetworkPolicy")]
    own = [each for each in policies if selects(each["podSelector"], labels)]
    assert any(direction in each["policyTypes"] for each in own), "everything would be allowed"
    for policy in own:
        assert {each for each in ("Ingress", "Egress") if each.lower() in policy} == set(
            policy["policyTypes"]
        )
        for rule in policy.get(direction.lower(), []):
            peers = rule["from" if direction == "Ingress" else "to"]
            for port in rule.get("ports", [{"protocol": "TCP", "port": 1, "endPort": 65535}]):
                if port["protocol"] == "TCP":
                    ports = range(port["port"], port.get("endPort", port["port"]) + 1)
                    yield from ((peer, ports) for peer in peers)


def outside(labels: dict[str, str]) -> set[int]:
    """The ports that pods with these labels reach at any address, but those of the cloud itself."""
    found = set()
    for peer, ports in rules(labels, "Egress"):
        if "ipBlock" in peer:
            assert peer["ipBlock"]["except"] == ["169.254.0.0/16"]
            found |= set(ports)
    return found


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("document", documents(), ids=label_of)
def test_an_object_fits_its_schema(document: dict[str, Any], version: str) -> None:
    model = CUSTOM.get(document["kind"])
    if model is None:
        kubernetes_validate.validate(document, version, strict=True)
    else:
        model.model_validate(document)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("group", templates())
def test_a_template_of_pods_fits_its_schema(group: str, version: str) -> None:
    document = {"apiVersion": "v1", "kind": "PodTemplate", "template": templates()[group]}
    kubernetes_validate.validate(document, version, strict=True)
    broken = json.loads(json.dumps(document))
    broken["template"]["spec"]["containers"][0]["arg"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
def test_kustomize_builds_all_of_it(tmp_path: Path) -> None:
    copy = shutil.copytree(KUBERAY, tmp_path / "kuberay")
    file = copy / "kustomization.yaml"
    file.write_text(file.read_text().replace("# components:", "components:"))
    command = ["kubectl", "kustomize", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert sorted(map(label_of, made)) == sorted(
        [*map(label_of, documents()), "ConfigMap/holdfast-settings"]
    )
    (image,) = kustomization().images
    assert set(re.findall(r"image: (\S+)", done.stdout)) == {f"{image.new_name}:{image.new_tag}"}
    assert {each["metadata"]["namespace"] for each in made if each["kind"] != "Namespace"} == {
        kustomization().namespace
    }


def test_ray_is_that_of_the_lock() -> None:
    assert f"ray=={cluster().spec.ray_version}\n" in (ROOT / "requirements.lock").read_text()


def test_each_pod_runs_a_command_that_exists() -> None:
    assert cluster().metadata.annotations["ray.io/overwrite-container-cmd"] == "true"
    for group, _, container in containers():
        values = {"$(CPUS)": "8", "$(GPUS)": "8", "$(MACHINE)": "machine"}
        words = container["args"]
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        names = {each["name"] for each in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= names
        program, *rest = words
        assert program == ("holdfast-server" if group == "servers" else "holdfast")
        if group == "servers":
            rest = ["serve", *rest]
        build().parse_args(rest, exit_on_error=False, print_error=False)


def test_settings_of_servers_exist() -> None:
    (container,) = (each for group, _, each in containers() if group == "servers")
    lines = (KUBERAY / "settings.env").read_text().splitlines()
    names = {each["name"] for each in container["env"]} | {line.partition("=")[0] for line in lines}
    settings = {f"HOLDFAST_{name.upper()}" for name in Settings.model_fields}
    others = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "POD_IP", "HOLDFAST_SETTINGS_DIR"}
    assert names <= settings | others | set(HEAD_MAY_BE_AWAY)


def test_servers_outlive_an_absence_of_the_head() -> None:
    (container,) = (each for group, _, each in containers() if group == "servers")
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert HEAD_MAY_BE_AWAY.items() <= values.items()
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz", "/readyz asks Ray's head"


def test_the_control_plane_runs_no_ranks() -> None:
    spec = cluster().spec
    groups = {group.group_name: group.ray_start_params for group in spec.worker_group_specs}
    none = {"num-cpus": "0", "num-gpus": "0"}
    assert spec.head_group_spec.ray_start_params == groups["servers"] == none
    assert "--no-training" in templates()["head"]["spec"]["containers"][0]["args"]
    assert "--no-training" in (ROOT / "deploy/image/holdfast-server").read_text()


def test_the_head_and_kuberay_use_the_same_redis() -> None:
    options = cluster().spec.gcs_fault_tolerance_options
    words = templates()["head"]["spec"]["containers"][0]["args"]
    assert f"--redis-address={options.redis_address}" in words
    assert "--redis-password-file=/run/holdfast/redis/password" in words
    assert options.external_storage_namespace == "holdfast"
    assert options.redis_password.value_from.secret_key_ref.key == "password"


def test_every_container_is_confined_probed_and_bounded() -> None:
    for group, pod, container in containers():
        assert pod["securityContext"]["runAsNonRoot"], group
        assert pod["securityContext"]["runAsUser"] == IMAGE_USER
        assert f"USER {IMAGE_USER}:{IMAGE_USER}\n" in (ROOT / "deploy/Dockerfile").read_text()
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert {"periodSeconds", "timeoutSeconds", "failureThreshold"} <= set(container[probe])
        limits = container["resources"]["limits"]
        (shm,) = (each for each in pod["volumes"] if each["name"] == "shm")
        assert shm["emptyDir"]["medium"] == "Memory"
        assert in_bytes(shm["emptyDir"]["sizeLimit"]) <= in_bytes(limits["memory"]) / 2


def in_bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(Mi|Gi|Ti)", quantity)
    assert found, quantity
    return int(found[1]) * UNITS[found[2]]


def test_secrets_are_mounted_read_only_and_the_page_makes_them() -> None:
    page = PAGE.read_text()
    kept = {"holdfast-ray", "holdfast-redis", "holdfast-keys", "holdfast-settings"}
    seen = set()
    for group, pod, container in containers():
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounts = {each["name"]: each for each in container["volumeMounts"]}
        assert set(volumes) == set(mounts), group
        for name, volume in volumes.items():
            if secret := volume.get("secret"):
                seen.add(secret["secretName"])
                assert secret["defaultMode"] == 0o440
                assert mounts[name]["readOnly"] is True
        assert "secretKeyRef" not in json.dumps(container)
    assert seen == kept
    for name in kept:
        assert f"create secret generic {name} " in page
    allowed = {"head": {"ray", "redis"}, "servers": {"ray", "keys", "settings"}}
    for group, pod, _ in containers():
        held = {each["name"] for each in pod["volumes"] if "secret" in each}
        assert held == allowed.get(group, {"ray"}), "nodes run users' code"


def test_services_select_their_pods() -> None:
    ports = {
        group: {each["name"]: each["containerPort"] for each in container["ports"]}
        for group, _, container in containers()
    }
    for service in of_kind("Service"):
        (group,) = selected(service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert ports[group][port["targetPort"]] == port["port"]


def test_each_group_has_a_budget_and_its_pods_are_spread() -> None:
    groups = {each.group_name: each for each in cluster().spec.worker_group_specs}
    budgets = {}
    for budget in of_kind("PodDisruptionBudget"):
        (group,) = selected(budget["spec"]["selector"]["matchLabels"])
        budgets[group] = budget["spec"]["minAvailable"]
        assert set(budget["spec"]) == {"minAvailable", "selector"}
    assert budgets == {name: max(0, each.replicas - 1) for name, each in groups.items()}
    for name, each in groups.items():
        (spread,) = each.template["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        keys = spread["matchLabelKeys"]
        same = {**spread["labelSelector"]["matchLabels"], **{k: labels_of(name)[k] for k in keys}}
        assert selected(same) == [name]


def test_pods_of_the_cluster_reach_each_other_but_not_the_api() -> None:
    (http,) = (
        port["containerPort"]
        for group, _, each in containers()
        for port in each["ports"]
        if group == "servers" and port["name"] == "http"
    )
    for group in templates():
        for source in templates():
            reached: set[int] = set()
            for peer, ports in rules(labels_of(group), "Ingress"):
                if "podSelector" in peer and selects(peer["podSelector"], labels_of(source)):
                    reached |= set(ports)
            assert reached == set(range(1, 65536)) - ({http} if group == "servers" else set())
            assert any(
                "podSelector" in peer and selects(peer["podSelector"], labels_of(group))
                for peer, _ in rules(labels_of(source), "Egress")
            )
    further = [
        each for each in rules(labels_of("servers"), "Ingress") if "podSelector" not in each[0]
    ]
    assert [list(ports) for _, ports in further] == [[http]]


def test_only_the_head_reaches_redis_and_only_servers_the_database() -> None:
    redis = int(cluster().spec.gcs_fault_tolerance_options.redis_address.rpartition(":")[2])
    bucket, database = 443, 5432
    cleanup = {**labels_of("head"), "ray.io/node-type": "redis-cleanup"}
    assert outside(labels_of("head")) == outside(cleanup) == {bucket, redis}
    assert outside(labels_of("servers")) == {bucket, database}
    assert outside(labels_of("cpu")) == outside(labels_of("gpu")) == {bucket}


def test_the_page_makes_the_image_and_the_files_that_are_used() -> None:
    page = PAGE.read_text()
    (image,) = kustomization().images
    for command in ("docker build -f deploy/Dockerfile -t", "docker push"):
        assert f"{command} {image.new_name}:{image.new_tag}" in page
    assert image.new_tag == f"{project()['version']}-cuda"
    (certificate,) = re.findall(r"sslrootcert=/run/holdfast/settings/([\w.]+)", page)
    assert f"--from-file={certificate}" in page


def test_the_monitor_finds_the_service_of_the_servers() -> None:
    (monitor,) = of_kind("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    (service,) = (
        each
        for each in of_kind("Service")
        if wanted.items() <= each["metadata"].get("labels", {}).items()
    )
    (port,) = service["spec"]["ports"]
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [port["name"]]
    (ingress,) = of_kind("Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {
        "name": service["metadata"]["name"],
        "port": {"name": port["name"]},
    }
    server = next(each for group, _, each in containers() if group == "servers")
    (names,) = (each["value"] for each in server["env"] if each["name"] == "HOLDFAST_ALLOWED_HOST")
    assert f"https://{rule['host']}" in names.split(",")
    assert f"http://{service['metadata']['name']}:{port['port']}" in names.split(",")
