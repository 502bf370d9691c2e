"""The user's configuration file: servers by name (contexts), and the current context.

It may contain tokens: it is written whole or not at all, and only its owner can read it (0600).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import InvalidConfig
from holdfast_workers.private_files import write_private

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
OTHERS_MASK = 0o077


class ServerContext(BaseModel):
    """A server that the user has stored under a name."""

    model_config = ConfigDict(frozen=True)

    address: str
    token: str | None = Field(default=None, description="sent as a bearer token; null: none")
    uid: int | None = Field(
        default=None,
        description="user whose process must listen, if the server is on this machine; null: any",
    )


class Config(BaseModel):
    """The content of the configuration file."""

    model_config = ConfigDict(frozen=True)

    current: str | None = Field(default=None, description="the context that is used by default")
    contexts: dict[str, ServerContext] = Field(default_factory=dict)

    def context(self, name: str) -> ServerContext:
        """Raises InvalidConfig if there is no such context."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none yet; create one with `holdfast login`"
            raise InvalidConfig(f"there is no context {name!r}: {known}")
        return self.contexts[name]

    def with_context(self, name: str, context: ServerContext) -> Config:
        """A copy with the context added or changed, which becomes the current one."""
        return Config(current=name, contexts={**self.contexts, name: context})

    def without(self, name: str) -> Config:
        """Raises InvalidConfig if there is no such context."""
        self.context(name)
        rest = {known: context for known, context in self.contexts.items() if known != name}
        return Config(current=None if self.current == name else self.current, contexts=rest)

    def used(self, name: str) -> Config:
        """A copy with another current context. Raises InvalidConfig."""
        self.context(name)
        return Config(current=name, contexts=self.contexts)


def path() -> Path:
    """The path of the file, which may not exist."""
    if given := os.environ.get(CONFIG_VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(home) if home else Path.home() / ".config"
    return folder / "holdfast" / "config.json"


def load() -> Config:
    """The content of the file; empty if there is none. Raises InvalidConfig."""
    try:
        return Config.model_validate_json(path().read_bytes())
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise InvalidConfig(f"{path()}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidConfig(
            f"{path()}: {where}: {first['msg']}; correct it, or remove it and log in again"
        ) from error


def store(config: Config) -> None:
    """Write the file. Raises InvalidConfig if it cannot be written."""
    target = path()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(target, json.dumps(config.model_dump(exclude_none=True), indent=2) + "\n")
    except OSError as error:
        raise InvalidConfig(f"{target}: {error.strerror}") from error


def readable_by_others() -> bool:
    """Whether users other than the owner can read the file."""
    try:
        return bool(path().stat().st_mode & OTHERS_MASK)
    except OSError:
        return False
