"""The fields of KubeRay's RayCluster (ray.io/v1, KubeRay 1.7), of the Prometheus operator's
ServiceMonitor and of kustomize that `deploy/kuberay` uses. Unknown fields are refused.

Templates of pods are left as they are: the schemas of Kubernetes describe them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Fields):
    name: Name
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    namespace: Name | None = None


class SecretKeyRef(Fields):
    name: Name
    key: str


class ValueFrom(Fields):
    secret_key_ref: SecretKeyRef


class RedisCredential(Fields):
    value_from: ValueFrom


class GcsFaultTolerance(Fields):
    redis_address: Annotated[str, Field(pattern=r"^rediss://[a-z0-9.-]+:\d+$")]
    redis_password: RedisCredential
    external_storage_namespace: str


class HeadGroup(Fields):
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Fields):
    group_name: Name
    replicas: Annotated[int, Field(ge=0)]
    min_replicas: Annotated[int, Field(ge=0)]
    max_replicas: Annotated[int, Field(ge=0)]
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class RayClusterSpec(Fields):
    ray_version: str
    enable_in_tree_autoscaling: bool
    gcs_fault_tolerance_options: GcsFaultTolerance
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(Fields):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class LabelSelector(Fields):
    match_labels: dict[str, str]


class ScrapedEndpoint(Fields):
    port: str
    path: Annotated[str, Field(pattern=r"^/")]
    interval: Annotated[str, Field(pattern=r"^\d+s$")]


class ServiceMonitorSpec(Fields):
    selector: LabelSelector
    endpoints: list[ScrapedEndpoint]


class ServiceMonitor(Fields):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


class ConfigMapFromFiles(Fields):
    name: Name
    envs: list[str]


class GeneratorOptions(Fields):
    disable_name_suffix_hash: bool


class ReplacedImage(Fields):
    name: str
    new_name: str
    new_tag: str


class Kustomization(Fields):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"]
    kind: Literal["Kustomization"]
    namespace: Name
    resources: list[str]
    config_map_generator: list[ConfigMapFromFiles]
    generator_options: GeneratorOptions
    images: list[ReplacedImage]


class KustomizeComponent(Fields):
    api_version: Literal["kustomize.config.k8s.io/v1alpha1"]
    kind: Literal["Component"]
    resources: list[str]
