"""`config` and `login`: which server is meant, who said so, and servers by name."""

from __future__ import annotations

import os
import sys
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.columns import Column
from holdfast.cli.common import OPTIONS, NotUnderstood, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.client import address, config
from holdfast.client.client import Client
from holdfast.client.config import Config, Context
from holdfast.errors import ServerError

NAMES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_TOKEN = "none"

Name = Annotated[str, Parameter(name="NAME", help="Of the context.")]

group = App(name="config")


def login(
    server: Annotated[str, Parameter(name="ADDRESS", help="URL of the server.")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="To call it by; default: its host.")] = None,
    token: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help="Sent with each request; - reads it from standard input.",
        ),
    ] = None,
    check: Annotated[bool, Parameter(negative="--no-check", help="Ask it first.")] = True,
) -> ExitCode:
    """Remember a server by a name, and mean it from now on."""
    where = address.normal(server)
    called = name or urlsplit(where).hostname or ""
    if not called or set(called) - set(NAMES):
        raise NotUnderstood(f"{called or server!r} is no name: use letters, digits, . _ -; --name")
    if token is not None and token.startswith("--"):
        raise NotUnderstood(f"--token is followed by {token}: say the token, or - to read it")
    secret = sys.stdin.readline().strip() if token == "-" else token
    if check:
        _ask(where, secret)
    if secret and where.startswith("http://") and urlsplit(where).hostname not in LOOPBACK:
        output.talk(Text.assemble(("warning", "yellow"), ": the token goes out unencrypted"))
    config.store(config.load().with_context(called, Context(address=where, token=secret or None)))
    output.talk(f"{called} is {where} and is meant from now on ({config.path()})")
    return ExitCode.OK


@group.default
def show(*, options: Options = OPTIONS) -> ExitCode:
    """Show what is set, and who said so."""
    found = address.find(options.address, context=options.context)
    stored = config.load()
    token = _hidden(found.token) if found.token else NO_TOKEN
    settings = [
        {"setting": "address", "value": found.address, "from": found.source},
        {"setting": "token", "value": token, "from": found.token_source},
        {"setting": "config file", "value": str(config.path()), "from": _who_names_the_file()},
        {"setting": "context", "value": stored.current or "", "from": "config file"},
    ]
    if output.results(options, settings):
        return ExitCode.OK
    columns = (Column("SETTING"), Column("VALUE", least=20), Column("FROM", least=10))
    rows = [
        [setting["setting"], setting["value"] or "-", setting["from"] or "-"]
        for setting in settings
    ]
    output.table(columns, rows, whole=options.wide)
    if config.readable_by_others():
        output.talk(f"{config.path()} can be read by others: chmod 600 {config.path()}")
    return ExitCode.OK


@group.command
def contexts(*, options: Options = OPTIONS) -> ExitCode:
    """List the servers that have a name."""
    stored = config.load()
    known = [
        {
            "name": name,
            "address": one.address,
            "token": _hidden(one.token) if one.token else NO_TOKEN,
            "current": name == stored.current,
        }
        for name, one in sorted(stored.contexts.items())
    ]
    if output.results(options, known):
        return ExitCode.OK
    if not known:
        output.talk("no server has a name yet: holdfast login ADDRESS")
        return ExitCode.OK
    columns = (Column(""), Column("NAME"), Column("ADDRESS", least=20), Column("TOKEN"))
    rows = [
        [
            "*" if item["current"] else "",
            str(item["name"]),
            str(item["address"]),
            str(item["token"]),
        ]
        for item in known
    ]
    output.table(columns, rows, whole=options.wide)
    return ExitCode.OK


@group.command
def use(name: Name, /) -> ExitCode:
    """Mean this server from now on."""
    return _stored(config.load().used(name), f"{name} is meant from now on")


@group.command
def rm(name: Name, /) -> ExitCode:
    """Forget a server, and the token for it."""
    return _stored(config.load().without(name), f"{name} is forgotten")


@group.command
def path() -> ExitCode:
    """Print where the configuration file is."""
    output.console().print(str(config.path()))
    return ExitCode.OK


def _stored(changed: Config, words: str) -> ExitCode:
    config.store(changed)
    output.talk(words)
    return ExitCode.OK


def _ask(where: str, token: str | None) -> None:
    """Raises ServerUnreachable, Unauthorized; one that is not quite ready is good enough."""
    with Client(where, token=token or "", retry_s=0.0, timeout_s=10.0) as client:
        try:
            client.ready()
        except ServerError as error:
            output.talk(f"it answers, but is not ready: {error}")


def _hidden(token: str) -> str:
    return f"…{token[-4:]}" if len(token) >= 16 else "set"


def _who_names_the_file() -> str:
    return config.CONFIG_VARIABLE if os.environ.get(config.CONFIG_VARIABLE) else "default"
