"""A published folder is taken as it is whole, or refused in a sentence that names what is wrong."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoint.published_models import (
    TINY,
    part_name,
    tensors_of,
    write_folder,
    write_index,
    write_safetensors,
)

from holdfast_workers.published import folder as published_folder
from holdfast_workers.published.folder import read_folder
from holdfast_workers.published.model_config import UnfitConfig
from holdfast_workers.published.weight_files import INDEX, SINGLE, UnfitWeights
from holdfast_workers.published.weight_set import CHUNK_BYTES

PARTS = [part_name(part, 2) for part in range(2)]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


def index_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def test_a_folder_says_what_its_weights_are(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, tensors=tensors_of(TINY, torch.bfloat16), parts=2)
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text("{}")
    found = read_folder(tmp_path)
    assert found.config.family == "llama" and found.document == TINY
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert found.files == tuple((name, (tmp_path / name).stat().st_size) for name in PARTS)
    assert found.others == ("tokenizer.json", "chat_template.jinja")
    assert found.dtype == "bfloat16"


def test_weights_of_several_dtypes_have_none_in_common(tmp_path: Path) -> None:
    tensors = tensors_of(TINY)
    write_folder(tmp_path, tensors={**tensors, QUERY: tensors[QUERY].half()})
    assert read_folder(tmp_path).dtype is None


def test_a_folder_of_links_to_files_elsewhere_is_a_folder(tmp_path: Path) -> None:
    """As in the cache of the hub's own library."""
    blobs, links = tmp_path / "blobs", tmp_path / "snapshots"
    write_folder(blobs, parts=2)
    links.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (links / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert read_folder(links).files[0][0] == PARTS[0]
    (blobs / "0").unlink()  # its config.json
    with pytest.raises(UnfitWeights, match=r"config\.json: No such file or directory: every node"):
        read_folder(links)


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_only_repeat_are_ignored(tmp_path: Path, tied: bool) -> None:
    config = {**TINY, "tie_word_embeddings": tied}
    tensors = tensors_of(config)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if tied:
        more["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_folder(tmp_path, config, {**tensors, **more}, parts=2)
    assert read_folder(tmp_path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("case", ["first value", "last value", "sign of zero", "dtype", "shape"])
def test_a_head_that_is_not_the_tied_embedding_is_refused(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_folder, "CHUNK_BYTES", 1 << 10)
    config = {**TINY, "tie_word_embeddings": True}
    tensors = tensors_of(config)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[7, 7] = 0.0
    head = embedding.clone()
    match case:
        case "first value":
            head[0, 0] += 1
        case "last value":
            head[-1, -1] += 1
        case "sign of zero":
            head[7, 7] = -0.0
        case "dtype":
            head = head.half()
        case "shape":
            head = head[:-1]
    write_folder(tmp_path, config, {**tensors, "lm_head.weight": head}, parts=2)
    with pytest.raises(UnfitWeights) as caught:
        read_folder(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: tie_word_embeddings is true, and lm_head.weight is not equal to "
        "model.embed_tokens.weight: set tie_word_embeddings to false in config.json, or remove "
        "lm_head.weight"
    )


def test_a_tied_head_is_compared_in_the_memory_of_two_chunks(tmp_path: Path) -> None:
    config = {**TINY, "tie_word_embeddings": True, "vocab_size": 200_000}
    tensors = tensors_of(config)
    head = tensors["model.embed_tokens.weight"]  # 26 MB
    write_folder(tmp_path, config, {**tensors, "lm_head.weight": head})
    tracemalloc.start()
    read_folder(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * CHUNK_BYTES + (1 << 20)


LONG = "a" * 100_000
LONG_TENSORS: list[Callable[[Path], Any]] = [
    lambda folder: write_safetensors(folder / SINGLE, {**tensors_of(TINY), LONG: torch.ones(1)}),
    lambda folder: write_safetensors(
        folder / SINGLE, {**tensors_of(TINY), QUERY: torch.ones([1] * 10_000)}
    ),
    lambda folder: write_header(folder, {LONG: {}}),
    lambda folder: write_header(
        folder, {LONG: {"dtype": LONG, "shape": [], "data_offsets": [0, 4]}}
    ),
    lambda folder: write_header(
        folder, {LONG: {"dtype": "F32", "shape": [], "data_offsets": [0, 5]}}
    ),
    lambda folder: write_header(
        folder, {LONG: {"dtype": "F32", "shape": [], "data_offsets": [1, 5]}}
    ),
    lambda folder: write_json(folder / "config.json", {**TINY, "model_type": LONG}),
    lambda folder: (folder / "config.json").write_text(f'{{"{LONG}": 1, "{LONG}": 1}}'),
    lambda folder: write_index_alone(folder, {LONG: SINGLE}),
    lambda folder: write_index_alone(folder, {QUERY: LONG}),
    lambda folder: write_index_alone(folder, {QUERY: f"{LONG}.safetensors"}),
]


def write_header(folder: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def write_index_alone(folder: Path, index: dict[str, Any]) -> None:
    (folder / SINGLE).rename(folder / "part.safetensors")
    write_index(
        folder, {name: file.replace(SINGLE, "part.safetensors") for name, file in index.items()}
    )


@pytest.mark.parametrize("case", range(len(LONG_TENSORS)))
def test_a_refusal_is_short_however_long_a_name_or_a_value_is(tmp_path: Path, case: int) -> None:
    write_folder(tmp_path)
    LONG_TENSORS[case](tmp_path)
    with pytest.raises((UnfitWeights, UnfitConfig)) as caught:
        read_folder(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_name_that_cannot_be_printed_is_shown_with_escapes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_header(tmp_path, {"a\x1b[2J\ud800": {}})
    with pytest.raises(UnfitWeights, match=r"damaged header at 'a\\x1b\[2J\\ud800'$"):
        read_folder(tmp_path)


# --- what is refused ------------------------------------------------------------------------------


def config_as_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def weights_as_a_pipe(folder: Path) -> None:
    (folder / PARTS[1]).unlink()
    os.mkfifo(folder / PARTS[1])


def without_weights(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()


def pickles_alone(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


def large_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", (64 << 20) + 1)


REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"has no config\.json: name the folder of a whole model$",
    ),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json is not JSON: ",
    ),
    "config is no text": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"),
        r"config\.json is not JSON: ",
    ),
    "config is deep": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        r"config\.json is not JSON: ",
    ),
    "config is a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        r"config\.json: it is not an object of JSON$",
    ),
    "config is a folder": (
        config_as_a_folder,
        r"config\.json is no file$",
    ),
    "weights are a pipe": (
        weights_as_a_pipe,
        rf"{PARTS[1]} is no file$",
    ),
    "another architecture": (
        lambda folder: write_json(folder / "config.json", {**TINY, "model_type": "gemma3"}),
        r"config\.json: model_type is 'gemma3': the family llama is for llama, mistral, ",
    ),
    "impossible sizes": (
        lambda folder: write_json(folder / "config.json", {**TINY, "num_hidden_layers": 20_000}),
        r"config\.json: num_hidden_layers is 20000, and not a whole number from 1 to 10000$",
    ),
    "no index": (
        lambda folder: (folder / INDEX).unlink(),
        rf"has {PARTS[0]} and no {INDEX}, which names all parts: copy it too$",
    ),
    "an index and a file of all": (
        lambda folder: write_safetensors(folder / SINGLE, {}),
        rf"has {SINGLE} and {INDEX}: remove the one that is not of this model$",
    ),
    "an index without a map": (
        lambda folder: write_json(folder / INDEX, {"metadata": {}}),
        rf"{INDEX} has no weight_map$",
    ),
    "an index that is no JSON": (
        lambda folder: (folder / INDEX).write_text("<html>"),
        rf"{INDEX} is not JSON: ",
    ),
    "an index of a missing file": (
        lambda folder: (folder / PARTS[1]).unlink(),
        rf"has no {PARTS[1]}, which its index names: copy it$",
    ),
    "an index of a file outside": (
        lambda folder: write_index(folder, {**index_of(folder), QUERY: "../x.safetensors"}),
        r"names '\.\./x\.safetensors', which is no file beside it$",
    ),
    "an index of a pickle": (
        lambda folder: write_index(folder, {**index_of(folder), QUERY: "x.bin"}),
        r"names 'x\.bin', which is no file beside it$",
    ),
    "an index of a number": (
        lambda folder: write_index(folder, {**index_of(folder), QUERY: 7}),
        r"names 7, which is no file beside it$",
    ),
    "an index that leaves a tensor out": (
        lambda folder: write_index(
            folder, {name: file for name, file in index_of(folder).items() if name != QUERY}
        ),
        rf"{QUERY} is in {PARTS[1]}, and in no file as {INDEX} says: copy the files and their ",
    ),
    "an index with a tensor that no file has": (
        lambda folder: write_index(folder, {**index_of(folder), "more": PARTS[0]}),
        rf"more is in no file, and in {PARTS[0]} as {INDEX} says: ",
    ),
    "an index with the wrong file": (
        lambda folder: write_index(folder, {**index_of(folder), QUERY: PARTS[0]}),
        rf"{QUERY} is in {PARTS[1]}, and in {PARTS[0]} as {INDEX} says: ",
    ),
    "a tensor in two files": (
        lambda folder: write_safetensors(folder / PARTS[1], tensors_of(TINY)),
        rf" is in {PARTS[0]} and in {PARTS[1]}$",
    ),
    "a file that is cut off": (
        lambda folder: os.truncate(folder / PARTS[1], (folder / PARTS[1]).stat().st_size - 1),
        rf"{PARTS[1]} is cut off: it has \d+ bytes, and not \d+: copy it again$",
    ),
    "a file that is cut off in its header": (
        lambda folder: os.truncate(folder / PARTS[1], 20),
        rf"{PARTS[1]} is not of safetensors, or is cut off: copy it again$",
    ),
    "an empty file": (
        lambda folder: os.truncate(folder / PARTS[1], 0),
        rf"{PARTS[1]} is not of safetensors, or is cut off: copy it again$",
    ),
    "a file with more": (
        lambda folder: (folder / PARTS[1]).open("ab").write(b"x"),
        rf"{PARTS[1]} has bytes that are of no tensor: ",
    ),
    "a link to a large file that was not fetched": (
        lambda folder: (folder / PARTS[1]).write_text("version https://git-lfs.github.com/spec/v1"),
        rf"{PARTS[1]} is not of safetensors, or is cut off: copy it again$",
    ),
    "only pickles": (
        pickles_alone,
        r"has its weights in pytorch_model\.bin, a pickle, which runs code when it is read: "
        r"convert them to safetensors$",
    ),
    "no weights": (
        without_weights,
        rf"has neither {SINGLE} nor {INDEX}$",
    ),
    "a large small file": (
        large_tokenizer,
        r"tokenizer\.json is larger than 64 MiB$",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    write_folder(folder, parts=2)
    read_folder(folder)
    change, sentence = REFUSALS[case]
    change(folder)
    with pytest.raises((UnfitWeights, UnfitConfig), match=sentence) as caught:
        read_folder(folder)
    assert str(caught.value).startswith(str(folder))


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("nothing", "No such file"), ("file", "Not a directory")):
        with pytest.raises(UnfitWeights, match=rf"^{tmp_path / name}: {reason}.*: every node"):
            read_folder(tmp_path / name)


def test_an_error_of_the_disk_is_none_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output error"):
        patched.setattr(Path, "open", fail)
        read_folder(tmp_path)


HEADERS: dict[str, tuple[bytes | Callable[[dict[str, Any]], Any], str]] = {
    "no JSON": (b"{]", r"has a damaged header: "),
    "a list": (b"[]", r"has a damaged header: it is not an object of JSON$"),
    "a name twice": (
        b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": {}}',
        r"has a damaged header: a is there twice$",
    ),
    "no offsets": (lambda entry: entry.pop("data_offsets"), rf"a damaged header at {QUERY}$"),
    "an offset too many": (
        lambda entry: entry["data_offsets"].append(1),
        rf"a damaged header at {QUERY}$",
    ),
    "a negative side": (
        lambda entry: entry.update(shape=[-32, -32]),
        rf"a damaged header at {QUERY}$",
    ),
    "a side that is no number": (
        lambda entry: entry.update(shape=[True, 32]),
        rf"a damaged header at {QUERY}$",
    ),
    "a size that is not the shape's": (
        lambda entry: entry.update(shape=[32, 31]),
        rf"a damaged header at {QUERY}: its size is not its shape's$",
    ),
    "an overlap": (
        lambda entry: entry.update(data_offsets=[0, 4096]),
        r"model\.safetensors is damaged at .*: copy it again$",
    ),
    "a number of eight bits": (
        lambda entry: entry.update(dtype="I8"),
        rf"{QUERY} is I8: weights of F32, F16, BF16 are read here$",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_what_is_wrong_with_a_header_is_said(tmp_path: Path, case: str) -> None:
    write_folder(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    change, sentence = HEADERS[case]
    header = change
    if not isinstance(change, bytes):
        document = json.loads(content[8:end])
        change(document[QUERY])
        header = json.dumps(document).encode()
    assert isinstance(header, bytes)
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(UnfitWeights, match=sentence) as caught:
        read_folder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / SINGLE))


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "one is missing": (
        lambda tensors: tensors.pop(QUERY),
        rf" lacks {QUERY}, which its config\.json asks for$",
    ),
    "many are missing": (
        lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:5]],
        r" lacks lm_head\.weight, model\.embed_tokens\.weight, "
        r"model\.layers\.0\.input_layernorm\.weight and 2 more tensors, ",
    ),
    "one is unknown": (
        lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}),
        r" has model\.layers\.1\.self_attn\.q_proj\.bias, which the model of its config\.json ",
    ),
    "one has another shape": (
        lambda tensors: tensors.update({QUERY: torch.ones(32, 16)}),
        rf"{QUERY} has the shape \(32, 16\), and not \(32, 32\) as config\.json says: copy both ",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_those_of_the_model_are_named(tmp_path: Path, case: str) -> None:
    tensors = tensors_of(TINY)
    change, sentence = TENSORS[case]
    change(tensors)
    write_folder(tmp_path, tensors=tensors)
    with pytest.raises(UnfitWeights, match=sentence):
        read_folder(tmp_path)
