from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.data.preparation import END, SAMPLE, Preparation, as_lines
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from holdfast_workers.checkpoint.storage import TransientStorageError
from holdfast_workers.data.token_set import shard_digest
from holdfast_workers.spec.train import DataSpec, SourceSpec, SpecialTokenSpec
from holdfast_workers.token_sets.refusals import DataRefused
from holdfast_workers.token_sets.tokenizer_file import Encoder, TokenizerFile, read_tokenizer

CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
"""A damaged one, at which the library panics when it loads it."""


def test_bytes_need_no_file() -> None:
    tokenizer = read_tokenizer(DataSpec())
    assert tokenizer.content == b""
    facts = tokenizer.facts
    assert (facts.name, facts.vocabulary, facts.document_end) == ("bytes", 256, 0)
    [ids] = Encoder(tokenizer).encode(["é☃"])
    assert ids.dtype == np.uint16
    assert ids.tolist() == list("é☃".encode())
    assert Encoder(tokenizer).decode(ids) == "é☃"
    with pytest.raises(DataRefused, match="leave document_end out"):
        read_tokenizer(DataSpec(document_end="x"))


def test_a_tokenizer_is_named_by_its_file_or_folder(tokenizer_file: Path) -> None:
    tokenizer = read_tokenizer(DataSpec(tokenizer=str(tokenizer_file)))
    assert tokenizer.facts.vocabulary == 300
    assert tokenizer.facts.document_end == 0
    assert tokenizer.facts.digest == shard_digest(tokenizer_file.read_bytes())
    in_folder = read_tokenizer(DataSpec(tokenizer=str(tokenizer_file.parent)))
    assert in_folder.content == tokenizer.content


