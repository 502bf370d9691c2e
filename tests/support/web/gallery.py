"""A gallery of jobs: one of each state and of each level, on a cluster of a few machines.

The story is that of a small team. The past of each job is written as a server would have stored it,
and the server that runs drives the jobs that are alive: their states stay live, and what a user
orders (a pause, a cancel) is really ordered. `JOBS` names the state of each job.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.service.databases import run_in_thread
from tests.support.service.live_server import LiveServer
from tests.support.waiting import eventually
from tests.support.web import gallery_story as story
from tests.support.web.gallery_story import GPUS, MACHINES, SPECS
from tests.support.web.past_job import PastJob

from holdfast import Client
from holdfast.formats.code_archive import pack
from holdfast_service.job_model.events.checkpoints import CheckpointSavedEvent
from holdfast_service.job_model.events.codec import encode
from holdfast_service.job_model.job_spec import parse
from holdfast_service.job_model.lifecycle import Phase, State
from holdfast_service.job_model.supervisor_protocol import Capacity, NodeCapacity, StartWait
from holdfast_service.services.code_packages import CodeService
from holdfast_service.services.nodes import NodeService
from holdfast_service.store import nodes
from holdfast_service.store.engine import Store
from holdfast_workers.protocol.messages import PROGRAM_PHASE

JOBS: dict[str, State] = {
    "mixtral-long-context": State.QUEUED,
    "whisper-own-loop": State.STARTING,
    "nanogpt-own-script": State.RUNNING,
    "t5-lightning-sft": State.RUNNING,
    "llama-1b-pretrain": State.RUNNING,
    "vit-memory-tier": State.RECOVERING,
    "olmo-elastic": State.RESIZING,
    "resnet-ray-train": State.PAUSED,
    "dedup-ablation": State.CANCELLING,
    "spirals-function": State.SUCCEEDED,
    "eval-harness": State.SUCCEEDED,
    "bert-own-loop": State.FAILED,
    "tokenizer-sweep": State.CANCELLED,
}
EXAMPLES = Path(__file__).parents[3] / "examples"
LONG_S = 86_400.0


def gallery(server: LiveServer) -> dict[str, str]:
    """Fill the store of a server that has not started, start it, and bring its jobs into their
    states. Returns their ids by name."""
    # The job that is being cancelled does so as long as the server runs.
    server.settings = server.settings.model_copy(update={"cancel_deadline_s": LONG_S})

    async def write() -> dict[str, str]:
        store = await Store.open(server.settings)
        try:
            return await _Gallery(server, store).write()
        finally:
            await store.close()

    ids = run_in_thread(write())
    server.start()
    with Client(server.address) as client:
        _order(server, client, ids)
        eventually(lambda: {name: client.get(ids[name]).state for name in JOBS} == JOBS)
    return ids


class _Gallery:
    """Writes all that is past."""

    def __init__(self, server: LiveServer, store: Store) -> None:
        self._server = server
        self._store = store
        self._now = time.time()
        self._ids: dict[str, str] = {}

    async def write(self) -> dict[str, str]:
        await self._machines()
        for job in (
            self._spirals,
            self._tokenizer,
            self._llama,
            self._bert,
            self._nanogpt,
            self._eval,
            self._t5,
            self._resnet,
            self._olmo,
            self._vit,
            self._dedup,
            self._mixtral,
            self._whisper,
        ):  # in the order of their submission, like the ids
            await job()
        placed = {
            self._ids["llama-1b-pretrain"]: MACHINES[:5],
            self._ids["nanogpt-own-script"]: MACHINES[5:6],
            self._ids["t5-lightning-sft"]: MACHINES[6:7],
            self._ids["vit-memory-tier"]: MACHINES[7:8],
            self._ids["olmo-elastic"]: MACHINES[8:10],
            self._ids["whisper-own-loop"]: MACHINES[10:11],
            self._ids["dedup-ablation"]: MACHINES[11:],
        }
        cluster = self._server.cluster
        ray_nodes = {job: [f"ray-{host}" for host in hosts] for job, hosts in placed.items()}
        cluster.nodes = replace(cluster.nodes, placed=ray_nodes)
        return self._ids

    async def _machines(self) -> None:
        head = NodeCapacity(f"ray-{story.HEAD}", story.HEAD, cpus=16.0, gpus=0.0, head=True)
        there = [
            NodeCapacity(f"ray-{host}", host, cpus=64.0, gpus=float(GPUS))
            for host in (*MACHINES, story.CORDONED)
        ]
        self._server.cluster.nodes = Capacity((head, *there), can_grow=False)
        gone = NodeCapacity(f"ray-{story.GONE}", story.GONE, cpus=64.0, gpus=float(GPUS))
        async with self._store.write() as session:
            await nodes.record_seen(session, [gone], self._now - 2400)
            await nodes.record_seen(session, [head, *there], self._now)
        await NodeService(self._store).cordon(story.CORDONED, story.CORDON_REASON, None)

    async def _past(self, name: str, ago_s: float, hosts: tuple[str, ...], **kept: Any) -> PastJob:
        """The job, when it was submitted."""
        document = {"name": name, **SPECS[name]}
        if folder := document.get("code"):
            code = CodeService(self._store, self._server.settings)
            document["code"] = (await code.put(pack(EXAMPLES / folder))).code
        spec = parse(document, None)
        mesh = kept.pop("mesh", {"dp_shard": spec.parallel.world_size})
        past = PastJob(self._store, spec, self._now - ago_s, hosts, mesh=mesh, **kept)
        await past.submit()
        self._ids[name] = past.id
        return past

    # --- level 3 ----------------------------------------------------------------------------------

    async def _llama(self) -> None:
        """Two faults survived; one machine was lost, and the standby took over."""
        first = (*MACHINES[:3], story.GONE)
        job = await self._past(
            "llama-1b-pretrain",
            3_700,
            first,
            mesh={"dp_shard": 16, "tp": 2},
            standbys=MACHINES[3:4],
            step_s=3.868,
        )
        await job.start()
        await job.form()
        await job.run(1)
        await self._train(job, 300, 100)
        await job.recover(await job.fail(story.CRASH))
        await self._train(job, 301, 100)
        job.hosts, job.standbys = MACHINES[:4], MACHINES[4:5]
        await job.recover(await job.fail(story.NODE_LOST))
        await self._train(job, 350, 100)
        job.live(self._server)

    async def _train(self, job: PastJob, steps: int, every: int) -> None:
        """Steps with checkpoints, and with lines of rank 0."""
        for done in range(0, steps, every):
            await job.train(min(every, steps - done))
            await job.write([*story.training_lines((job.step or 0) - every + 1, job.step or 0)])
            if job.step and job.step % 100 == 0:
                await job.save(f"/shared/checkpoints/{job.spec.name}", 17_800_000_000)

    async def _spirals(self) -> None:
        job = await self._past("spirals-function", 9_000, MACHINES[5:7], step_s=1.5)
        await job.start()
        await job.form()
        await job.run(1)
        await self._train(job, 120, 60)
        await job.recover(await job.fail(story.FUNCTION_CRASH))
        await self._train(job, 91, 91)
        again = replace(story.FUNCTION_CRASH, restored_step=209, steps_lost=1)
        await job.recover(await job.fail(again))
        await self._train(job, 91, 91)
        message = "all 300 steps are done and the last checkpoint is durable"
        await job.end(State.SUCCEEDED, "succeeded", message)

    async def _olmo(self) -> None:
        mesh = {"dp_shard": 4, "tp": 2}
        job = await self._past("olmo-elastic", 1_300, MACHINES[8:9], mesh=mesh, step_s=3.0)
        await job.start()
        await job.form()
        await job.run(1)
        await self._train(job, 420, 100)
        job.at = self._now - 4
        resized = await job.fail(replace(story.GROWTH, restored_step=420), Phase.RESIZING)
        job.hosts, job.mesh = MACHINES[8:10], {"dp_shard": 8, "tp": 2}
        await job.form(420, resized.incident)
        wait = StartWait("16 ranks to join", self._now - 3, self._now + 600 - 3)
        job.live(self._server, "rendezvous", wait)

    async def _dedup(self) -> None:
        mesh = {"dp_shard": 4, "tp": 2}
        job = await self._past("dedup-ablation", 800, MACHINES[11:], mesh=mesh, step_s=2.06)
        await job.start()
        await job.form()
        await job.run(1)
        await self._train(job, 380, 100)
        job.live(self._server).obeys = False

    async def _tokenizer(self) -> None:
        mesh = {"dp_shard": 4, "tp": 2}
        job = await self._past("tokenizer-sweep", 4_000, MACHINES[8:9], mesh=mesh, step_s=2.0)
        await job.start(40)
        await job.form()
        await job.run(1)
        await self._train(job, 260, 100)
        message = "cancelled by the user; its last state, step 260, is in the remote tier"
        await job.save("/shared/checkpoints/tokenizer-sweep", 17_800_000_000)
        await job.end(State.CANCELLED, "cancelled", message)

    async def _mixtral(self) -> None:
        await self._past("mixtral-long-context", 720, ())

    # --- levels 0 to 2 ----------------------------------------------------------------------------

    async def _nanogpt(self) -> None:
        """It reports nothing, and was started again after a fault."""
        job = await self._past("nanogpt-own-script", 2_400, MACHINES[5:6], reports=frozenset[str]())
        await job.start()
        await job.form()
        await job.run()
        job.at += 900
        await job.write([*story.gpt_lines(150)], 1.8)
        await job.recover(await job.fail(story.SCRIPT_CRASH))
        job.at = self._now
        await job.write([*story.gpt_lines(240)], 1.8)
        job.live(self._server, PROGRAM_PHASE)

    async def _eval(self) -> None:
        job = await self._past("eval-harness", 2_200, MACHINES[8:9], reports=frozenset[str]())
        await job.start()
        await job.form()
        await job.run()
        job.at += 310
        await job.write(story.EVAL_LINES, 50)
        await job.end(State.SUCCEEDED, "succeeded", "all ranks have ended with exit code 0")

    async def _t5(self) -> None:
        job = await self._past(
            "t5-lightning-sft",
            1_800,
            MACHINES[6:7],
            step_s=2.476,
            reports=frozenset({"loss", "lr"}),
        )
        await job.start()
        await job.form()
        await job.run(1, level=1, plugin="lightning")
        await self._train_program(job, 237)
        await job.recover(await job.fail(story.OUT_OF_MEMORY), 1, "lightning")
        await self._train_program(job, 480)
        job.live(self._server, "step")

    async def _vit(self) -> None:
        job = await self._past(
            "vit-memory-tier", 1_000, MACHINES[7:8], step_s=2.8, reports=frozenset({"loss"})
        )
        await job.start()
        await job.form()
        await job.run(1, level=2)
        await self._train_program(job, 340)
        job.at = self._now - 6
        opened = await job.fail(story.HANG)
        await job.form(340, opened.incident)
        wait = StartWait("rank 3 to join", self._now - 5, self._now + 600 - 5)
        job.live(self._server, PROGRAM_PHASE, wait)

    async def _resnet(self) -> None:
        job = await self._past(
            "resnet-ray-train", 1_500, MACHINES[6:7], step_s=3.14, reports=frozenset({"loss"})
        )
        await job.start(200)
        await job.form()
        await job.run(1, level=2, plugin="ray_train")
        await self._train_program(job, 410)
        job.live(self._server, "step").obeys = False

    async def _bert(self) -> None:
        job = await self._past(
            "bert-own-loop", 2_600, MACHINES[7:8], step_s=1.2, reports=frozenset({"loss"})
        )
        await job.start()
        await job.form()
        await job.run(1, level=1)
        await self._train_program(job, 88)
        job.at += 0.5
        await job.write(story.TRACEBACK.splitlines(), 0.01)
        await job.end(State.FAILED, "user_error", story.FAILURE, story.TRACEBACK)

    async def _train_program(self, job: PastJob, steps: int) -> None:
        await job.train(steps)
        await job.write([f"epoch {step // 100} step {step}" for step in range(0, steps, 10)], 2.0)

    async def _whisper(self) -> None:
        job = await self._past("whisper-own-loop", 20, MACHINES[10:11], reports=frozenset[str]())
        await job.start()
        await job.form()
        wait = StartWait("ranks 3, 5 to join", self._now - 12, self._now + 600 - 12)
        job.live(self._server, PROGRAM_PHASE, wait)


def _order(server: LiveServer, client: Client, ids: dict[str, str]) -> None:
    """The commands of users."""
    client.cancel(ids["dedup-ablation"])
    paused = ids["resnet-ray-train"]
    supervisor = server.supervisor(paused)
    client.pause(paused)
    eventually(lambda: bool(supervisor.orders))
    step, now = supervisor.step, time.time()
    saved = CheckpointSavedEvent(
        step=step, attempt=1, uri=f"/shared/ray/checkpoint-{step:06d}", nbytes=102_400_000
    )
    supervisor.emit(saved.kind, now, **encode(saved))
    message = f"paused by the user; its last state, step {step}, is in the remote tier"
    supervisor.end("PAUSED", "paused", message=message, at=now)
