"""The user's configuration file: servers by name (contexts), and which of them is meant.

It may hold tokens: it is written for its owner alone (0600), whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import InvalidConfig

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
OTHERS = 0o077


class Context(BaseModel):
    """A server that the user has a name for."""

    model_config = ConfigDict(frozen=True)

    address: str
    token: str | None = Field(default=None, description="sent as a bearer token; null: none")


class Config(BaseModel):
    model_config = ConfigDict(frozen=True)

    current: str | None = Field(default=None, description="the context that is meant unless told")
    contexts: dict[str, Context] = Field(default_factory=dict)

    def context(self, name: str) -> Context:
        """Raises InvalidConfig for one that there is not."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none yet; make one by `holdfast login`"
            raise InvalidConfig(f"there is no context {name!r}: {known}")
        return self.contexts[name]

    def with_context(self, name: str, context: Context) -> Config:
        """The same with a server more, or changed; it is the current one then."""
        return Config(current=name, contexts={**self.contexts, name: context})

    def without(self, name: str) -> Config:
        """Raises InvalidConfig for one that there is not."""
        self.context(name)
        rest = {known: one for known, one in self.contexts.items() if known != name}
        return Config(current=None if self.current == name else self.current, contexts=rest)

    def used(self, name: str) -> Config:
        """The same with another current context. Raises InvalidConfig."""
        self.context(name)
        return Config(current=name, contexts=self.contexts)


def path() -> Path:
    """Where the file is, or would be."""
    if given := os.environ.get(CONFIG_VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(home) if home else Path.home() / ".config"
    return folder / "holdfast" / "config.json"


def load() -> Config:
    """The file's content; empty where there is none. Raises InvalidConfig."""
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
            f"{path()}: {where}: {first['msg']}; mend it, or remove it and log in again"
        ) from error


def store(config: Config) -> None:
    """Raises InvalidConfig if it cannot be written."""
    target = path()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # 0600
        partial = Path(name)
        try:
            with os.fdopen(number, "w") as file:
                file.write(json.dumps(config.model_dump(exclude_none=True), indent=2) + "\n")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidConfig(f"{target}: {error.strerror}") from error


def readable_by_others() -> bool:
    """The file is there and not its owner's alone."""
    try:
        return bool(path().stat().st_mode & OTHERS)
    except OSError:
        return False
