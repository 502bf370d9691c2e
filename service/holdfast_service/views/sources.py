"""What a job has read of the sources in its spec, of stored records. Pure.

Apart from the models, which the client loads too: it needs no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from holdfast_service.views.jobs import DataReadView, SourceReadView
from holdfast_workers.data.mixture import Mixture
from holdfast_workers.spec import DataSpec, TrainingSpec
from holdfast_workers.training.skipped_windows import Ledger


def data_read(
    stored: Mapping[str, Any], step: int, skipped: Sequence[Sequence[int]] = ()
) -> DataReadView | None:
    """Of a stored spec, after `step`, without the skipped windows. None: the job has no sources, or
    its spec is of another version."""
    if not (stored.get("data") or {}).get("sources"):
        return None
    known = {name: stored[name] for name in ("data", "model", "train") if name in stored}
    try:
        spec = TrainingSpec.model_validate(known)
    except ValidationError:
        return None
    data = spec.data
    if not data.prepared:
        bare = (SourceReadView(path=each.path, weight=each.weight) for each in data.sources)
        return DataReadView(tokenizer=data.tokenizer, sources=tuple(bare))
    epochs = epochs_read(spec, step, Ledger.of(skipped))
    return DataReadView(
        tokenizer=_tokenizer_text(data),
        sources=tuple(
            SourceReadView(
                path=source.path,
                weight=source.weight,
                tokens=made.tokens,
                tokens_seen=round(read * made.tokens),
                epochs=read,
            )
            for source, made, read in zip(data.sources, data.prepared, epochs, strict=True)
        ),
    )


def epochs_read(spec: TrainingSpec, step: int, ledger: Ledger) -> tuple[float, ...]:
    """How often the steps up to `step` have read each source of a spec with token sets. Exact but
    for a token set whose samples were counted for another `sequence_length`; and with weights, but
    for some samples per window that another job skipped before the checkpoint of `init_from`: the
    windows are in the state only, and in their place as many others were read."""
    length = spec.model.sequence_length
    sizes = [
        each.samples
        if each.samples is not None and each.sequence_length == length
        else -(-each.tokens // length)
        for each in spec.data.prepared
    ]
    weights = [source.weight for source in spec.data.sources if source.weight is not None]
    counts = _samples_read(Mixture(weights or [1.0]), spec.train.global_batch, step, ledger)
    if not weights:
        return (counts[0] / sum(sizes),) * len(sizes)
    return tuple(count / size for count, size in zip(counts, sizes, strict=True))


def _samples_read(mixture: Mixture, global_batch: int, step: int, ledger: Ledger) -> list[int]:
    """The samples of each pool that were read, which are not those of skipped windows."""

    def before(window: int) -> list[int]:
        return mixture.counts(window * global_batch)

    read = before(ledger.window(step) + 1)
    for start, end in ledger.passed(step).ranges:
        skipped = zip(before(start), before(end), strict=True)
        read = [count - (last - first) for count, (first, last) in zip(read, skipped, strict=True)]
    return read


def _tokenizer_text(data: DataSpec) -> str:
    digest = data.prepared[0].tokenizer
    parts = [f"{data.tokenizer}, {data.vocabulary:,} tokens"]
    parts += [f"digest {digest}"] if digest else []
    parts += [
        f"{role} {special.id}" if special.token is None else f"{role} {special.token} {special.id}"
        for role, special in data.special_tokens.items()
    ]
    return ", ".join(parts)