def test_the_vocabulary_counts_added_tokens_and_gaps(tokenizer_file: Path, tmp_path: Path) -> None:
    changed = json.loads(tokenizer_file.read_bytes())
    changed["added_tokens"].append({**changed["added_tokens"][0], "id": 70_000, "content": "<|x|>"})
    changed["model"]["vocab"]["<|x|>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    data = DataSpec(tokenizer=str(tmp_path), document_end="<|x|>")
    tokenizer = read_tokenizer(data)
    assert (tokenizer.facts.vocabulary, tokenizer.facts.document_end) == (70_001, 70_000)
    [ids] = Encoder(tokenizer).encode(["a<|x|>"])
    assert ids.dtype == np.uint32
    assert ids[-1] == 70_000


@pytest.mark.parametrize("end", [END, {"content": END, "lstrip": False}])
def test_the_end_is_the_eos_token_of_the_configuration(
    tokenizer_file: Path, tmp_path: Path, end: Any
) -> None:
    shutil.copy(tokenizer_file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert read_tokenizer(DataSpec(tokenizer=str(tmp_path))).facts.document_end == 0


def test_special_tokens_are_those_that_the_configuration_names_and_the_file_has(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    shutil.copy(tokenizer_file, tmp_path)
    end = SpecialTokenSpec(id=0, token=END)
    byte = SpecialTokenSpec(id=1, token="!")
    config = {
        "eos_token": {"content": END},
        "bos_token": "!",
        "pad_token": "<|none|>",
        "unk_token": 7,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_tokenizer(DataSpec(tokenizer=str(tmp_path), document_end="!"))
    assert found.special_tokens == {"document_end": byte, "bos": byte, "eos": end}
    for damaged in ("[", "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        found = read_tokenizer(DataSpec(tokenizer=str(tmp_path), document_end=END))
        assert found.special_tokens == {"document_end": end}
    assert read_tokenizer(DataSpec()).special_tokens == {"document_end": SpecialTokenSpec(id=0)}


def test_nothing_is_cut_padded_or_added(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_workers.token_sets.tokenizer_file._BATCH_BYTES", 100)
    plain = read_tokenizer(DataSpec(tokenizer=str(tokenizer_file)))
    cutting = Tokenizer.from_file(str(tokenizer_file))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=512)
    cutting.save(str(tmp_path / "tokenizer.json"))
    changed = json.loads((tmp_path / "tokenizer.json").read_bytes())
    changed["post_processor"] = {
        "type": "BertProcessing",
        "sep": [END, 0],
        "cls": [END, 0],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    other = read_tokenizer(DataSpec(tokenizer=str(tmp_path), document_end=END))
    texts = [*SAMPLE, "x", "word " * 5000]  # longer than a batch
    expected = [ids.tolist() for ids in Encoder(plain).encode(texts)]
    assert [ids.tolist() for ids in Encoder(other).encode(texts)] == expected
    assert [Encoder(plain).decode(ids) for ids in expected] == texts


def test_no_token_is_left_to_chance(tokenizer_file: Path, tmp_path: Path) -> None:
    plain = read_tokenizer(DataSpec(tokenizer=str(tokenizer_file)))
    random = Tokenizer.from_file(str(tokenizer_file))
    random.model.dropout = 0.5
    random.save(str(tmp_path / "tokenizer.json"))
    other = read_tokenizer(DataSpec(tokenizer=str(tmp_path), document_end=END))
    expected, found = (
        [ids.tolist() for ids in Encoder(tokenizer).encode(SAMPLE * 4)]
        for tokenizer in (plain, other)
    )
    assert found == expected


@pytest.mark.parametrize("rescue", ["", "unknown", "byte_fallback"])
def test_a_tokenizer_that_leaves_text_out_silently_is_refused(tmp_path: Path, rescue: str) -> None:
    known = [f"<0x{byte:02X}>" for byte in range(256)] if rescue == "byte_fallback" else ["<unk>"]
    tokenizer = Tokenizer(
        models.BPE(
            unk_token="<unk>" if rescue == "unknown" else None,
            byte_fallback=rescue == "byte_fallback",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(special_tokens=[END, *known], show_progress=False)
    tokenizer.train_from_iterator(["hello world ✓ cat"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = DataSpec(tokenizer=str(tmp_path), document_end=END)
    if rescue:
        [ids] = Encoder(read_tokenizer(data)).encode(["w世r"])
        assert len(ids) == (3 if rescue == "unknown" else 5)
        return
    with pytest.raises(
        DataRefused,
        match=r"has neither an unknown token nor tokens for single bytes: .* give it an unk_token",
    ):
        read_tokenizer(data)


def _changed(**changes: Any) -> Callable[[Path], object]:
    """Changes of the `tokenizer.json`."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))

    return change


def _pipe(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "data", "place", "remedy"),
    [
        (_without("tokenizer.json"), {}, "tokenizer.json does not exist on this node", "save_pret"),
        (
            _without("tokenizer_config.json"),
            {},
            "tokenizer_config.json with",
            "set data.document_e",
        ),
        (lambda at: (at / "tokenizer.json").write_text("{}"), {}, "tokenizer.json is no", "save_p"),
        (
            lambda at: (at / "tokenizer.json").write_bytes(b"\xff"),
            {},
            "json is no",
            "`save_pretrai",
        ),
        (
            lambda at: Tokenizer(models.BPE()).save(str(at / "tokenizer.json")),
            {},
            "tokenizer.json has no tokens",
            "published model",
        ),
        (
            lambda at: (at / "tokenizer_config.json").write_text("["),
            {},
            "tokenizer_config.json cannot be read",
            "set data.document_end",
        ),
        (
            lambda at: (at / "tokenizer_config.json").write_text('{"eos_token": null}'),
            {},
            "tokenizer_config.json names no eos_token",
            "set data.document_end",
        ),
        (
            lambda at: (at / "tokenizer_config.json").write_text("[" * 100_000),
            {},
            "tokenizer_config.json cannot be read",
            "set data.document_end",
        ),
        (_pipe, {}, "tokenizer_config.json is no regular file", "set data.document_end"),
        (_changed(normalizer=CHARSMAP), {}, "tokenizer.json is no", "write it again"),
        (lambda _: None, {"document_end": "</s>"}, "has no token '</s>'", "set data.document_end"),
        (lambda _: None, {"tokenizer": "gpt2"}, "data.tokenizer 'gpt2'", "an absolute path"),
        (lambda _: None, {"tokenizer": "/dev/null"}, "/dev/null does not exist", "tokenizer.json"),
    ],
)
def test_a_bad_tokenizer_is_refused_with_its_place_and_a_remedy(
    tokenizer_file: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    data: dict[str, str],
    place: str,
    remedy: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_file.parent, folder)
    damage(folder)
    with pytest.raises(DataRefused) as raised:
        read_tokenizer(DataSpec.model_validate({"tokenizer": str(folder), **data}))
    assert place in str(raised.value)
    assert remedy in str(raised.value)


def test_a_panic_of_the_library_names_the_tokenizer(tokenizer_file: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_file.parent, tmp_path, dirs_exist_ok=True)
    sound = read_tokenizer(DataSpec(tokenizer=str(tmp_path)))
    _changed(normalizer={**CHARSMAP, "precompiled_charsmap": "AQAAAAA="})(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    with pytest.raises(DataRefused, match=r"it cannot encode a text that begins with 'ab'"):
        list(Encoder(TokenizerFile(sound.facts, content)).encode(["ab"]))


def test_a_passing_fault_of_a_file_system_is_no_fault_of_the_tokenizer(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(TransientStorageError, match="Stale"):
        read_tokenizer(DataSpec(tokenizer=str(tokenizer_file)))


def test_an_id_beyond_the_vocabulary_is_refused(tokenizer_file: Path) -> None:
    tokenizer = read_tokenizer(DataSpec(tokenizer=str(tokenizer_file)))
    object.__setattr__(tokenizer.facts, "vocabulary", 20)
    encoder = Encoder(TokenizerFile(tokenizer.facts, tokenizer.content))
    with pytest.raises(DataRefused, match="its vocabulary has 20"):
        list(encoder.encode(SAMPLE))


def _bytes_of_level(
    without: str = "",
    only: str = "",
    normalizes: bool = False,
    decoder: bool = True,
    **model: Any,
) -> Tokenizer:
    """A tokenizer whose tokens are those of single bytes, written as ByteLevel does."""
    alphabet = sorted(only or pre_tokenizers.ByteLevel.alphabet())
    ends = {"", model.get("end_of_word_suffix", "")}
    tokens = [sign + end for sign in alphabet if sign not in without for end in sorted(ends)]
    vocabulary = {token: at for at, token in enumerate(["<unk>", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], **model))
    if normalizes:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.ByteLevel()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.ByteLevel(add_prefix_space=True)]
        )
    if decoder:
        tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes_of_fallback(without: int | None = None, **model: Any) -> Tokenizer:
    tokens = ["<unk>", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256) if byte != without)]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _words(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def _characters(**model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "<unk>": 2}, merges=[], **model))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _saved(tokenizer: Tokenizer, folder: Path) -> DataSpec:
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    return DataSpec(tokenizer=str(folder), document_end=END)


UNUSED = "ÀÁõö÷øùúûüýþÿ"
"""How ByteLevel writes the bytes that UTF-8 never has."""


@pytest.mark.parametrize(
    "tokenizer",
    [
        _bytes_of_level(),
        _bytes_of_level(without=UNUSED),
        _bytes_of_level(normalizes=True),
        _bytes_of_level(decoder=False),
        _bytes_of_level(end_of_word_suffix="</w>"),
        _bytes_of_level(without="čÃ", unk_token="<unk>"),
        _bytes_of_fallback(),
        _bytes_of_fallback(unk_token="<unk>", fuse_unk=True),
        _bytes_of_fallback(without=0xC3, unk_token="<unk>"),
        _characters(unk_token="<unk>"),
        _words(),
    ],
)
def test_a_tokenizer_that_has_ids_for_all_text_is_accepted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    encoder = Encoder(read_tokenizer(_saved(tokenizer, tmp_path)))
    for text in ("ö\r\x00\x1b", "\U000e0067", "\U00046131"):
        [ids] = encoder.encode([text])
        assert len(ids)
        assert not encoder.why_lost(text)


ALPHABET = "abcdefghijklmnopqrstuvwxyzĠ"


@pytest.mark.parametrize(
    ("tokenizer", "sign", "byte"),
    [
        *(
            (_bytes_of_level(without=token, decoder=decoder), chr(code), byte)
            for decoder in (True, False)
            for token, code, byte in (
                *(("Ġ", 0x20, 0x20), ("Ċ", 0xA, 0xA), ("č", 0xD, 0xD), ("ě", 0x1B, 0x1B)),
                *(("7", 0x37, 0x37), ("q", 0x71, 0x71), ("ħ", 0xC5, 0x85), ("Ã", 0xC3, 0xC3)),
                *(("ñ", 0x46131, 0xF1), ("ó", 0xE0067, 0xF3), ("ô", 0x100000, 0xF4)),
            )
        ),
        (_bytes_of_level(without="čó"), "\r", 0x0D),
        (_bytes_of_level(only=ALPHABET), "世", 0xE4),
        (_bytes_of_level(without="č", normalizes=True), "\r", 0x0D),
        (_bytes_of_fallback(without=0xC3), "ö", 0xC3),
    ],
)
def test_a_text_of_which_a_byte_would_be_left_out_is_named(
    tmp_path: Path, tokenizer: Tokenizer, sign: str, byte: int
) -> None:
    tokens = tokenizer.encode(f"a{sign}a").tokens
    assert tokens.count("<unk>") == 0
    assert len(tokens) < len(f"a{sign}a".encode()) + 1, "it leaves nothing out"
    encoder = Encoder(read_tokenizer(_saved(tokenizer, tmp_path)))
    why = f"the tokenizer has no token for the byte 0x{byte:02X} of {sign!r}: give it an unk_token"
    assert encoder.why_lost(f"a{sign}a").startswith(why)
    assert not encoder.why_lost("aa")


def test_a_tokenizer_without_tokens_for_bytes_is_refused(tmp_path: Path) -> None:
    tokenizer = _characters()
    assert len(tokenizer.encode("aö世a").tokens) == 3
    with pytest.raises(DataRefused, match="has neither an unknown token nor tokens for single"):
        read_tokenizer(_saved(tokenizer, tmp_path))


def test_documents_with_a_byte_that_has_no_token_are_bad_records(tmp_path: Path) -> None:
    """Published tokenizers lack some that are rare."""
    data = _saved(_bytes_of_level(without="ċ"), tmp_path)
    (tmp_path / "a.jsonl").write_bytes(as_lines(["a", "b\x0b", "c"]))
    source = SourceSpec(path=str(tmp_path / "a.jsonl"))
    data = data.model_copy(update={"bad_records": 0.5})
    preparation = Preparation(tmp_path / "scratch", source, data)
    made = preparation.run()
    assert [document.strip() for document in preparation.documents(made)] == ["a", "c"]
    (bad,) = made.bad
    assert bad.row == 2
    assert bad.why.startswith("the tokenizer has no token for the byte 0x0B of '\\x0b'")


def test_a_byte_that_ends_a_word_needs_a_token_of_its_own(tmp_path: Path) -> None:
    tokenizer = _bytes_of_level()
    changed = json.loads(tokenizer.to_str())
    changed["model"]["end_of_word_suffix"] = "</w>"
    data = _saved(Tokenizer.from_str(json.dumps(changed)), tmp_path)
    assert len(read_tokenizer(data).lost_bytes) == 243


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (
            _words(normalizers.Replace(Regex("[^a-z]"), "")),
            "makes no token of 'ö': its normalizer or pre_tokenizer would leave such text out",
        ),
        (_characters(unk_token="[UNK]"), "it cannot encode 'ö'"),
    ],
)
def test_rare_characters_are_tried(tmp_path: Path, tokenizer: Tokenizer, why: str) -> None:
    with pytest.raises(DataRefused) as refused:
        read_tokenizer(_saved(tokenizer, tmp_path))
    assert why in str(refused.value)


@pytest.mark.parametrize("token", ["E" * 5000, "\0x", "\x1b[1m", "a\nb"], ids=ascii)
def test_a_special_token_that_a_spec_cannot_have_is_left_out_or_refused(
    tokenizer_file: Path, tmp_path: Path, token: str
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens([token])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"pad_token": token, "eos_token": token, "bos_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    end = SpecialTokenSpec(id=0, token=END)
    found = read_tokenizer(DataSpec(tokenizer=str(tmp_path), document_end=END))
    assert found.special_tokens == {"document_end": end, "bos": end}
    with pytest.raises(
        DataRefused, match=r"control character or over 4,096 characters: set data.document_end to"
    ):
        read_tokenizer(DataSpec(tokenizer=str(tmp_path)))
