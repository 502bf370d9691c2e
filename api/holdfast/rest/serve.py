"""The process of the control plane: starts store, cluster, reconciler and HTTP server in order.

A SIGKILL of the server interrupts no training: the embedded cluster runs in other processes, and
the next server adopts it. SIGTERM or SIGINT ends everything within the deadline of the settings,
the embedded cluster included unless another server uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn

from holdfast.rest import embedded
from holdfast.rest.app import create_app
from holdfast.rest.connections import server_config
from holdfast.rest.local_access import LocalAccess
from holdfast.rest.monitoring import tracing
from holdfast.rest.origins import Origin, proxy_origin
from holdfast.rest.services import Probe, Services, services_over
from holdfast.schemas import SERVER_FILE, ServerFile
from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.embedded_cluster import local_cluster, process_priority
from holdfast_service.embedded_cluster.owner_pipe import NotAPipe, OwnerPipe
from holdfast_service.embedded_cluster.ray_settings import HEAD_MAY_BE_AWAY, token_variables
from holdfast_service.host_cluster.errors import HostClusterError
from holdfast_service.host_cluster.token_file import read_token
from holdfast_service.job_model.supervisor_protocol import Cluster, ClusterUnavailable
from holdfast_service.reconcile.reconciler import Reconciler
from holdfast_service.reconcile.webhook_sender import WebhookSender
from holdfast_service.remote_tier import server_store
from holdfast_service.services.overview import Overview
from holdfast_service.settings import Settings
from holdfast_service.store import installation
from holdfast_service.store.engine import Store, UnsupportedDatabase, database_url
from holdfast_service.store.migrate import UnknownSchema
from holdfast_workers.private_files import (
    PrivateFileRefused,
    create_private,
    read_private,
    write_private,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from holdfast_service.cluster.ray_cluster import RayCluster

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_TOKEN = re.compile(r"[\w.~+/=-]{32,}", re.ASCII)
_RAY_MODULE = "holdfast_service.cluster.ray_cluster"
"""Loads Ray."""

Connect = Callable[[Callable[[], str]], "RayCluster"]
"""Connects to the Ray cluster at the address that its argument finds, and again whenever that
connection is lost. Raises ClusterUnavailable."""

OnReady = Callable[[ServerFile, str | None], None]
"""Called with the server's file, and with a code that opens the dashboard if it needs one."""

_log = structlog.get_logger()


class ServeError(Exception):
    """The server could not start or had to end; the message has the reason and a remedy."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: this module handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def trusted_addresses(
    settings: Settings, exposed: bool
) -> tuple[frozenset[str] | None, frozenset[Origin]]:
    """The host names that requests may use (None: any), and the origins of pages that may send
    them, beside the server's own. Raises ServeError."""
    proxies = set()
    for text in settings.allowed_host:
        origin = proxy_origin(text)
        if origin is None:
            raise ServeError(
                f"--allowed-host {text!r} is not an address: write the proxy's HOST or HOST:PORT "
                "if browsers reach it by https, or else http://HOST:PORT, with an IPv6 address "
                "in brackets"
            )
        proxies.add(origin)
    if exposed and not proxies:
        return None, frozenset()
    own = LOOPBACK_NAMES if exposed else LOOPBACK_NAMES | {settings.host}
    return own | {host for _, host, _ in proxies}, frozenset(proxies)


async def serve(settings: Settings, *, exposed: bool = False, on_ready: OnReady) -> None:
    """Serve until SIGTERM or SIGINT. Raises ServeError.

    There is no authentication for several users yet: a host that is not loopback is refused unless
    `exposed`.
    """
    if not is_loopback(settings.host) and not exposed:
        raise ServeError(
            f"{settings.host} can be reached from other machines, and a server has one user: "
            "use 127.0.0.1, or --expose-without-authentication if the network is yours alone"
        )
    if exposed and settings.auth == "local":
        raise ServeError(
            "--auth local contradicts --expose-without-authentication: leave one of them out"
        )
    trusted_addresses(settings, exposed)
    _refuse_wrong_certificate(settings)
    if settings.send_own_code and settings.ray_address is None:
        raise ServeError(
            "--send-own-code is for the nodes of a cluster: give its --ray-address too"
        )
    if settings.autoscale and settings.ray_address is None:
        raise ServeError(
            "--autoscale is for a cluster with an autoscaler: give its --ray-address too"
        )
    try:
        database_url(settings.resolved_database_url())
    except UnsupportedDatabase as error:  # fail before a folder is made
        raise ServeError(str(error)) from error
    stopping = asyncio.Event()
    _install_signal_handlers(stopping)
    _end_with_owner(settings, stopping)
    _refuse_wrong_store(settings)
    with bound(settings) as listener:
        _make_private(settings.data_dir)
        try:
            # The store first: an unusable database is refused before a cluster is started.
            async with _store(settings) as store:
                broken = _Broken(stopping)
                connect = await _connection(settings, store, broken)
                await _test_store(settings)
                async with _cluster(settings, connect, stopping, broken) as cluster:
                    _install_signal_handlers(stopping)  # Ray has replaced the handlers
                    await _run(settings, store, cluster, listener, stopping, exposed, on_ready)
                    broken.check()
        except _StoppedEarly:
            return


