"""Makes the parts of a token set, and the set of its parts.

A part may be made repeatedly, by several processes at once, and its maker may die at any moment:
its shards are named by their content, and its record is written after them. A set without a
manifest does not exist; the manifest is written after all parts.

Memory of `make_part`, beside the libraries themselves: four times a shard (32 MB; twice that if a
share of the documents is held out) or the longest
document's tokens, 100 to 220 times 1 MB of text or the longest document (16 MB at most) while it is
encoded, one batch of a file's records, and for a bucket the parts that its options keep in flight.
A document of 16 MB took 2.0 GB with 3.5 bytes to a token, and 3.5 GB with 1.05. Disk: one object of
Parquet or Arrow at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash

from holdfast_workers.checkpoint.storage import (
    ObjectExists,
    ObjectMissing,
    Storage,
    joined,
    write_small,
)
from holdfast_workers.data.token_set import MANIFEST, BadRecord, BadTokenSet, Tokens, TokenSet
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import BYTES
from holdfast_workers.token_sets.documents import RecordBatch, Unusable
from holdfast_workers.token_sets.part_results import FOLDER, PartResult, object_name
from holdfast_workers.token_sets.piece_records import PieceRecords
from holdfast_workers.token_sets.plan import SHARD_BYTES, Part, Piece, PreparePlan
from holdfast_workers.token_sets.refusals import DataRefused, SourceChanged
from holdfast_workers.token_sets.shard_writer import ShardWriter
from holdfast_workers.token_sets.source_access import SourceAccess
from holdfast_workers.token_sets.tokenizer_file import Encoder, TokenizerFile

MOST_NAMED = 20
"""Unusable records that are named, of a part and of a set."""
_DIGESTS = 1 << 64
"""Number of the possible digests of a document."""
HOPELESS_RECORDS = 1000
"""A file is refused if so many of its first records are all unusable."""


def make_part(
    plan: PreparePlan,
    part: Part,
    tokenizer: TokenizerFile,
    set_storage: Storage,
    options: StorageOptions,
    scratch: Path,
    on_progress: Callable[[int], None],
) -> PartResult:
    """Write the part's shards, then its record. `options`: of the source's bucket; `on_progress`
    takes bytes of the source that were read since its last call.

    Raises DataRefused (a file that is unusable as a whole), SourceChanged, and errors of the
    storages.
    """
    maker = _PartMaker(plan, tokenizer, set_storage, SourceAccess(options, scratch))
    for piece in part.pieces:
        done = 0
        for reached in maker.take(piece):
            on_progress(reached - done)
            done = reached
        on_progress(piece.nbytes - done)
    result = maker.result(part)
    write_small(set_storage, object_name(part.index), result.encode(plan.key))
    return result


def finished_parts(plan: PreparePlan, set_storage: Storage) -> dict[int, PartResult]:
    """The parts that an earlier preparation has made, by index; damaged ones are left out."""
    objects = set_storage.objects()
    found = {}
    for part in plan.parts:
        if object_name(part.index) not in objects:
            continue
        try:
            result = PartResult.decode(set_storage.read(object_name(part.index)), plan.key)
        except (BadTokenSet, ObjectMissing):
            continue
        shards = result.shards + result.held_out
        complete = all(objects.get(shard.object_name) == shard.nbytes for shard in shards)
        if complete and result.index == part.index:
            found[part.index] = result
    return found


def finish(plan: PreparePlan, results: Mapping[int, PartResult], set_storage: Storage) -> TokenSet:
    """The token set of all parts, whose manifest is durable on return; removes the parts' records.

    Raises DataRefused with too many unusable records, or without a usable one.
    """
    if set(results) != {part.index for part in plan.parts}:
        raise ValueError(f"{len(results)} results are not those of {len(plan.parts)} parts")
    in_order = [results[part.index] for part in plan.parts]
    made = TokenSet(
        source=plan.source.path,
        text=plan.text,
        tokenizer=plan.tokenizer,
        shards=tuple(shard for result in in_order for shard in result.shards),
        files=plan.files,
        source_bytes=plan.source_bytes,
        bad_count=sum(result.bad_count for result in in_order),
        bad=tuple(record for result in in_order for record in result.bad)[:MOST_NAMED],
        held_out=tuple(shard for result in in_order for shard in result.held_out),
    )
    check_share(made, plan.bad_records)
    try:
        set_storage.put_new(MANIFEST, made.encode())
    except ObjectExists:
        made = read_set(set_storage, made.digest)
    set_storage.below(FOLDER).delete_all()
    return made


def ready_set(set_storage: Storage) -> TokenSet | None:
    """The set of a folder if all its shards are there. Otherwise None, and its manifest is gone:
    the parts, made again, bring the same shards."""
    try:
        made = read_set(set_storage, None)
    except ObjectMissing:
        return None
    except BadTokenSet:
        complete = False
    else:
        objects = set_storage.objects()
        complete = all(objects.get(shard.object_name) == shard.nbytes for shard in made.all_shards)
    if complete:
        return made
    set_storage.delete(MANIFEST)
    return None


def read_set(set_storage: Storage, digest: str | None) -> TokenSet:
    """The set of a folder. Raises ObjectMissing without a manifest, and BadTokenSet if it is
    damaged or has another digest."""
    where = joined(set_storage.uri, MANIFEST)
    found = TokenSet.decode(set_storage.read(MANIFEST), where)
    if digest is not None and found.digest != digest:
        raise BadTokenSet(
            f"{where} is of the token set {found.digest}, not {digest}: prepare the data again"
        )
    return found


def check_share(made: TokenSet, share: float) -> None:
    """Raises DataRefused, whose caller names the source, if more than this share of the set's
    records was unusable, or all."""
    held_out = sum(shard.documents for shard in made.held_out)
    records = made.documents + held_out + made.bad_count
    first = "; ".join(f"{each.file}, row {each.row:,}: {each.why}" for each in made.bad[:3])
    if made.bad_count > share * records:
        are = "is" if made.bad_count == 1 else "are"
        raise DataRefused(
            f"{made.bad_count:,} of {records:,} record{'' if records == 1 else 's'} {are} "
            f"unusable, more than the share data.bad_records = {share:g}; the first: {first}. "
            "Correct the files, or `text` of the source, or raise data.bad_records"
        )
    if not made.documents and held_out:
        raise DataRefused(
            "data.validation.share keeps all of its documents from training: lower it, or name "
            "the files of validation by data.validation.path"
        )
    if not made.documents:
        raise DataRefused("it has no document: check its files")


class _PartMaker:
    def __init__(
        self,
        plan: PreparePlan,
        tokenizer: TokenizerFile,
        set_storage: Storage,
        access: SourceAccess,
    ) -> None:
        if tokenizer.facts != plan.tokenizer:
            raise SourceChanged(
                f"data.tokenizer {tokenizer.facts.name} is not the one with which the preparation "
                "began: start again"
            )
        self._column = plan.source.text
        self._end = plan.tokenizer.document_end
        self._nul_ends = plan.tokenizer.name == BYTES
        self._access = access
        self._encoder = Encoder(tokenizer)
        end = self._encoder.decode([self._end])
        self._ended_inside = f"its text contains the document end {end!r}: remove it from the text"
        self._shards = ShardWriter(set_storage, plan.tokenizer, SHARD_BYTES)
        self._held_out = ShardWriter(set_storage, plan.tokenizer, SHARD_BYTES)
        self._held_out_below = int(plan.held_out_share * _DIGESTS)
        self._records = 0
        self._bad_count = 0
        self._bad: list[BadRecord] = []

    def take(self, piece: Piece) -> Iterator[int]:
        """Turn the records of a piece into tokens; yields the bytes of it that are read."""
        self._access.check_unchanged(piece.file)
        try:
            yield from self._take(piece)
        except DataRefused:
            self._access.check_unchanged(piece.file)  # else the change is what is wrong
            raise
        self._access.check_unchanged(piece.file)

    def result(self, part: Part) -> PartResult:
        return PartResult(
            part.index,
            self._shards.close(),
            self._records,
            self._bad_count,
            tuple(self._bad),
            part.nbytes,
            self._held_out.close(),
        )

    def _take(self, piece: Piece) -> Iterator[int]:
        reader = PieceRecords(self._access, piece, self._column, nul_ends=self._nul_ends)
        usable = unusable = 0
        for batch, reached in reader.batches():
            lost = sorted([*batch.unusable, *self._encode(batch)])
            usable += len(batch.documents) + len(batch.unusable) - len(lost)
            unusable += len(lost)
            self._records += len(batch.documents) + len(batch.unusable)
            self._name(reader, piece, lost)
            if not usable and unusable >= HOPELESS_RECORDS:
                row, why = lost[0]
                raise DataRefused(
                    f"{piece.file.name}: none of {unusable:,} records is usable, such as row "
                    f"{reader.row_in_file(row):,}: {why}: correct the file or `text` of the "
                    "source, or leave the file out"
                )
            yield reached

    def _encode(self, batch: RecordBatch) -> Iterator[Unusable]:
        """Write the documents; yields those without tokens, or with an end inside."""
        texts = [document.text for document in batch.documents]
        for document, ids in zip(batch.documents, self._encoder.encode(texts), strict=True):
            if why := self._encoder.why_lost(document.text):
                yield Unusable(document.row, why)
            elif not len(ids):
                yield Unusable(document.row, "the tokenizer makes no token of its text")
            elif not self._nul_ends and bool((ids == self._end).any()):
                yield Unusable(document.row, self._ended_inside)
            else:
                (self._held_out if self._is_held_out(ids) else self._shards).add(ids)

    def _is_held_out(self, ids: Tokens) -> bool:
        """By its tokens alone: so equal documents go together, whatever part has them."""
        below = self._held_out_below
        return bool(below) and xxhash.xxh3_64_intdigest(ids.tobytes()) < below

    def _name(self, reader: PieceRecords, piece: Piece, lost: list[Unusable]) -> None:
        self._bad_count += len(lost)
        for row, why in lost[: MOST_NAMED - len(self._bad)]:
            self._bad.append(BadRecord(piece.file.name, reader.row_in_file(row), why))
