"""The programs of ranks in the tests of the training core; each returns plain values."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.ranks.rank_worlds import COLLECTIVE_TIMEOUT_S, RecordingHooks
from torch import Tensor

from holdfast_workers.parallelize import (
    counted_transfers,
    pipeline,
    process_groups,
    replicate,
    shard,
)
from holdfast_workers.published.weight_set import MANIFEST
from holdfast_workers.recipes.lookup import resolve
from holdfast_workers.recipes.pretrain import PretrainRecipe
from holdfast_workers.spec import TrainingSpec
from holdfast_workers.state.digest import payload_digest
from holdfast_workers.training.recipe import GuardTripped, Recipe, World
from holdfast_workers.training.skipped_windows import Ledger
from holdfast_workers.training.step_loop import train
from holdfast_workers.worker.first_weights import initialize_with_weights

LOST = "a-rank-is-lost"
"""Name of a file that tells survivors of a loss that they may not notice."""


class Interrupted(Exception):
    """Raised by a test in the middle of a step."""


def make(cache_dir: Path, spec: TrainingSpec) -> PretrainRecipe:
    recipe = resolve(spec.recipe)(spec, cache_dir)
    assert isinstance(recipe, PretrainRecipe)
    recipe.prepare()
    return recipe


def begin(recipe: PretrainRecipe) -> None:
    """Bring the recipe to step 0: with the published weights of its spec, if it has some."""
    published = recipe.spec.model.published
    if published is None:
        recipe.initialize()
    else:
        initialize_with_weights(recipe, Path(published.uri, MANIFEST).read_bytes)


def join(port: int, world: World) -> None:
    process_groups.join(
        "127.0.0.1", port, world.attempt, world.rank, world.world_size, COLLECTIVE_TIMEOUT_S, "cpu"
    )


def started(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> PretrainRecipe:
    """The recipe of a rank that has joined its world, at step 0."""
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    begin(recipe)
    return recipe


def save(recipe: Recipe, folder: Path, world: World, step: int) -> str:
    payload = bytearray(b"\xff" * recipe.layout().payload_bytes)
    recipe.write_state(memoryview(payload), step)
    (folder / f"rank{world.rank}-step{step}").write_bytes(payload)
    return payload_digest(payload)


def load(recipe: Recipe, folder: Path, world: World, step: int) -> int:
    payload = (folder / f"rank{world.rank}-step{step}").read_bytes()
    return recipe.read_state(memoryview(payload))


def undisturbed(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    folder: Path | None = None,
    skipped: tuple[tuple[int, int], ...] = (),
) -> dict[str, Any]:
    """Train from step 0; with `folder`, write the state of every step to it. `skipped` is in the
    ledger from the start."""
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.guard_memory.set_ledger(Ledger(skipped))
    recipe.build(world)
    begin(recipe)
    hooks = RecordingHooks()
    if folder is not None:
        hooks.on_checkpoint = lambda step, _: save(recipe, folder, world, step)
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return {
        "rows": hooks.rows,
        "digests": hooks.digests,
        "phases": hooks.phases,
        "trips": hooks.trips,
        "ledger": recipe.guard_memory.ledger,
    }


def resumed(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, step: int
) -> dict[int, str]:
    """Continue from a written state, in a new process."""
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    start = load(recipe, folder, world, step)
    assert start == step == recipe.applied_step
    hooks = RecordingHooks()
    train(recipe, world, spec, hooks, start)
    process_groups.leave()
    return hooks.digests


def states(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> list[str]:
    """The digest of this rank's own state after every step."""
    recipe = started(port, cache_dir, world, spec)
    hooks = RecordingHooks()
    digests: list[str] = []
    hooks.on_checkpoint = lambda step, r: digests.append(r.state_digest(step))
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    return digests


def trained_parameters(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec
) -> dict[str, tuple[tuple[int, ...], tuple[slice, ...], Any]]:
    """This rank's piece of each parameter after the last step: the whole shape, where the piece is,
    and its values."""
    recipe = started(port, cache_dir, world, spec)
    train(recipe, world, spec, RecordingHooks(), 0)
    built = recipe._require_built()
    pieces = {
        name: (box.global_shape, box.slices(), local.detach().numpy().copy())
        for name, box, local in zip(built.names, built.boxes, built.locals, strict=True)
    }
    process_groups.leave()
    return pieces