def _end_with_owner(settings: Settings, stopping: asyncio.Event) -> None:
    """Stop when the process that holds the other end of stdin has ended. Raises ServeError."""
    if not settings.end_with_stdin:
        return
    loop = asyncio.get_running_loop()
    try:
        pipe = OwnerPipe()
    except NotAPipe as error:
        raise ServeError("--end-with-stdin needs a pipe as stdin") from error

    def look() -> None:
        if pipe.owner_has_ended():
            loop.remove_reader(pipe)
            stopping.set()

    loop.add_reader(pipe, look)


def _refuse_wrong_certificate(settings: Settings) -> None:
    """Raises ServeError."""
    certificate, key = settings.https_cert_file, settings.https_key_file
    if certificate is None and key is None:
        return
    names = "HOLDFAST_HTTPS_CERT_FILE and HOLDFAST_HTTPS_KEY_FILE"
    if certificate is None or key is None:
        raise ServeError(f"https needs {names}: set both, or none for http")
    try:
        # With a password, an encrypted key is an error instead of a question on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        read_private(key)
    except PrivateFileRefused as error:
        raise ServeError(f"HOLDFAST_HTTPS_KEY_FILE: {error}") from error
    except OSError as error:
        raise ServeError(
            f"cannot serve https with {certificate} and {key} ({error}): {names} must be a "
            "certificate and its own key, not encrypted, in PEM, readable by this user"
        ) from error


def _refuse_wrong_store(settings: Settings) -> None:
    """Raises ServeError."""
    try:
        server_store.refuse_wrong_settings(settings)
    except server_store.StoreUnusable as error:
        raise ServeError(str(error)) from error


async def _test_store(settings: Settings) -> None:
    """Raises ServeError."""
    try:
        await server_store.refuse_unusable(settings, DaemonThreads(1, "store-probe"))
    except server_store.StoreUnusable as error:
        raise ServeError(str(error)) from error


class _StoppedEarly(Exception):
    """A stop was requested before the start was complete."""


