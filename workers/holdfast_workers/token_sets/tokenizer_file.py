"""Tokenizers: the file `tokenizer.json`, the facts that tokens depend on, and the encoding.

Also `bytes`, whose tokens are the bytes of the text and which needs no file. Text is encoded as it
is: no special tokens are added, and nothing is cut, padded or left to chance (the dropout of BPE),
even if the file asks for it. Another version of the library may make other tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_workers.data.token_set import TokenizerFacts, Tokens, shard_digest
from holdfast_workers.published.kept_tokenizer import KEPT_BESIDE, TOKENIZER
from holdfast_workers.spec.train import (
    BYTE_VOCABULARY,
    BYTES,
    DataSpec,
    SpecialRole,
    SpecialTokenSpec,
)
from holdfast_workers.token_sets.refusals import (
    DataRefused,
    LibraryMissing,
    library,
    shortened,
    unreadable,
)

FILE = TOKENIZER
CONFIG = "tokenizer_config.json"
MOST_FILE_BYTES = 1 << 28
_BATCH_BYTES = 1 << 20
"""Text that is encoded at once; the encoding takes 100 to 220 times as much memory."""
_BYTES_END = 0
_ROLES: tuple[SpecialRole, ...] = ("bos", "eos", "pad", "unk")
_MOST_TOKEN = 4096
"""Characters of a special token, as of a `Reference`."""
_RARE = "ö世✓🙂"
_REMEDY = (
    "give it an unk_token, or tokens for all bytes: <0x00> to <0xFF> with byte_fallback, or those "
    "of ByteLevel (initial_alphabet=pre_tokenizers.ByteLevel.alphabet())"
)
_BYTES_IN_USE = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
"""Those that UTF-8 has."""


@dataclass(frozen=True)
class TokenizerFile:
    facts: TokenizerFacts
    content: bytes
    """Of the `tokenizer.json`; b"" for `bytes`."""
    special_tokens: dict[SpecialRole, SpecialTokenSpec] = field(default_factory=dict)
    """The end of documents, and those that the configuration beside the file names."""
    lost_bytes: frozenset[int] = frozenset()
    """Bytes of UTF-8 that have no token, which the library leaves out of a text silently."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """The other files of the tokenizer in its folder, by name."""

    @property
    def files(self) -> dict[str, bytes]:
        """All files of the tokenizer, by name; {} for `bytes`."""
        return {FILE: self.content, **self.beside} if self.content else {}


def read_tokenizer(data: DataSpec) -> TokenizerFile:
    """The tokenizer of `data`, read on this node and tried. Raises DataRefused, and
    TransientStorageError."""
    if data.tokenizer == BYTES:
        if data.document_end is not None:
            raise DataRefused(
                f"data.document_end {data.document_end!r}: the tokenizer `bytes` ends documents "
                "with a zero byte: leave document_end out"
            )
        digest = shard_digest(BYTES.encode())
        facts = TokenizerFacts(BYTES, digest, BYTE_VOCABULARY, _BYTES_END)
        return TokenizerFile(facts, b"", {"document_end": SpecialTokenSpec(id=_BYTES_END)})
    path = _file_of(data.tokenizer)
    content = _read(path)
    loaded = _loaded(content, str(path))
    vocabulary: dict[str, int] = loaded.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataRefused(f"{path} has no tokens: name the tokenizer of a published model")
    end = data.document_end
    if end is None:
        end = _end_in_config(path.with_name(CONFIG))
    if not _is_storable(end):
        raise DataRefused(
            f"{path}: the token {end[:40]!r} that ends documents has a control character or over "
            f"{_MOST_TOKEN:,} characters: set data.document_end to another token"
        )
    if end not in vocabulary:
        raise DataRefused(
            f"{path} has no token {end!r} to end documents: set data.document_end to one of its "
            "tokens, such as <|endoftext|> or </s>"
        )
    lost_bytes = _lost_bytes(path, loaded)
    facts = TokenizerFacts(
        name=data.tokenizer,
        digest=shard_digest(content),
        vocabulary=max(vocabulary.values()) + 1,
        document_end=vocabulary[end],
        library=_version(),
    )
    named = {"document_end": end, **_named_in_config(path.with_name(CONFIG))}
    special = {
        role: SpecialTokenSpec(id=vocabulary[token], token=token)
        for role, token in named.items()
        if token in vocabulary and _is_storable(token)
    }
    return TokenizerFile(facts, content, special, lost_bytes, _beside(path))


class Encoder:
    """Turns documents into token ids. Uses one thread of the process; keeps 100 to 220 times the
    memory of 1 MB of text, or of the longest document, while it encodes."""

    def __init__(self, tokenizer: TokenizerFile) -> None:
        """Raises DataRefused; LibraryMissing with another version of the library than that of
        the facts."""
        self._facts = tokenizer.facts
        self._lost = tokenizer.lost_bytes
        self._tokenizer: Any = None
        if tokenizer.content:
            if (version := _version()) != self._facts.library:
                raise LibraryMissing(
                    f"this node has tokenizers {version}, and the preparation began with "
                    f"{self._facts.library}: install the same version on all nodes"
                )
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library reads it at each call
            self._tokenizer = _loaded(tokenizer.content, tokenizer.facts.name)

    def why_lost(self, text: str) -> str:
        """Why a part of the text would be left out silently; "": all of it becomes tokens."""
        if not self._lost or self._lost.isdisjoint(text.encode()):
            return ""
        sign, byte = next((sign, b) for sign in text for b in sign.encode() if b in self._lost)
        return f"the tokenizer has no token for the byte 0x{byte:02X} of {sign!r}: {_REMEDY}"

    def encode(self, texts: Sequence[str]) -> Iterator[Tokens]:
        """The ids of each text in turn, without a document's end. Raises DataRefused."""
        if self._tokenizer is None:
            for text in texts:
                yield as_tokens(np.frombuffer(text.encode(), np.uint8), self._facts)
            return
        for batch in _batches(texts):
            for ids in self._ids(batch):
                yield self._checked(ids)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of ids, special tokens included. Raises DataRefused."""
        if self._tokenizer is None:
            return bytes(int(token) for token in ids).decode(errors="replace")
        numbers = [int(token) for token in ids]
        with _broken_tokenizer(f"data.tokenizer {self._facts.name}: it cannot decode its ids"):
            return str(self._tokenizer.decode(numbers, skip_special_tokens=False))

    def _ids(self, batch: list[str]) -> list[list[int]]:
        # The faster call leaves out the positions in the text; older versions lack it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        begins = f"it cannot encode a text that begins with {batch[0][:40]!r}"
        with _broken_tokenizer(f"data.tokenizer {self._facts.name}: {begins}"):
            return [each.ids for each in encode(batch, add_special_tokens=False)]

    def _checked(self, ids: list[int]) -> Tokens:
        tokens = np.array(ids, np.int64)
        if len(tokens) and int(tokens.max()) >= self._facts.vocabulary:
            raise DataRefused(
                f"data.tokenizer {self._facts.name}: it makes the id {tokens.max()}, and its "
                f"vocabulary has {self._facts.vocabulary}: the file is damaged, load it again"
            )
        return as_tokens(tokens, self._facts)


def as_tokens(ids: NDArray[Any], tokenizer: TokenizerFacts) -> Tokens:
    """Ids in the type that the tokenizer's vocabulary allows."""
    if tokenizer.token_bytes == 2:
        return ids.astype(np.uint16, copy=False)
    return ids.astype(np.uint32, copy=False)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _file_of(name: str) -> Path:
    path = Path(name)
    if not path.is_absolute():
        raise DataRefused(
            f"data.tokenizer {name!r}: write `bytes`, or an absolute path of a {FILE} or of its "
            "folder, which every node can read"
        )
    try:
        if path.is_dir():
            path /= FILE
        if path.is_file():
            return path
    except OSError as error:
        raise unreadable(f"data.tokenizer {path}", error) from error
    raise DataRefused(
        f"data.tokenizer {path} does not exist on this node: name a {FILE}, which "
        "`save_pretrained` of a fast tokenizer writes"
    )


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise DataRefused(f"{path} has over {MOST_FILE_BYTES} bytes: name a {FILE}")
        return path.read_bytes()
    except OSError as error:
        raise unreadable(str(path), error) from error


