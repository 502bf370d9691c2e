"""`config` and `login`: show the settings and their origin, and store servers by name."""

from __future__ import annotations

import os
import sys
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.common import OPTIONS, NotUnderstood, Options
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.printing import output
from holdfast.cli.printing.columns import Column
from holdfast.client import address, config, credentials
from holdfast.client.config import Config, ServerContext
from holdfast.client.synchronous.jobs import Client
from holdfast.errors import ForeignServer, ServerError

NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_TOKEN = "none"

Name = Annotated[str, Parameter(name="NAME", help="Name of the context.")]

group = App(name="config")


def login(
    server: Annotated[str, Parameter(name="ADDRESS", help="URL of the server.")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="Name of the context; default: the host.")] = None,
    token: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help="-: read the token to send with each request, from standard input.",
        ),
    ] = None,
    check: Annotated[
        bool, Parameter(negative="--no-check", help="Check that the server answers.")
    ] = True,
) -> ExitCode:
    """Store a server under a name, and make it the current one."""
    url = address.normal(server)
    context = name or urlsplit(url).hostname or ""
    if not context or set(context) - set(NAME_CHARACTERS):
        raise NotUnderstood(
            f"{context or server!r} is not a valid name: use letters, digits, . _ - with --name"
        )
    if token not in (None, "-"):
        raise NotUnderstood(
            "--token is followed by -, and the token is read from standard input: each user of the "
            "machine sees the arguments of a command"
        )
    secret = sys.stdin.readline().strip() if token else None
    users = credentials.users_at(url) if secret else frozenset()
    if len(users) > 1:
        raise ForeignServer(f"several users listen at {url}: no token is sent. Use another port")
    if check:
        _check_server(url, secret)
    if secret and url.startswith("http://") and urlsplit(url).hostname not in LOOPBACK:
        output.progress(Text.assemble(("warning", "yellow"), ": the token is sent unencrypted"))
    stored = ServerContext(address=url, token=secret or None, uid=next(iter(users), None))
    config.store(config.load().with_context(context, stored))
    output.progress(f"{context} is {url}, and is now the current context ({config.path()})")
    return ExitCode.OK


@group.default
def show(*, options: Options = OPTIONS) -> ExitCode:
    """Show the settings and their origin."""
    found = address.find(options.address, context=options.context)
    stored = config.load()
    credential = found.find_credential()
    token = _hidden(credential.token) if credential else NO_TOKEN
    settings = [
        {"setting": "address", "value": found.address, "from": found.source},
        {"setting": "token", "value": token, "from": credential.source if credential else ""},
        {"setting": "config file", "value": str(config.path()), "from": _config_file_source()},
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
        output.progress(f"{config.path()} is readable by others: chmod 600 {config.path()}")
    return ExitCode.OK


@group.command
def contexts(*, options: Options = OPTIONS) -> ExitCode:
    """List the stored servers."""
    stored = config.load()
    known = [
        {
            "name": name,
            "address": context.address,
            "token": _hidden(context.token) if context.token else NO_TOKEN,
            "current": name == stored.current,
        }
        for name, context in sorted(stored.contexts.items())
    ]
    if output.results(options, known):
        return ExitCode.OK
    if not known:
        output.progress("no server is stored yet: holdfast login ADDRESS")
        return ExitCode.OK
    columns = (Column(""), Column("NAME"), Column("ADDRESS", least=20), Column("TOKEN"))
    rows = [
        [
            "*" if context["current"] else "",
            str(context["name"]),
            str(context["address"]),
            str(context["token"]),
        ]
        for context in known
    ]
    output.table(columns, rows, whole=options.wide)
    return ExitCode.OK


@group.command
def use(name: Name, /) -> ExitCode:
    """Make this server the current one."""
    return _store(config.load().used(name), f"{name} is now the current context")


@group.command
def rm(name: Name, /) -> ExitCode:
    """Remove a stored server and its token."""
    return _store(config.load().without(name), f"{name} is removed")


@group.command
def path() -> ExitCode:
    """Print the path of the configuration file."""
    output.console().print(str(config.path()))
    return ExitCode.OK


def _store(changed: Config, message: str) -> ExitCode:
    config.store(changed)
    output.progress(message)
    return ExitCode.OK


def _check_server(url: str, token: str | None) -> None:
    """Raises ServerUnreachable, Unauthorized. A server that is not ready yet only gets a note."""
    with Client(url, token=token or "", retry_s=0.0, timeout_s=10.0) as client:
        try:
            client.ready()
            client.version()  # needs the token
        except ServerError as error:
            output.progress(f"the server answers, but is not ready: {error}")


def _hidden(token: str) -> str:
    return f"…{token[-4:]}" if len(token) >= 16 else "set"


def _config_file_source() -> str:
    return config.CONFIG_VARIABLE if os.environ.get(config.CONFIG_VARIABLE) else "default"