def whole_bytes_during_accumulation(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec
) -> tuple[int, int]:
    """Bytes of parameters and of gradients that are whole on this rank while the second micro-batch
    begins."""
    recipe = started(port, cache_dir, world, spec)
    hooks, found = RecordingHooks(), []

    def look(name: str, step: int) -> None:
        if (name, step) == ("forward", 1) and hooks.phases.count((name, step)) == 2:
            found.append(_whole_bytes(recipe.model))

    hooks._on_phase = look
    train(recipe, world, spec, hooks, 0)
    process_groups.leave()
    (bytes_,) = found
    return bytes_


def _whole_bytes(model: torch.nn.Module) -> tuple[int, int]:
    parameters = gradients = 0
    for group in shard.parameter_groups(model):
        for parameter in group.fsdp_params:
            whole = parameter._unsharded_param
            parameters += whole.untyped_storage().size()
            for gradient in (whole.grad, parameter.unsharded_accumulated_grad):
                gradients += 0 if gradient is None else gradient.untyped_storage().size()
    return parameters, gradients


def undisturbed_per_block(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec
) -> dict[str, Any]:
    """As a large model: every block is a separate communication group, or each gradient."""
    _communicate_per_block()
    return undisturbed(port, cache_dir, world, spec)


def resumed_per_block(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path, step: int
) -> dict[int, str]:
    _communicate_per_block()
    return resumed(port, cache_dir, world, spec, folder, step)


def survivor_per_block(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    folder: Path,
    kill_at: tuple[str, int],
) -> dict[str, Any]:
    _communicate_per_block()
    return survivor(port, cache_dir, world, spec, folder, kill_at)


def _communicate_per_block() -> None:
    shard.SMALL_MODEL_BYTES = 0
    replicate.BUCKET_BYTES = 0