def _beside(path: Path) -> dict[str, bytes]:
    """The files that belong to the tokenizer at `path`. Raises DataRefused, and
    TransientStorageError."""
    places = (path.with_name(name) for name in KEPT_BESIDE)
    try:
        return {place.name: _read(place) for place in places if place.is_file()}
    except OSError as error:
        raise unreadable(str(path), error) from error


def _version() -> str:
    return str(library("tokenizers").__version__)


def _loaded(content: bytes, name: str) -> Any:
    tokenizers = library("tokenizers")
    with _broken_tokenizer(f"{name} is no {FILE} of the library `tokenizers`"):
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        return tokenizer


@contextlib.contextmanager
def _broken_tokenizer(what: str) -> Iterator[None]:
    """The library raises nothing more precise than Exception, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataRefused(
            f"{what} ({shortened(error)}): write it again, with `save_pretrained` of a fast "
            "tokenizer, and try it by itself"
        ) from error


def _lost_bytes(path: Path, tokenizer: Any) -> frozenset[int]:
    """The bytes that the tokenizer leaves out of a text, silently. Raises DataRefused if it has no
    tokens for bytes at all, and leaves out characters instead."""
    lost = _bytes_without_token(json.loads(tokenizer.to_str()))
    if lost is None:
        raise DataRefused(
            f"{path} has neither an unknown token nor tokens for single bytes: it would leave text "
            f"out silently: {_REMEDY}"
        )
    for sign in _RARE:
        if lost & set(sign.encode()):
            continue
        with _broken_tokenizer(f"{path}: it cannot encode {sign!r}"):
            ids = tokenizer.encode(sign, add_special_tokens=False).ids
        if not ids:
            raise DataRefused(
                f"{path} makes no token of {sign!r}: its normalizer or pre_tokenizer would leave "
                "such text out silently: remove the rule that does so"
            )
    return lost


def _bytes_without_token(parts: Mapping[str, Any]) -> frozenset[int] | None:
    """The bytes of UTF-8 that have no token, and are left out of a text silently; None: all bytes
    of characters without a token. `parts`: of the file.

    Only the model BPE does so, unless it has an unknown token. The other models have one, or raise.
    """
    model = parts["model"]
    if model["type"] != "BPE" or model["unk_token"] is not None:
        return frozenset()
    ways = []
    if model["byte_fallback"]:
        ways.append({f"<0x{byte:02X}>": byte for byte in _BYTES_IN_USE})
    if '"type": "ByteLevel"' in json.dumps([parts["normalizer"], parts["pre_tokenizer"]]):
        ways.append(_byte_level_tokens(model))
    found = model["vocab"]
    missing = (frozenset(way[token] for token in way if token not in found) for way in ways)
    return min(missing, key=len, default=None)


def _byte_level_tokens(model: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of single bytes that a model after ByteLevel needs: within a word, and at its
    beginning and end, which may be marked."""
    alphabet = set(library("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256, 512))
    signs = {byte: chr(byte) if chr(byte) in alphabet else chr(next(others)) for byte in range(256)}
    before, after = model["continuing_subword_prefix"] or "", model["end_of_word_suffix"] or ""
    return {
        begin + signs[byte] + end: byte
        for begin, byte, end in product(("", before), _BYTES_IN_USE, ("", after))
    }


def _end_in_config(path: Path) -> str:
    remedy = "set data.document_end to the token that ends each document"
    try:
        there = path.exists()
    except OSError as error:
        raise unreadable(str(path), error) from error
    if not there:
        raise DataRefused(f"there is no {path} with an eos_token: {remedy}")
    end = _named(_config(path, remedy), "eos")
    if end is None:
        raise DataRefused(f"{path} names no eos_token: {remedy}")
    return end


def _named_in_config(path: Path) -> dict[SpecialRole, str]:
    """The special tokens that a configuration names; none if it cannot be read: only a document's
    end is needed, which is known."""
    try:
        config = _config(path, "")
    except DataRefused:
        return {}
    found = {role: _named(config, role) for role in _ROLES}
    return {role: token for role, token in found.items() if token is not None}


def _config(path: Path, remedy: str) -> dict[str, Any]:
    """Raises DataRefused, and TransientStorageError."""
    try:
        regular = path.is_file()
    except OSError as error:
        raise unreadable(str(path), error) from error
    if not regular:  # a pipe would never end
        raise DataRefused(f"{path} is no regular file: {remedy}")
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataRefused(f"{path} cannot be read ({shortened(error)}): {remedy}") from error
    return config if isinstance(config, dict) else {}


def _named(config: dict[str, Any], role: SpecialRole) -> str | None:
    token = config.get(f"{role}_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _is_storable(token: str) -> bool:
    """Whether a spec can have the token, and a line of text can show it."""
    controls = any(sign < " " or "\x7f" <= sign <= "\x9f" for sign in token)
    return len(token) <= _MOST_TOKEN and not controls
