"""This process's connection to a Ray cluster: watched, and made anew when it is lost.

`connection_health.py` decides. A thread looks at the connection; when it is lost, calls are refused
with the reason, and `ray.shutdown` and `ray.init` run in a thread of their own until they succeed.
A Ray client that does not come back from them cannot be ended: `on_stuck` then ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import ray
import structlog
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]

from holdfast_service.cluster import ray_state
from holdfast_service.cluster.connection_health import Link, LinkHealth, Patience, Sight, judge
from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.job_model.supervisor_protocol import ClusterUnavailable

_log = structlog.get_logger()


@dataclass(frozen=True)
class ConnectionTimes:
    """Intervals and deadlines, in seconds."""

    look_s: float = 2.0
    """Time between two looks."""
    answer_s: float = 2.0
    """Deadline of the GCS's answer to a look; then it counts as away."""
    lost_after_s: float = 6.0
    """A connection is made anew if the GCS has answered others for so long, but not this one."""
    drain_s: float = 20.0
    """How long a new connection waits for calls of the old one; after that the process ends."""
    renew_s: float = 60.0
    """Deadline of `ray.shutdown` and `ray.init`; the same."""


class RayConnection:
    """One connection at a time, as a driver in `namespace`."""

    def __init__(
        self,
        find_address: Callable[[], str],
        namespace: str,
        times: ConnectionTimes,
        on_stuck: Callable[[str], None],
        has_ended: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`find_address()`: where the cluster is now; asked for each new connection, and may start
        a cluster. `on_stuck(why)`: the process must end; called once, from a thread.
        It has a deadline of its own, which raises another error than TimeoutError.
        `has_ended(address)`: whether that cluster is known to have ended for good."""
        self._find_address = find_address
        self._namespace = namespace
        self._times = times
        self._patience = Patience(times.lost_after_s)
        self._on_renewed: Callable[[], None] = lambda: None
        self._on_stuck = on_stuck
        self._has_ended = has_ended
        self._address = ""
        self._cluster_id = ""
        self._health = LinkHealth()
        self._changed = threading.Condition()
        self._calls = 0
        self._is_open = False
        self._closing = threading.Event()
        self._look_threads = DaemonThreads(1, "ray-look")
        self._fresh_threads = DaemonThreads(1, "ray-fresh-client")
        self._looking: Future[bool | None] | None = None
        self._asking: Future[str] | None = None

    def open(self, on_renewed: Callable[[], None]) -> None:
        """Connect, and watch from now on. Raises ClusterUnavailable. `on_renewed()`: nothing of the
        former connection may be used any more; called from a thread."""
        self._on_renewed = on_renewed
        logging.getLogger("ray._private.worker").addFilter(_is_relevant)
        self._connect(self._find_address())
        self._is_open = True
        threading.Thread(target=self._watch, name="ray-connection", daemon=True).start()

    def close(self) -> None:
        """Disconnect from the cluster; its actors keep running."""
        self._closing.set()
        if self._is_open:
            ray.shutdown()

    @property
    def problem(self) -> str:
        """Why the cluster's control service cannot be used now; "": it can, as far as is known."""
        return "" if self._health.link in (Link.READY, Link.DOUBTFUL) else self._health.why

    @property
    def is_lost(self) -> bool:
        """Whether the connection is being made anew, which waits for the calls of the old one: a
        call of more than `drain_s` must look here, and end."""
        return not self._is_open

    @contextlib.contextmanager
    def in_use(self, *, control: bool) -> Iterator[None]:
        """Hold the connection for the time of a call. `control`: the call needs the GCS, and not
        only an actor. Raises ClusterUnavailable while the connection is made anew, or if the GCS is
        known to be away."""
        with self._changed:
            if not self._is_open or (control and self.problem):
                raise ClusterUnavailable(self.problem or "the connection to Ray is being made")
            self._calls += 1
        try:
            if control:
                ray_state.require_control_service(self._times.answer_s)
            yield
        except ray_state.ControlServiceAway as error:
            raise ClusterUnavailable(str(error)) from error
        except SystemExit as error:  # of Ray's client, when it is shut down: only this call ends
            raise ClusterUnavailable("the connection to Ray was closed") from error
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    # --- the watch --------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.wait(self._times.look_s):
            before, self._health = self._health, judge(self._health, self._look(), self._patience)
            if self._health.link is not before.link:
                _log.warning("ray_connection", state=self._health.link, why=self._health.why)
            if self._health.link is Link.LOST:
                self._renew_until_connected()

    def _look(self) -> Sight:
        at = time.monotonic()
        if self._looking is None or self._looking.done():
            self._looking = self._look_threads.submit(self._own_raylet_lives)
        try:
            raylet = self._looking.result(self._times.answer_s)
            if raylet is not None:
                return Sight(at, answers=True, raylet=raylet, head=True)
            return Sight(at, answers=True, head=True)
        except Exception:  # any error of Ray's client is an answer that did not come
            found = self._fresh_answer()
            return Sight(
                at,
                answers=False,
                head=bool(found),
                same_cluster=found in ("", self._cluster_id),
                ended=not found and self._has_ended(self._address),
            )

    def _own_raylet_lives(self) -> bool | None:
        own = ray.get_runtime_context().get_node_id()
        nodes = ray_state.nodes(self._times.answer_s)
        return next((node.alive for node in nodes if node.node_id == own), None)

    def _fresh_answer(self) -> str:
        """The id of the cluster that answers a fresh client; "": none does."""
        if self._asking is None or self._asking.done():
            self._asking = self._fresh_threads.submit(
                _cluster_at, self._address, self._times.answer_s
            )
        try:
            return self._asking.result(self._times.answer_s)
        except Exception:  # as above
            return ""

    # --- a new connection -------------------------------------------------------------------------

    def _renew_until_connected(self) -> None:
        began, why = time.monotonic(), self._health.why
        with self._changed:
            self._is_open = False
            # A client that is shut down under a running call may end the process.
            self._changed.wait_for(lambda: not self._calls, self._times.drain_s)
            if self._calls:
                self._on_stuck(f"{why}; {self._calls} calls of the old connection do not end")
                return
        while not self._closing.is_set():
            try:
                address = self._answering_address()
                attempt = DaemonThreads(1, "ray-init").submit(self._reconnect, address)
                attempt.result(self._times.renew_s)
                break
            except TimeoutError:
                self._on_stuck(
                    f"{why}; Ray's client did not connect anew within {self._times.renew_s:g} s"
                )
                return
            except Exception as error:  # of Ray's client, or of the search for the address
                self._health = LinkHealth(Link.LOST, f"{why}; no new connection: {error}")
                _log.warning("ray_connection", state=Link.LOST, why=self._health.why)
            self._closing.wait(self._times.look_s)
        else:
            return
        self._on_renewed()
        with self._changed:
            self._health = LinkHealth()
            self._is_open = True
        _log.warning("ray_connection", state="renewed", took_s=time.monotonic() - began, why=why)

    def _answering_address(self) -> str:
        """Raises ClusterUnavailable unless the GCS answers: Ray's client would wait for it without
        limit. A cluster that has to be started first has deadlines of its own."""
        address = self._find_address()
        AuthenticationTokenLoader.instance().reset_cache()  # a new cluster has a new token
        _cluster_at(address, self._times.answer_s)
        return address

    def _reconnect(self, address: str) -> None:
        ray.shutdown()
        self._connect(address)

    def _connect(self, address: str) -> None:
        try:
            ray.init(
                address=address,
                namespace=self._namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                ignore_reinit_error=True,
            )
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterUnavailable(f"cannot connect to Ray at {address}: {error}") from error
        self._address, self._cluster_id = ray_state.own_cluster()
        self._looking = None


def _cluster_at(address: str, timeout_s: float) -> str:
    """The id of the cluster there. Raises ClusterUnavailable."""
    host, _, port = address.rpartition(":")
    try:
        # Ray's client would wait much longer for a port that is closed.
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        return str(GcsClient(address=address).cluster_id.hex())
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise ClusterUnavailable(f"the GCS at {address} does not answer: {error}") from error


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for Ray's warning that it sets no SIGTERM handler outside the main thread."""
    return not record.getMessage().startswith("SIGTERM handler is not set")