class _Broken:
    """Ends the server, from any thread, because its Ray client cannot be used any more."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), stopping
        self.why = ""

    def end(self, why: str) -> None:
        self.why = why
        self._loop.call_soon_threadsafe(self._stopping.set)

    def check(self) -> None:
        """Raises ServeError if it was called."""
        if self.why:
            raise ServeError(
                f"the connection to Ray is lost: {self.why}; the jobs train on. Start the server "
                "again (a service manager does it), when Ray's head and this host's raylet answer"
            )


@contextlib.asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator[Store]:
    try:
        store = await Store.open(settings)
    except (UnknownSchema, UnsupportedDatabase) as error:
        raise ServeError(str(error)) from error
    try:
        yield store
    finally:
        await store.close()


async def _connection(settings: Settings, store: Store, broken: _Broken) -> Connect:
    """How this installation connects to a Ray cluster. Raises ServeError."""
    path = settings.job_key_file
    try:
        key = await asyncio.to_thread(installation.load_or_create_key, path)
        async with store.write() as session:
            await installation.check_key(session, key, path)
    except installation.WrongKey as error:
        raise ServeError(str(error)) from error

    def connect(find_address: Callable[[], str]) -> RayCluster:
        # Late: Ray reads its settings from the environment on import.
        from holdfast_service.cluster.ray_cluster import RayCluster
        from holdfast_service.cluster.runtime_env import OwnCode
        from holdfast_service.cluster.sent_code import own_code

        return RayCluster.connect(
            find_address,
            store.installation,
            key,
            settings.secrets_dir,
            broken.end,
            lambda address: settings.ray_address is None and _has_ended(settings, address),
            can_grow=settings.autoscale,
            code=OwnCode(own_code() if settings.send_own_code else None),
        )

    return connect


async def _run(
    settings: Settings,
    store: Store,
    cluster: Cluster,
    listener: socket.socket,
    stopping: asyncio.Event,
    exposed: bool,
    on_ready: OnReady,
) -> None:
    sender = tracing.provider()
    if sender is not None:
        store.on_incident_closed = tracing.incident_tracer(sender)
    reconciler = Reconciler(store, cluster, settings)
    names, origins = trusted_addresses(settings, exposed)
    token = None if exposed or settings.auth == "none" else server_token(settings.token_file)
    access = None if token is None else LocalAccess(token)
    services = replace(
        services_over(store, cluster, settings, reconciler.wake, reconciler.wake_for_nodes),
        probes=_probes(store, cluster, reconciler, settings),
        access=access,
        stopping=stopping,
        allowed_hosts=names,
        allowed_origins=origins,
    )
    process_priority.collect_garbage_rarely()
    reconciling = asyncio.create_task(reconciler.run(stopping), name="reconciler")
    webhooks = _start_webhooks(store, settings, services.overview, stopping)
    expiring = asyncio.create_task(services.removal.expire_forever(), name="expire-jobs")
    operations = asyncio.create_task(services.operation_runner.run(), name="operations")
    reconciling.add_done_callback(lambda _task: stopping.set())
    try:
        with _server_file(settings, listener, token) as server:
            on_ready(server, None if access is None else access.issue_code())
            await _http(services, settings, listener, sender)
    finally:
        stopping.set()
        beside = [task for task in (webhooks, expiring, operations) if task is not None]
        try:
            await _await_reconciler(reconciling, settings.pace.stop_deadline_s)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        if sender is not None:
            await asyncio.to_thread(sender.shutdown)


def _start_webhooks(
    store: Store, settings: Settings, overview: Overview, stopping: asyncio.Event
) -> asyncio.Task[None] | None:
    if settings.webhook_url is None:
        return None
    sender = WebhookSender(store, settings, overview)
    return asyncio.create_task(sender.run(stopping), name="webhooks")


async def _http(
    services: Services,
    settings: Settings,
    listener: socket.socket,
    sender: TracerProvider | None,
) -> None:
    app = create_app(services)
    if sender is not None:
        tracing.trace_requests(app, sender)
    config = server_config(
        app, ssl_certfile=settings.https_cert_file, ssl_keyfile=settings.https_key_file
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stop = asyncio.create_task(services.stopping.wait())
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    stop.cancel()


async def _await_reconciler(reconciling: asyncio.Task[None], deadline_s: float) -> None:
    """Wait until the reconciler has released its leases, at most until the deadline."""
    done, _ = await asyncio.wait({reconciling}, timeout=deadline_s)
    if not done:
        _log.warning("the reconciler did not end in time; its leases will expire")
        reconciling.cancel()
    elif (error := reconciling.exception()) is not None:
        raise ServeError(f"the reconciler failed: {error!r}") from error


@contextlib.asynccontextmanager
async def _cluster(
    settings: Settings, connect: Connect, stopping: asyncio.Event, broken: _Broken
) -> AsyncIterator[Cluster]:
    """The Ray cluster of the settings; an embedded cluster is started or adopted, and ended, unless
    only this server's client is broken."""
    if (address := settings.ray_address) is not None:
        _use_token(settings)
        for name, value in HEAD_MAY_BE_AWAY.items():
            os.environ.setdefault(name, value)
        async with _connected(connect, lambda: address) as cluster:
            yield cluster
        return
    ending = threading.Event()
    try:
        with local_cluster.attached(settings.data_dir):
            await _embedded(settings, stopping)
            again = functools.partial(
                embedded.ensure, settings, lambda: ending.is_set() or stopping.is_set()
            )
            async with _connected(connect, lambda: again().address) as cluster:
                process_priority.lower_session_priority()
                yield cluster
    finally:
        ending.set()
        if not broken.why and not local_cluster.server_attached(settings.data_dir):
            await asyncio.to_thread(local_cluster.stop, settings.data_dir)


def _use_token(settings: Settings) -> None:
    """Let Ray send the cluster's token: set before its import. Raises ServeError."""
    if settings.ray_token_file is None:
        return
    try:
        read_token(settings.ray_token_file)
    except HostClusterError as error:
        raise ServeError(str(error)) from error
    os.environ |= token_variables(settings.ray_token_file.absolute())


