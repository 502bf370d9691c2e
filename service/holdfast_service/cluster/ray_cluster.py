"""The reconciler's access to the Ray cluster; implements `supervisor_protocol.Cluster`.

Every call has a deadline and runs Ray's blocking client in a thread that serves nothing else. An
unreachable cluster raises ClusterUnavailable, a supervisor that does not answer
SupervisorUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import (
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from holdfast_service.cluster import (
    actor_names,
    code_by_value,
    growth_groups,
    node_tasks,
)
from holdfast_service.cluster.connection import (
    ConnectionTimes,
    RayConnection,
)
from holdfast_service.cluster.job_remains import (
    RELEASE_S,
    actors,
    groups,
    kill_actors,
)
from holdfast_service.cluster.node_inspection import inspect_nodes
from holdfast_service.cluster.preparation_work import Progress
from holdfast_service.cluster.ray_state import draining_nodes
from holdfast_service.cluster.refused_seat import requirement_of
from holdfast_service.cluster.runtime_env import OwnCode, publish
from holdfast_service.cluster.supervisor_actor import (
    CALLS,
    CONCURRENCY_GROUPS,
    WAITING_CALLS,
    SupervisorActor,
)
from holdfast_service.cluster.token_preparer import Credentials, TokenPreparer
from holdfast_service.daemon_threads import DaemonThreads
from holdfast_service.diagnosis.node_faults import InspectedNode
from holdfast_service.diagnosis.unfit_software import cannot_load, import_fault
from holdfast_service.job_model.job_spec import JobSpec
from holdfast_service.job_model.node_labels import ACCELERATOR_PREFIX
from holdfast_service.job_model.preparation import (
    SourceProgress,
    SourceRequest,
    WeightsProgress,
    WeightsRequest,
)
from holdfast_service.job_model.supervisor_protocol import (
    AvoidOrder,
    Capacity,
    ClusterUnavailable,
    Cursors,
    FaultOrder,
    GrowthRequest,
    JobPlan,
    NodeCapacity,
    PackagesAnswer,
    PathAnswer,
    SamplesAnswer,
    SampleText,
    SizeOrder,
    StopOrder,
    SupervisorReport,
    SupervisorUnavailable,
)
from holdfast_service.policy.quarantine import Avoided
from holdfast_service.remote_tier.location import (
    SecretUnusable,
    credentials_for,
    storage_options,
)
from holdfast_workers.protocol import codec
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec import RemoteTierSpec, SourceSpec

Result = TypeVar("Result")

CALL_S = 10.0
CALL_THREADS = 16
POLL_S = 5.0
_MOST_SAID = 200
SAMPLES_S = 60.0
"""Time for reading the shards of some samples."""
INSTALL_MARGIN_S = 60.0
"""Time for the start of the task that installs packages."""


HEAD_RESOURCE = "node:__internal_head__"
_NOT_CUSTOM = frozenset({"CPU", "GPU", "memory", "object_store_memory"})


class RayCluster:
    """One connection of this process to one Ray cluster."""

    def __init__(
        self,
        installation: str,
        key: bytes,
        secrets_dir: Path,
        can_grow: bool,
        connection: RayConnection,
        code: OwnCode | None = None,
    ) -> None:
        """`code`: see `OwnCode`; None: nothing is sent."""
        self._installation = installation
        self._namespace = actor_names.namespace(installation)
        self._key = key
        self._secrets = secrets_dir
        self._can_grow = can_grow
        self._connection = connection
        self._code = code or OwnCode()
        self._supervisors: dict[str, Any] = {}
        self._sweeps: dict[str, dict[str, Any]] = {}
        self._awaited: set[Any] = set()
        """Calls that wait at a supervisor without a thread."""
        self._threads = DaemonThreads(CALL_THREADS, "ray-call")

    @classmethod
    def connect(
        cls,
        find_address: Callable[[], str],
        installation: str,
        key: bytes,
        secrets_dir: Path,
        on_stuck: Callable[[str], None],
        has_ended: Callable[[str], bool] = lambda _: False,
        can_grow: bool = False,
        code: OwnCode | None = None,
    ) -> RayCluster:
        """Connect this process as a driver, and again whenever that is lost. Authentication comes
        from the environment.

        `find_address`, `on_stuck`, `has_ended`: see `RayConnection`. `installation`: the id in the
        database; jobs of other installations are never touched. `key`: its secret, from which every
        job's secret is derived. `secrets_dir`: named secrets. `can_grow`: an autoscaler adds nodes
        on demand. Raises ClusterUnavailable.
        """
        connection = RayConnection(
            find_address,
            actor_names.namespace(installation),
            ConnectionTimes(),
            on_stuck,
            has_ended,
        )
        cluster = cls(installation, key, secrets_dir, can_grow, connection, code)
        connection.open(cluster.forget_connection)
        return cluster

    def close(self) -> None:
        """Disconnect from the cluster; its actors keep running."""
        self._connection.close()

    def forget_connection(self) -> None:
        """Drop everything that belongs to a former connection. Called from any thread."""
        self._supervisors = {}
        self._sweeps = {}
        self._code.forget_connection()
        awaited, self._awaited = self._awaited, set()
        for call in awaited:
            call.cancel()

    async def capacity(self) -> Capacity:
        return await self._call(self._capacity)

    async def ask_for_nodes(
        self, requests: Collection[GrowthRequest], may_start: Collection[str]
    ) -> None:
        await self._call(lambda: growth_groups.show(self._installation, requests, may_start))

    async def look_for_path(self, source: str, folder: bool, timeout_s: float) -> PathAnswer:
        try:
            host, exists, why = await asyncio.wait_for(
                self._in_thread(
                    lambda: node_tasks.look_for(source, folder, timeout_s, self._code.options())
                ),
                timeout_s,
            )
        except (RayError, ConnectionError, TimeoutError) as error:
            raise ClusterUnavailable(f"{type(error).__name__}: {error}") from error
        return PathAnswer(host, exists, why)

    async def install_packages(
        self, requirements: Sequence[str], timeout_s: float, avoid: Collection[str] = ()
    ) -> PackagesAnswer:
        for node in await self._call(lambda: node_tasks.nodes_by_cpus(avoid)):
            try:
                return await self._install_on(node, requirements, timeout_s)
            except (RayTaskError, WorkerCrashedError, OutOfMemoryError, TimeoutError) as error:
                said = str(error).strip().rpartition("\n")[2]  # before it: a traceback, with paths
                failed = PackagesAnswer(f"node {node}", error=f"{type(error).__name__}: {said}")
                if not cannot_load(error):
                    break
            except (RayError, ConnectionError) as error:
                raise ClusterUnavailable(f"{type(error).__name__}: {error}") from error
        return failed

    async def _install_on(
        self, node: str, requirements: Sequence[str], timeout_s: float
    ) -> PackagesAnswer:
        def begin() -> Any:
            return node_tasks.begin_installation(
                node, requirements, timeout_s, self._code.options()
            )

        task = await self._call(begin)
        try:
            host, packages, why = await self._answer(task, timeout_s + INSTALL_MARGIN_S)
        finally:
            # Also if the caller is cancelled: pip ends with the task.
            self._threads.submit(self._cancel, task)
        return PackagesAnswer(host, tuple(packages), why)

    def _cancel(self, task: Any) -> None:
        with (
            contextlib.suppress(ClusterUnavailable, RayError),
            self._connection.in_use(control=False),
        ):
            ray.cancel(task, force=True)

    async def prepare_tokens(self, requests: Sequence[SourceRequest]) -> tuple[SourceProgress, ...]:
        def ask() -> list[Any]:
            node_tasks.nodes_by_cpus()  # without any, more nodes are needed first
            preparer = self._token_preparer()
            return [preparer.ask.remote(*self._question(request)) for request in requests]

        asked = await self._call(ask)
        answers = (
            self._progress_of(request.source.path, answer, SourceProgress)
            for request, answer in zip(requests, asked, strict=True)
        )
        return tuple(await asyncio.gather(*answers))

    async def prepare_weights(self, request: WeightsRequest) -> WeightsProgress:
        def ask() -> Any:
            node_tasks.nodes_by_cpus()
            place = "checkpoint.remote.secret"
            credentials = self._credentials_for(request.root, request.remote, place)
            return self._token_preparer().ask_weights.remote(codec.encode(request), credentials)

        asked = await self._call(ask)
        return await self._progress_of(request.folder, asked, WeightsProgress)

    async def _progress_of(self, path: str, asked: Any, kind: type[Progress]) -> Progress:
        """The answer to a question; without one, why there is none yet."""
        try:
            return codec.decode(await self._answer(asked, POLL_S), kind)
        except TimeoutError:
            why = "the process that prepares sources does not answer yet"
        except RayError as error:
            said = " ".join(str(error).split())[:_MOST_SAID]
            why = f"the process that prepares sources has ended, and is started again ({said})"
        except ConnectionError as error:
            raise ClusterUnavailable(str(error)) from error
        return kind(path, waits=why)

    async def read_samples(self, spec: JobSpec, count: int) -> SamplesAnswer:
        def begin() -> Any:
            remote = spec.checkpoint.remote
            uri = spec.data.prepared[0].uri
            credentials = self._credentials_for(uri, remote, "checkpoint.remote.secret")
            node = node_tasks.nodes_by_cpus()[0]
            store = storage_options(remote, credentials)
            return node_tasks.begin_samples(node, spec, count, store, self._code.options())

        task = await self._call(begin)
        try:
            samples, why = await self._answer(task, SAMPLES_S)
        except TimeoutError:
            return SamplesAnswer(error=f"they were not read within {SAMPLES_S:g} s: ask for fewer")
        except (RayError, ConnectionError) as error:
            raise ClusterUnavailable(f"{type(error).__name__}: {error}") from error
        finally:
            self._threads.submit(self._cancel, task)
        return SamplesAnswer(tuple(SampleText(*sample) for sample in samples), why)

    async def ensure_supervisor(self, plan: JobPlan) -> bool:
        return await self._call(lambda: self._ensure_supervisor(plan))

    async def poll(self, job_id: str, cursors: Cursors) -> SupervisorReport:
        def call() -> SupervisorReport:
            answer = self._supervisor(job_id).poll.remote(codec.encode(cursors))
            return codec.decode(ray.get(answer, timeout=POLL_S), SupervisorReport)

        return await self._call_supervisor(job_id, call)

    async def await_news(self, job_id: str, cursors: Cursors, timeout_s: float) -> bool:
        def call() -> Any:
            method = self._supervisor(job_id).await_news.options(concurrency_group=WAITING_CALLS)
            return method.remote(codec.encode(cursors), timeout_s)

        waiting = await self._call_supervisor(job_id, call)
        try:
            return bool(await self._answer(waiting, timeout_s + POLL_S))
        except (RayError, ConnectionError, TimeoutError) as error:
            raise SupervisorUnavailable(f"{type(error).__name__}: {error}") from error

    async def _answer(self, reference: Any, timeout_s: float) -> Any:
        """The result of a call of Ray; no thread waits for it. Raises ConnectionError if the
        connection is made anew meanwhile."""
        answer = reference.future()
        self._awaited.add(answer)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)
        except asyncio.CancelledError:
            if answer in self._awaited:
                raise  # the caller has been cancelled
            raise ConnectionError("the connection to Ray was made anew") from None
        finally:
            self._awaited.discard(answer)

    async def stop(self, job_id: str, order: StopOrder) -> None:
        await self._order(job_id, order)

    async def inject(self, job_id: str, number: int, fault: dict[str, Any]) -> None:
        await self._order(job_id, FaultOrder(number, fault))

    async def avoid(self, job_id: str, nodes: dict[str, Avoided]) -> None:
        await self._order(job_id, AvoidOrder(nodes))

    async def resize(self, job_id: str, order: SizeOrder) -> None:
        await self._order(job_id, order)

    async def release(self, job_id: str) -> bool:
        return await self._call(lambda: self._release(job_id))

    async def jobs_present(self) -> set[str]:
        return await self._call(self._jobs_present)

    async def inspect(
        self, store: tuple[str, StorageOptions] | None, deadline_s: float
    ) -> list[InspectedNode]:
        def call() -> list[InspectedNode]:
            return inspect_nodes(store, deadline_s, self._code, lambda: self._connection.is_lost)

        return await self._call(call, deadline_s + CALL_S)

    async def _order(
        self, job_id: str, order: StopOrder | FaultOrder | AvoidOrder | SizeOrder
    ) -> None:
        def call() -> None:
            done = self._supervisor(job_id).order.remote(codec.encode(order))
            ray.get(done, timeout=POLL_S)

        await self._call_supervisor(job_id, call)

    # --- blocking bodies --------------------------------------------------------------------------

    def _capacity(self) -> Capacity:
        draining = draining_nodes()  # Ray places nothing there
        ours = _placed_bundles(self._installation)
        available = available_resources_per_node()
        nodes = tuple(
            _capacity_of(node, available.get(node["NodeID"]), ours)
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in draining
        )
        placed: dict[str, list[str]] = {}
        for bundle in ours:
            if bundle.job:
                placed.setdefault(bundle.job, []).append(bundle.node)
        return Capacity(nodes=nodes, can_grow=self._can_grow, placed=placed)

    def _question(self, request: SourceRequest) -> tuple[bytes, Credentials]:
        of_sources = "data.sources.secret"
        of_source = "data.validation.secret" if request.apart_from else of_sources
        credentials = (
            self._credentials_for(request.root, request.remote, "checkpoint.remote.secret"),
            self._credentials_for(request.source.bucket, request.source, of_source),
            *(self._credentials_for(each.bucket, each, of_sources) for each in request.apart_from),
        )
        return codec.encode(request), credentials

    def _token_preparer(self) -> Any:
        """The actor that prepares sources, which is created if it is not there."""
        actor = ray.remote(TokenPreparer).options(
            name=actor_names.TOKEN_PREPARER,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=CALLS,
            num_cpus=0,
            **self._code.options(),
        )
        return actor.remote()

    def _ensure_supervisor(self, plan: JobPlan) -> bool:
        with contextlib.suppress(SupervisorUnavailable):
            self._supervisor(plan.job_id)
            return False
        if self._can_grow:
            growth_groups.give_way(self._installation, plan.job_id)
        if plan.spec.code is not None:
            publish(plan.spec.code, plan.package)
        # Ray keeps what an actor is made with.
        plan = replace(plan, package=None, installation=self._installation)
        actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(SupervisorActor).options(
            name=actor_names.supervisor(plan.job_id),
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=CALLS,
            num_cpus=0,
            resources=_head_resource(),
            **self._code.options(),
        )
        self._supervisors[plan.job_id] = actor.remote(
            codec.encode(plan), self._job_secret(plan.job_id), self._credentials(plan)
        )
        return True

    def _supervisor(self, job_id: str) -> Any:
        if job_id in self._supervisors:
            return self._supervisors[job_id]
        name = actor_names.supervisor(job_id)
        try:
            found = self._supervisors[job_id] = ray.get_actor(name, self._namespace)
        except ValueError:
            raise SupervisorUnavailable(f"job {job_id} has no supervisor") from None
        return found

    def _jobs_present(self) -> set[str]:
        of_actors = {
            actor_names.job_of(name) for space, name in actors() if space == self._namespace
        }
        of_groups = {actor_names.job_of_group(name, self._installation) for name, _ in groups()}
        return {job for job in of_actors | of_groups if job is not None}

    def _credentials(self, plan: JobPlan) -> dict[str, str] | None:
        remote = plan.spec.checkpoint.remote
        return self._credentials_for(remote.uri, remote, "checkpoint.remote.secret")

    def _credentials_for(
        self, uri: str | None, named: RemoteTierSpec | SourceSpec, field: str
    ) -> dict[str, str] | None:
        try:
            return credentials_for(uri, named, self._secrets)
        except SecretUnusable as error:  # the secret existed when the job was accepted
            raise ClusterUnavailable(f"{field}: {error}") from error

    def _job_secret(self, job_id: str) -> bytes:
        return hmac.digest(self._key, job_id.encode(), "sha256")

    def _release(self, job_id: str) -> bool:
        """One pass: free memory, kill actors, remove the placement group, sweep segments."""
        self._supervisors.pop(job_id, None)
        mine = [
            (space, name)
            for space, name in actors()
            if space == self._namespace and actor_names.job_of(name) == job_id
        ]
        kill_actors([actor for actor in mine if actor[1] == actor_names.supervisor(job_id)])
        kill_actors([actor for actor in mine if actor[1] != actor_names.supervisor(job_id)])
        placed = [
            group
            for name, group in groups()
            if actor_names.is_group_of(name, self._installation, job_id)
        ]
        for group in placed:
            ray.util.remove_placement_group(group)
        if mine or placed:
            self._sweeps.pop(job_id, None)
            return False  # a later pass must find nothing
        return self._sweep(job_id)

    def _sweep(self, job_id: str) -> bool:
        """Remove the segments that dead agents left on any node; True once all nodes have done so.

        A node may have to start a process for this task, which takes longer than one pass on a
        busy machine: the task is started once, and later passes wait for it.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        sweeps = {
            node: call for node, call in self._sweeps.get(job_id, {}).items() if node in alive
        }
        folder = actor_names.memory_folder(self._installation, job_id)
        ray.cloudpickle.register_pickle_by_value(code_by_value)  # also for nodes without Holdfast
        for node in alive - sweeps.keys():
            sweeps[node] = node_tasks.task_on(node, code_by_value.sweep_this_node).remote(folder)
        calls = [*sweeps.values()]
        late = ray.wait(calls, num_returns=len(calls), timeout=RELEASE_S)[1] if calls else []
        for node, call in [*sweeps.items()]:
            if call in late:
                continue
            try:
                ray.get(call)
            except RayError as error:
                if not cannot_load(error):  # else its Python is another: no job ran there
                    del sweeps[node]  # a node that has died is not swept again
        if late or sweeps.keys() != alive:
            self._sweeps[job_id] = sweeps
            return False
        self._sweeps.pop(job_id, None)
        return True

    def _in_thread(self, body: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, body)

    # --- translation of errors ---------------------------------------------------------------

    async def _call(
        self, body: Callable[[], Result], deadline_s: float = CALL_S + RELEASE_S
    ) -> Result:
        def call() -> Result:
            with self._connection.in_use(control=True):
                return body()

        try:
            return await asyncio.wait_for(self._in_thread(call), deadline_s)
        except (RayError, ConnectionError, TimeoutError) as error:
            raise ClusterUnavailable(f"{type(error).__name__}: {error}") from error

    async def _call_supervisor(self, job_id: str, body: Callable[[], Result]) -> Result:
        """Needs no GCS, once the supervisor is known."""
        known = job_id in self._supervisors

        def call() -> Result:
            with self._connection.in_use(control=not known):
                return body()

        try:
            return await asyncio.wait_for(self._in_thread(call), CALL_S)
        except (RayError, ConnectionError, TimeoutError, codec.UnreadableDocument) as error:
            self._supervisors.pop(job_id, None)
            fault = import_fault(
                str(error), sends_code=self._code.is_sent, requirement_of=requirement_of
            )
            why = f"on its node, {fault}" if fault else f"{type(error).__name__}: {error}"
            raise SupervisorUnavailable(why) from error


