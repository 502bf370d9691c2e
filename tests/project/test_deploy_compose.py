"""`deploy/compose.yaml` fits Compose's schema, starts our commands, and holds no secret."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from holdfast.cli.hosting.server import settings_of
from holdfast.cli.main import build
from holdfast_service.host_cluster.token_file import read_token
from holdfast_service.remote_tier.location import read_secret
from holdfast_service.settings import FOLDER_VARIABLE, Settings
from holdfast_service.store.installation import KEY_BYTES, load_or_create_key

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLE = re.compile(r"\$\$|\$\{(\w+):-([^}]*)\}")
MAKES_SECRETS = "secrets"
SECRET_FOLDER = "/run/holdfast"


@cache
def compose() -> dict[str, Any]:
    """The file with the defaults of its variables, and without its extensions."""
    text = (DEPLOY / "compose.yaml").read_text()
    plain = VARIABLE.sub(lambda found: "$" if found[0] == "$$" else found[2], text)
    document = yaml.safe_load(plain)
    return {key: value for key, value in document.items() if not key.startswith("x-")}


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def words(service: dict[str, Any]) -> str:
    named = ("command", "entrypoint", "environment", "healthcheck")
    return yaml.safe_dump([service.get(name) for name in named], width=10_000)


def test_the_file_is_understood_by_the_specification() -> None:
    PyCompose.from_yaml(yaml.safe_dump(compose())).validate()


def test_our_commands_and_settings_exist() -> None:
    settings = {f"HOLDFAST_{field.upper()}" for field in Settings.model_fields}
    for service in services().values():
        program, *rest = service.get("command", ["other"])
        if program in ("holdfast", "holdfast-server"):
            rest = ["serve", *rest] if program == "holdfast-server" else rest
            build().parse_args(rest, exit_on_error=False, print_error=False)
        ours = {key for key in service.get("environment", {}) if key.startswith("HOLDFAST_")}
        assert ours <= settings | {FOLDER_VARIABLE}


def test_what_is_mounted_exists_and_each_secret_only_where_it_is_read() -> None:
    for name, service in services().items():
        mounts = [text.split(":") for text in service.get("volumes", [])]
        for source, _, *mode in mounts:
            of_ours = source.startswith(".")
            assert (DEPLOY / source).is_file() if of_ours else source in compose()["volumes"]
            if of_ours or (source.startswith("secret-") and name != MAKES_SECRETS):
                assert mode == ["ro"], f"{name}: {source}"
        held = [place for source, place, *_ in mounts if source.startswith("secret-")]
        for path in re.findall(rf"{SECRET_FOLDER}/[\w./-]+", words(service)):
            assert path.startswith(tuple(f"{place}/" for place in held)), f"{name}: {path}"
        if name.startswith("worker"):
            assert held == [f"{SECRET_FOLDER}/ray"], "it runs users' code"


def test_only_this_machine_reaches_the_published_ports() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_proxy_and_prometheus_know_both_servers() -> None:
    servers = {"api-1:8642", "api-2:8642"}
    (upstreams,) = re.findall(r"reverse_proxy (.*) \{", (DEPLOY / "compose/Caddyfile").read_text())
    assert set(upstreams.split()) == servers
    asked = re.findall(r"health_uri (.*)", (DEPLOY / "compose/Caddyfile").read_text())
    assert asked == ["/healthz"], "/readyz asks Ray's head, without which servers answer too"
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yaml").read_text())
    ((static,),) = (job["static_configs"] for job in scraped["scrape_configs"])
    assert set(static["targets"]) == servers
    allowed = services()["api-1"]["environment"]["HOLDFAST_ALLOWED_HOST"]
    assert set(allowed.split(",")) == {f"http://{each}" for each in servers}
    places = {text.split(":")[1] for text in services()["prometheus"]["volumes"]}
    assert set(scraped["rule_files"]) <= places


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to other users")
def test_secrets_are_made_once_each_for_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for _ in range(2):
        script = [sys.executable, str(DEPLOY / "compose/make_secrets.py"), str(tmp_path)]
        subprocess.run(script, check=True, timeout=60)
        found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        made.append(found)
    assert made[0] == made[1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made[0]} == {0o400}
    owners = {str(path.relative_to(tmp_path)): path.stat().st_uid for path in made[0]}
    assert owners.pop("grafana/password") == 472
    assert set(owners.values()) == {10001}
    named = {f"{SECRET_FOLDER}/{path.relative_to(tmp_path)}" for path in made[0]}
    for service in services().values():
        paths = re.findall(rf"{SECRET_FOLDER}/[\w./-]*[\w-]", words(service))
        assert all(any(file.startswith(path) for file in named) for path in paths)
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    assert len(read_token(tmp_path / "ray/token")) == 40
    assert len(load_or_create_key(tmp_path / "servers/keys/job-secrets.key")) == KEY_BYTES
    secret = read_secret(tmp_path / "servers/keys/secrets", "bucket")
    environment = services()["api-1"]["environment"]
    assert secret.endpoint == environment["HOLDFAST_STORE_ENDPOINT"]
    assert environment["HOLDFAST_STORE_URI"].startswith(f"s3://{secret.bucket}/")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "servers/settings"))
    monkeypatch.delenv("HOLDFAST_DATABASE_URL", raising=False)
    password = (tmp_path / "database/password").read_text()
    assert settings_of().database_url == f"postgresql://holdfast:{password}@database/holdfast"