async def _embedded(settings: Settings, stopping: asyncio.Event) -> None:
    """Start or adopt the embedded cluster. Meanwhile Ray is imported. Raises ServeError."""
    abandoned = threading.Event()
    os.environ |= embedded.environment(settings)  # before the import of Ray, which reads it once
    start = asyncio.create_task(asyncio.to_thread(embedded.ensure, settings, abandoned.is_set))
    stop = asyncio.create_task(stopping.wait())
    loading = asyncio.create_task(asyncio.to_thread(importlib.import_module, _RAY_MODULE))
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        abandoned.set()
    stop.cancel()
    await loading
    try:
        await start
    except local_cluster.LocalClusterError as error:
        if stopping.is_set():
            raise _StoppedEarly from error
        raise ServeError(str(error)) from error


def _has_ended(settings: Settings, address: str) -> bool:
    """Whether the embedded cluster at this address is no more; the keeper ends all of it."""
    found = local_cluster.find(settings.data_dir)
    return found is None or found.address != address


@contextlib.asynccontextmanager
async def _connected(connect: Connect, find_address: Callable[[], str]) -> AsyncIterator[Cluster]:
    # In a thread: the call blocks, and in the main thread Ray would replace the SIGTERM handler.
    try:
        cluster = await asyncio.to_thread(connect, find_address)
    except ClusterUnavailable as error:
        raise ServeError(str(error)) from error
    try:
        yield cluster
    finally:
        await asyncio.to_thread(cluster.close)


def _probes(
    store: Store, cluster: Cluster, reconciler: Reconciler, settings: Settings
) -> dict[str, Probe]:
    async def database() -> str | None:
        await store.ping()
        return None

    async def nodes() -> str | None:
        capacity = await cluster.capacity()
        return None if capacity.nodes or capacity.can_grow else "the cluster has no node"

    async def reconciling() -> str | None:
        since = reconciler.seconds_since_claim()
        if since is not None and since <= settings.lease_s:
            return None
        return "claimed no jobs yet" if since is None else f"claimed no jobs for {since:.1f} s"

    return {"database": database, "cluster": nodes, "reconciler": reconciling}


def _make_private(folder: Path) -> None:
    """Create the data directory, or take the other users' access to it away. Raises ServeError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    try:
        if mode & stat.S_ISVTX:
            raise ServeError(f"{folder} belongs to all users: choose a --data-dir of its own")
        if mode & 0o077:
            folder.chmod(0o700)
    except PermissionError as error:
        raise ServeError(
            f"other users have access to {folder}, which belongs to another user: choose a "
            "--data-dir of this server's user"
        ) from error


def bound(settings: Settings) -> socket.socket:
    """Bind the port first: a server without a port must not start a cluster.

    The socket names its protocol: asyncio sets TCP_NODELAY only then, and without it an answer to a
    connection that is kept waits 40 ms for the client's acknowledgement.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen()  # with SO_REUSEADDR two servers can bind a port, but not listen
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "is another server running? choose another --port"
        ) from error
    return listener


@contextlib.contextmanager
def _server_file(
    settings: Settings, listener: socket.socket, token: str | None
) -> Iterator[ServerFile]:
    """Write `server.json` while the server runs; leaves another server's file alone at the end."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.https_cert_file is None else "https"
    server = ServerFile(
        address=f"{scheme}://{shown}:{port}",
        pid=os.getpid(),
        data_dir=str(settings.data_dir.resolve()),
        token=token,
    )
    path: Path = settings.data_dir / SERVER_FILE
    write_private(path, server.model_dump_json())
    try:
        yield server
    finally:
        with contextlib.suppress(OSError, ValueError):
            if ServerFile.model_validate_json(path.read_text()).pid == server.pid:
                path.unlink()


def server_token(path: Path) -> str:
    """The token of the data directory, made at the first start. Raises ServeError."""
    try:
        create_private(path, secrets.token_urlsafe(32))
        token = read_private(path).decode().strip()
    except PrivateFileRefused as error:
        raise ServeError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"cannot read the token of this server: {error}") from error
    if not _TOKEN.fullmatch(token):
        raise ServeError(f"{path} holds no token: remove it, and a new one is made")
    return token


def _install_signal_handlers(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
        loop.add_signal_handler(number, stopping.set)