@dataclass(frozen=True)
class _PlacedBundle:
    """A bundle of a job's placement group that has its node.

    `job` "": of a group that only asks for nodes."""

    job: str
    node: str
    amounts: dict[str, float]
    """Amounts by resource."""


def _placed_bundles(installation: str) -> list[_PlacedBundle]:
    """The placed bundles of all jobs of the installation."""
    found = []
    for group in ray.util.placement_group_table().values():
        job = actor_names.job_of_group(group["name"], installation)
        if actor_names.holds_no_job(group["name"], installation):
            job = ""
        if job is None or group["state"] == "REMOVED":
            continue
        for index, node in group["bundles_to_node_id"].items():
            if node:
                found.append(_PlacedBundle(job, node, dict(group["bundles"][index])))
    return found


def _capacity_of(
    node: dict[str, Any], available: dict[str, float] | None, ours: list[_PlacedBundle]
) -> NodeCapacity:
    """`available`: what is free on the node; None: not known yet, then all is."""
    resources = {name: float(amount) for name, amount in node["Resources"].items()}
    free = resources if available is None else available
    own = [each.amounts for each in ours if each.node == node["NodeID"]]
    named = {name for name in resources if name not in _NOT_CUSTOM and ":" not in name}
    named |= {name for name in resources if name.startswith(ACCELERATOR_PREFIX)}

    def foreign(name: str) -> float:
        used = resources.get(name, 0.0) - free.get(name, 0.0)
        return max(0.0, used - sum(float(amounts.get(name, 0.0)) for amounts in own))

    return NodeCapacity(
        node_id=node["NodeID"],
        host=node["NodeManagerAddress"],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        foreign_cpus=foreign("CPU"),
        foreign_gpus=foreign("GPU"),
        custom={name: resources[name] for name in sorted(named)},
        foreign_custom={name: foreign(name) for name in sorted(named)},
        labels=dict(node.get("Labels") or {}),
        head=HEAD_RESOURCE in resources,
    )


def _head_resource() -> dict[str, float]:
    """A resource that only the head node has, if Ray reports one.

    Supervisors on the head survive the loss of training nodes. (A node affinity would name a node
    id that does not exist after the head is replaced.)
    """
    if any(node["Alive"] and HEAD_RESOURCE in node["Resources"] for node in ray.nodes()):
        return {HEAD_RESOURCE: 0.0001}
    return {}