def poisoned(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, stop: int
) -> tuple[str, bool, int]:
    """One rank's gradient is not finite in step `stop`: the error, whether the state is unchanged,
    and the newest applied step."""

    def install(recipe: PretrainRecipe, is_due: Callable[[], bool]) -> None:
        def poison(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return output * float("nan") if is_due() and world.rank == 1 else None

        recipe.model.get_submodule("norm").register_forward_hook(poison)

    return _refused_step(port, cache_dir, world, spec, stop, install)


def poisoned_in_backward(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, stop: int
) -> tuple[str, bool, int]:
    """Like `poisoned`: the gradient of the embedding, which only the first stage has."""

    def install(recipe: PretrainRecipe, is_due: Callable[[], bool]) -> None:
        def poison(gradient: Tensor) -> Tensor | None:
            return gradient * float("nan") if is_due() else None

        if world.coordinate("pp") == 0:
            embedding = recipe.model.get_parameter("embedding.weight")
            embedding.register_hook(poison)  # type: ignore[no-untyped-call]

    return _refused_step(port, cache_dir, world, spec, stop, install)


def _refused_step(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    stop: int,
    install: Callable[[PretrainRecipe, Callable[[], bool]], None],
) -> tuple[str, bool, int]:
    """Train until a guard refuses step `stop`. `install` gets whether that step is computed."""
    recipe = started(port, cache_dir, world, spec)
    before = [recipe.state_digest(0)]
    hooks = RecordingHooks()
    hooks.on_checkpoint = lambda step, r: before.append(r.state_digest(step))
    install(recipe, lambda: len(before) == stop)
    try:
        train(recipe, world, spec, hooks, 0)
    except GuardTripped as error:
        recipe.abandon_step()
        process_groups.leave()
        unchanged = recipe.state_digest(stop - 1) == before[stop - 1]
        return str(error), unchanged, recipe.applied_step
    raise AssertionError("the step was applied")


class _Sleep(torch.autograd.Function):
    """The same tensor; its backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def sleeping_pipeline(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, sleep_s: float
) -> float:
    """The least time in s of a pipeline's passes, of three, if each block sleeps for `sleep_s` in
    its forward pass, for its input's gradient and for its weights'."""
    recipe = started(port, cache_dir, world, spec)

    def forward(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        time.sleep(sleep_s)
        weight = _Sleep.apply(block.attention_norm.weight, sleep_s)  # type: ignore[no-untyped-call]
        slept: Tensor = _Sleep.apply(x, sleep_s)  # type: ignore[no-untyped-call]
        scaled: Tensor = slept * weight
        return scaled

    for block in recipe.model.blocks.values():
        block.forward = partial(forward, block)
    batches = [recipe._read(1, index) for index in range(recipe._micro_batches())]
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        recipe._run_pipeline(batches, lambda name, micro_batch, stage: None)
        dist.barrier()
        times.append(time.perf_counter() - began)
    process_groups.leave()
    return min(times)


def digests_both_ways(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, folder: Path
) -> tuple[str, str]:
    recipe = started(port, cache_dir, world, spec)
    train(recipe, world, spec, RecordingHooks(), 0)
    filled = save(recipe, folder, world, spec.train.last_step)
    process_groups.leave()
    return filled, recipe.state_digest(spec.train.last_step)


def rebound(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, stop: int, rebuild: bool
) -> dict[str, Any]:
    """Leave the groups after step `stop`, join those of a new attempt, and continue.

    `rebuild` makes the private torch functions fail, so that the model is rebuilt instead.
    """
    recipe = started(port, cache_dir, world, spec)

    def interrupt(name: str, step: int) -> None:
        if (name, step) == ("agree", stop + 1) and hooks.phases.count((name, step)) == 1:
            raise Interrupted

    hooks = RecordingHooks(interrupt)
    kept = bytearray(recipe.layout().payload_bytes)
    hooks.on_checkpoint = lambda step, r: r.write_state(memoryview(kept), step)
    with contextlib.suppress(Interrupted):
        train(recipe, world, spec, hooks, 0)
    recipe.abandon_step()
    living = recipe.state_digest(stop) == payload_digest(kept)
    identities = _identities(recipe)
    process_groups.leave()
    again = World(world.rank, world.world_size, world.mesh, world.attempt + 1000, world.device)
    join(port, again)
    if rebuild:
        shard._mesh_infos = _raise_attribute_error
    recipe.rebind(again)
    if rebuild:
        recipe.read_state(memoryview(kept))
    hooks.rows.clear()
    train(recipe, again, spec, hooks, stop)
    process_groups.leave()
    return {
        "digests": hooks.digests,
        "living": living,
        "same_tensors": identities == _identities(recipe),
    }


def waits_for_absent_peer(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec
) -> list[float]:
    """How long a collective of the tensor axis waits for an absent peer: on the groups that the
    model was built on, and on those that it was rebound to."""
    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    waited = [_waits_for_a_peer(recipe, world)]
    process_groups.leave()
    again = World(world.rank, world.world_size, world.mesh, world.attempt + 1000, world.device)
    join(port, again)
    recipe.rebind(again)
    waited.append(_waits_for_a_peer(recipe, again))
    process_groups.leave()
    return waited


def interrupted_in_backward(
    port: int, cache_dir: Path, world: World, spec: TrainingSpec, stop: int, per_block: bool
) -> dict[int, str]:
    """An exception during the backward pass of a step's last micro-batch; then the step again."""
    if per_block:
        _communicate_per_block()
    recipe = started(port, cache_dir, world, spec)
    hooks = RecordingHooks()
    kept = bytearray(recipe.layout().payload_bytes)
    hooks.on_checkpoint = lambda step, r: r.write_state(memoryview(kept), step)
    armed = [True]

    def raise_once(gradient: Tensor) -> None:
        if armed[0] and hooks.phases.count(("backward", stop)) == 2:
            armed[0] = False
            raise Interrupted

    def watch_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(raise_once)  # type: ignore[no-untyped-call]

    recipe.model.blocks["0"].register_forward_hook(watch_gradient)
    try:
        train(recipe, world, spec, hooks, 0)
    except Interrupted:
        recipe.abandon_step()
    assert not armed[0]
    train(recipe, world, spec, hooks, recipe.read_state(memoryview(kept)))
    process_groups.leave()
    return hooks.digests


def survivor(
    port: int,
    cache_dir: Path,
    world: World,
    spec: TrainingSpec,
    folder: Path,
    kill_at: tuple[str, int],
) -> dict[str, Any]:
    """Train; the highest rank kills itself at `kill_at`; the others continue in the next attempt.
    Once the file `LOST` is in `folder`, they cut their connections, as their agents would."""
    before = process_groups.open_sockets()
    recipe = started(port, cache_dir, world, spec)
    sockets = process_groups.open_sockets() - before
    watcher = threading.Thread(
        target=_disconnect_after_loss, args=(folder / LOST, sockets), daemon=True
    )
    watcher.start()
    victim = world.rank == world.world_size - 1

    def die(name: str, step: int) -> None:
        if victim and (name, step) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks = RecordingHooks(die)
    hooks.on_checkpoint = lambda step, _: save(recipe, folder, world, step)
    if victim and kill_at[0] == "exchange":
        _die_in_an_exchange(hooks, kill_at[1])
    if victim and kill_at[0] == "in backward":
        _die_in_a_backward_pass(recipe, hooks, kill_at[1])
    if victim and kill_at[0] == "sum":
        _die_in_a_sum(hooks, kill_at[1])
    identities = _identities(recipe)
    again = rejoined(port, recipe, world, sockets, lambda: train(recipe, world, spec, hooks, 0))
    start = load(recipe, folder, world, kill_at[1] - 1)
    train(recipe, again, spec, hooks, start)
    process_groups.leave()
    return {
        "digests": hooks.digests,
        "pid": os.getpid(),
        "same_tensors": identities == _identities(recipe),
    }


def rejoined(
    port: int,
    recipe: Recipe,
    world: World,
    sockets: frozenset[process_groups.OpenSocket],
    run: Callable[[], object],
) -> World:
    """`run` until a peer is lost, and bind the living recipe to the next attempt, which is
    returned. `sockets`: of this attempt."""
    failure = None
    try:
        run()
    except Exception as error:
        failure = error
    assert failure is not None and process_groups.is_communication_error(failure), repr(failure)
    _await_other_survivors(port, world)
    process_groups.disconnect(sockets)
    recipe.abandon_step()
    process_groups.leave()
    again = World(world.rank, world.world_size, world.mesh, world.attempt + 1000, world.device)
    join(port, again)
    recipe.rebind(again)
    return again


def _await_other_survivors(port: int, world: World) -> None:
    """Return once all survivors have noticed that a peer is lost, or after a while: gloo forgets a
    send to a peer that has closed its side. An agent would kill the sender, see
    `docs/architecture/design-differences.md`."""
    store, key = dist.TCPStore("127.0.0.1", port, is_master=False), f"lost/{world.attempt}"
    noticed, until = store.add(key, 1), time.monotonic() + 5
    while noticed < world.world_size - 1 and time.monotonic() < until:
        time.sleep(0.01)
        noticed = store.add(key, 0)


def _disconnect_after_loss(notice: Path, sockets: frozenset[process_groups.OpenSocket]) -> None:
    while not notice.exists():
        time.sleep(0.02)
    process_groups.disconnect(sockets & process_groups.open_sockets())


def _die_in_an_exchange(hooks: RecordingHooks, step: int) -> None:
    """End this process when it sends to another stage in `step`."""
    original = counted_transfers.counted

    def die(op: dist.P2POp, link: str) -> dist.P2POp:
        if hooks.phases[-1][1] == step and op.op is dist.isend:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(op, link)

    setattr(pipeline, "counted", die)  # noqa: B010


def _die_in_a_backward_pass(recipe: PretrainRecipe, hooks: RecordingHooks, step: int) -> None:
    """Kill this rank once the gradients of all blocks but the first are computed."""

    def die(gradient: Tensor) -> None:
        if hooks.phases[-1] == ("backward", step):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(die)  # type: ignore[no-untyped-call]

    recipe.model.blocks["0"].register_forward_hook(watch_gradient)


def _die_in_a_sum(hooks: RecordingHooks, step: int) -> None:
    """End this process in the backward pass of `step`, when it would sum the third bucket."""
    original, calls = dist.all_reduce, []

    def die(*args: Any, **kwargs: Any) -> Any:
        if hooks.phases[-1] == ("backward", step):
            calls.append(step)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(dist, "all_reduce", die)  # noqa: B010


def _waits_for_a_peer(recipe: PretrainRecipe, world: World) -> float:
    mesh, waited_s = recipe._require_built().mesh, 0.0
    assert mesh is not None
    if world.coordinate("tp") == 0:
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        waited_s = time.monotonic() - began
    dist.barrier()  # the absent peer keeps its connections open until then
    return waited_s


def _identities(recipe: PretrainRecipe) -> list[int]:
    return [id(parameter) for parameter in recipe.model.parameters()]


def _raise_attribute_error(model: torch.nn.Module) -> list[Any]:
    del model
    raise AttributeError("gone")


def sends_at_once(port: int, cache_dir: Path, world: World, spec: TrainingSpec) -> int:
    """The most transfers that a rank has begun and not waited for in its evaluations."""
    begun, most = 0, 0
    whole = dist.batch_isend_irecv

    class Awaited:
        def __init__(self, work: dist.Work) -> None:
            self._work = work

        def wait(self) -> None:
            nonlocal begun
            self._work.wait()
            begun -= 1

    def counting(ops: list[dist.P2POp]) -> list[Any]:
        nonlocal begun, most
        begun += 1
        most = max(most, begun)
        return [Awaited(work) for work in whole(ops)]

    join(port, world)
    recipe = make(cache_dir, spec)
    recipe.build(world)
    recipe.initialize()
    with mock.patch.object(dist, "batch_isend_irecv", counting):
        recipe.evaluate(1, lambda name, step, micro_batch=0: None)
    process_groups.leave()
    return most
