"""Prepares small sources in this process, as tasks on a cluster do, and reads what was made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.faults.faulty_storage import Bucket, MemoryStorage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from holdfast_workers.checkpoint.storage import Storage
from holdfast_workers.data.token_set import ShardFacts, TokenSet, read_shard
from holdfast_workers.protocol.processes import StorageOptions
from holdfast_workers.spec.train import DataSpec, SourceSpec
from holdfast_workers.token_sets.plan import PART_BYTES, PreparePlan, plan_parts
from holdfast_workers.token_sets.prepare import finish, finished_parts, make_part, ready_set
from holdfast_workers.token_sets.source_files import list_source
from holdfast_workers.token_sets.tokenizer_file import Encoder, TokenizerFile, read_tokenizer

END = "<|end|>"
SAMPLE = [f"the {word} of a small corpus, naïve café ☃ {word * 2}" for word in "abcdefgh"]


def train_tokenizer(folder: Path) -> Path:
    """A BPE tokenizer of bytes, which encodes any text without loss; returns its file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder / "tokenizer.json"


@dataclass
class Preparation:
    """A source that is prepared; `storage` is a bucket in memory unless given."""

    scratch: Path
    source: SourceSpec
    data: DataSpec = field(default_factory=DataSpec)
    options: StorageOptions = field(default_factory=StorageOptions)
    part_bytes: int = PART_BYTES
    storage: Storage = field(default_factory=lambda: MemoryStorage(Bucket()))
    progress: list[int] = field(default_factory=list)

    def plan(self) -> tuple[PreparePlan, TokenizerFile]:
        tokenizer = read_tokenizer(self.data)
        files = list_source(self.source, self.options)
        plan = plan_parts(self.source, files, tokenizer.facts, self.data, self.part_bytes)
        return plan, tokenizer

    def run(self) -> TokenSet:
        """Go on where an earlier preparation stopped, or begin."""
        return self.carry_out(*self.plan())

    def carry_out(self, plan: PreparePlan, tokenizer: TokenizerFile) -> TokenSet:
        folder = self.storage.below(plan.key)
        if (made := ready_set(folder)) is not None:
            return made
        results = finished_parts(plan, folder)
        for part in reversed(plan.parts):  # tasks end in any order
            if part.index not in results:
                results[part.index] = make_part(
                    plan,
                    part,
                    tokenizer,
                    folder,
                    self.options,
                    self.scratch,
                    self.progress.append,
                )
        return finish(plan, results, folder)

    def documents(self, made: TokenSet, shards: Sequence[ShardFacts] | None = None) -> list[str]:
        """The texts of these shards, or of all that are trained on, in order; each must be followed
        by one document end."""
        plan, tokenizer = self.plan()
        encoder, folder = Encoder(tokenizer), self.storage.below(plan.key)
        found = []
        for shard in made.shards if shards is None else shards:
            content = read_shard(folder.read(shard.object_name), shard.object_name)
            begin = 0
            for end in map(int, content.ends):
                document = content.tokens[begin : end - 1]
                assert content.tokens[end - 1] == tokenizer.facts.document_end
                assert tokenizer.facts.document_end not in document
                found.append(encoder.decode(document))
                begin = end
            assert begin == len(content.tokens) == shard.tokens
        return found


def as_lines(texts: Iterable[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in texts)
