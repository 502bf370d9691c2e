"""What an exported folder has from the store of its job: the configuration, the dtype and the files
of a published model, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import deserialize
from tests.support.checkpoint.model_checkpoint import export_folder, save_model
from tests.support.checkpoint.random_models import SIZES, random_values, spec_of

from holdfast_workers.checkpoint.export import NotExportable, plan_export
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import Manifest
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.models.llama_parameters import (
    hugging_face_config,
    hugging_face_name,
    parameter_shapes,
)
from holdfast_workers.published.folder_parts import read_parts
from holdfast_workers.published.kept_tokenizer import keep_tokenizer
from holdfast_workers.published.model_config import read_config
from holdfast_workers.published.weight_files import PublishedTensor
from holdfast_workers.published.weight_set import (
    MANIFEST,
    OTHERS,
    WeightFile,
    WeightSet,
    digest_of,
)
from holdfast_workers.spec import (
    ModelSpec,
    PreparedSpec,
    SourceSpec,
    SpecialTokenSpec,
)

CONFIG = {**hugging_face_config(ModelSpec.model_validate(SIZES), 300, {}), "eos_token_id": 2}
GENERATION = b'{"eos_token_id": [2, 5], "suppress_tokens": [7]}'


def with_spec(manifest: Manifest, section: str, **changes: Any) -> Manifest:
    training = manifest.extra["training"]
    changed = {**training, section: {**training[section], **changes}}
    return replace(manifest, extra={**manifest.extra, "training": changed})


def published(
    root: Storage,
    manifest: Manifest,
    tmp_path: Path,
    config: Mapping[str, Any] | None = None,
    others: Mapping[str, bytes] | None = None,
    dtype: str = "float16",
) -> Manifest:
    """The checkpoint as one of a job that began with published weights."""
    files = tuple(WeightFile.of(name, content) for name, content in (others or {}).items())
    config = config or {**CONFIG, "dtype": dtype}
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    tensors = (PublishedTensor("model.norm.weight", "model.safetensors", short, (32,), 0),)
    made = WeightSet(config, (), tensors, files)
    uri = str(tmp_path / "store/weights" / made.digest)
    write_small(open_storage(uri), MANIFEST, made.encode())
    for name, content in (others or {}).items():
        write_small(open_storage(uri).below(OTHERS), name, content)
    spec = {
        **{"uri": uri, "digest": made.digest, "manifest_bytes": len(made.encode())},
        **{"nbytes": 1, "dtype": dtype, "positions": 64},
    }
    changes = {**read_config(config).fields, "from": "/models/published", "published": spec}
    return with_spec(manifest, "model", **changes)


def bits(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a folder."""
    return {
        name: bytes(tensor["data"])
        for path in folder.glob("*.safetensors")
        for name, tensor in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_round_trip_of_a_published_model_changes_no_byte(
    root: Storage, tmp_path: Path, tokenizer_files: dict[str, bytes], dtype: str
) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    source = tmp_path / "source"
    original = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    original.save_pretrained(source)
    document = json.loads((source / "config.json").read_text())
    model = ModelSpec.model_validate({**read_config(document).fields, "sequence_length": 24})
    state = original.state_dict()
    values = {
        name: state[hugging_face_name(name)].float().numpy()
        for name in parameter_shapes(model, 300)
    }
    generation = (source / "generation_config.json").read_bytes() + b"\n"
    others = {**tokenizer_files, "generation_config.json": generation}
    digest = digest_of(tokenizer_files["tokenizer.json"])
    data = data_with_tokenizer(digest, str(tmp_path / "sets"))
    saved = save_model(root, 8, spec_of(model, **data), values=values)
    manifest = published(root, saved, tmp_path, document, others, dtype)
    folder, plan = export_folder(manifest, tmp_path / "model.tar")
    assert bits(folder) == bits(source)
    exported = json.loads((folder / "config.json").read_text())
    assert exported.pop("torch_dtype") == document.pop("dtype") == dtype
    assert exported == document
    assert (folder / "generation_config.json").read_bytes() == generation
    assert plan.note == ""
    again = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert again.dtype is getattr(torch, dtype)


def test_what_a_published_model_has_beside_its_weights_must_be_as_it_was(
    root: Storage, tmp_path: Path
) -> None:
    saved = save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES)))
    manifest = published(root, saved, tmp_path, others={"tokenizer.json": b"{}"})
    uri = manifest.extra["training"]["model"]["published"]["uri"]
    write_small(open_storage(uri).below(OTHERS), "tokenizer.json", b"[]")
    with pytest.raises(NotExportable, match=r"tokenizer\.json is damaged.*submit a job"):
        read_parts(manifest, open_storage)
    write_small(open_storage(uri), MANIFEST, b"{}")
    with pytest.raises(NotExportable, match=r"manifest\.json is damaged"):
        read_parts(manifest, open_storage)
    open_storage(uri).delete_all()
    with pytest.raises(NotExportable, match=r"manifest\.json.*does not exist"):
        read_parts(manifest, open_storage)


@pytest.fixture(scope="module")
def tokenizer_files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, "</s>": 1, "hold": 2, "fast": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def data_with_tokenizer(digest: str, uri: str, files: str | None = None) -> dict[str, Any]:
    """The section `data` of a job with a tokenizer of its own. `files`: digest of their record."""
    prepared = PreparedSpec(
        uri=uri,
        origin="",
        digest=digest,
        vocabulary=300,
        tokens=9,
        tokenizer=digest,
        tokenizer_files=files,
        document_end=1,
    )
    return {
        "tokenizer": "/models/own",
        "sources": (SourceSpec(path="/data"),),
        "prepared": (prepared,),
        "special_tokens": {"document_end": SpecialTokenSpec(id=1, token="</s>")},
    }


def tokenized(
    root: Storage, digest: str, uri: str, files: str | None = None, step: int = 8
) -> Manifest:
    """A checkpoint of a job with a tokenizer of its own."""
    data = data_with_tokenizer(digest, uri, files)
    return save_model(root, step, spec_of(ModelSpec.model_validate(SIZES), **data))


def test_the_tokenizer_of_the_token_sets_is_exported(
    root: Storage, tmp_path: Path, tokenizer_files: dict[str, bytes]
) -> None:
    from transformers import AutoTokenizer

    digest = digest_of(tokenizer_files["tokenizer.json"])
    storage = LocalStorage(tmp_path / "sets/a")
    manifest = tokenized(root, digest, storage.uri)
    without, plan = export_folder(manifest, tmp_path / "without.tar")
    assert "copy the files of /models/own" in plan.note
    assert not (without / "tokenizer.json").exists()

    record = keep_tokenizer(storage, tokenizer_files)
    manifest = tokenized(root, digest, storage.uri, record, step=9)
    folder, plan = export_folder(manifest, tmp_path / "model.tar")
    assert plan.note == ""
    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert loaded("hold", add_special_tokens=False).input_ids == [2]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 1} == {"eos_token_id": loaded.eos_token_id}

    write_small(storage, f"tokenizer/{digest}", b"x")
    with pytest.raises(NotExportable, match=f"tokenizer/{digest} is damaged"):
        read_parts(manifest, open_storage)
    foreign = tokenized(root, digest_of(b"another"), storage.uri, record, step=10)
    with pytest.raises(NotExportable, match="is not of the tokenizer of the token set"):
        read_parts(foreign, open_storage)
    storage.delete_all()
    assert "copy the files of /models/own" in read_parts(manifest, open_storage).note


def test_jobs_with_one_token_set_have_the_files_of_their_own_preparations(
    root: Storage, tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path / "sets/a")
    digest = digest_of(b"{}")
    first = {"tokenizer.json": b"{}", "chat_template.jinja": b"first"}
    later = {"tokenizer.json": b"{}", "tokenizer_config.json": b"later"}
    manifests = [
        tokenized(root, digest, storage.uri, keep_tokenizer(storage, files), step)
        for step, files in enumerate((first, later, first), 1)
    ]
    for manifest, files in zip(manifests, (first, later, first), strict=True):
        parts = read_parts(manifest, open_storage)
        of_model = {name: parts.files[name] for name in ("config.json", "generation_config.json")}
        assert (parts.files, parts.note) == (of_model | files, "")


def test_the_published_tokenizer_is_exported_if_the_job_has_it(
    root: Storage, tmp_path: Path, tokenizer_files: dict[str, bytes]
) -> None:
    own = {**tokenizer_files, "tokenizer.json": b"{}"}
    storage = LocalStorage(tmp_path / "sets/a")
    record = keep_tokenizer(storage, own)
    beside = {**tokenizer_files, "chat_template.jinja": b"{{ messages }}"}
    others = {**beside, "generation_config.json": GENERATION}
    for files, expected in ((tokenizer_files, beside), (own, own)):
        digest = digest_of(files["tokenizer.json"])
        saved = tokenized(root, digest, storage.uri, record)
        parts = read_parts(published(root, saved, tmp_path, others=others), open_storage)
        assert {name: parts.files[name] for name in parts.files if name in beside} == expected
        config, generation = (parts.files[f"{name}config.json"] for name in ("", "generation_"))
        if files is own:
            assert "the job has another tokenizer" in parts.note
            assert json.loads(config)["eos_token_id"] == 1
            assert json.loads(generation) == {"eos_token_id": 1}
        else:
            assert (parts.note, generation) == ("", GENERATION)
            assert json.loads(config)["eos_token_id"] == 2
        root.below(saved.folder).delete_all()


def test_a_published_model_with_tokens_of_bytes_has_no_ids_of_its_tokenizer(
    root: Storage, tmp_path: Path
) -> None:
    saved = save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES)))
    others = {"tokenizer.json": b"{}", "generation_config.json": GENERATION}
    parts = read_parts(published(root, saved, tmp_path, others=others), open_storage)
    config = json.loads(parts.files["config.json"])
    assert config["eos_token_id"] is None  # without the key, transformers has a default
    assert json.loads(parts.files["generation_config.json"]) == {}
    assert "tokenizer.json" not in parts.files
    assert "bytes of the text" in parts.note and "another tokenizer" in parts.note


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_theta": 500.0}, r"model\.rope_theta is 500\.0, and 10000\.0 in the config\.json"),
        ({"layers": 4}, r"model\.layers is 4, and 3 in"),
        ({"dtype": "bfloat16"}, r"dtype is bfloat16, and float16 in .*manifest\.json"),
        ({"dtype": None}, "dtype is None, and float16"),
    ],
)
def test_a_model_that_differs_from_the_published_one_is_refused_by_its_field(
    root: Storage, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    """As of a job that was submitted again with an edited spec."""
    saved = save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES)))
    manifest = published(root, saved, tmp_path)
    read_parts(manifest, open_storage)
    if "dtype" in changes:
        changes = {"published": {**manifest.extra["training"]["model"]["published"], **changes}}
    with pytest.raises(NotExportable, match=f"{why}.*export it with its own names"):
        read_parts(with_spec(manifest, "model", **changes), open_storage)


def test_a_model_of_bytes_has_no_tokenizer_and_the_note_says_so(root: Storage) -> None:
    parts = read_parts(save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES))), open_storage)
    assert list(parts.files) == ["config.json", "generation_config.json"]
    assert "its tokens are the bytes" in parts.note


def test_the_file_of_own_names_stays_as_it_is(root: Storage) -> None:
    manifest = save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES)))
    plan = plan_export(manifest)
    assert (plan.suffix, plan.note, plan.narrowed) == (".safetensors", "", ())
    assert plan.room_bytes == plan.nbytes


def test_a_value_that_the_dtype_has_not_is_refused_by_name(root: Storage, tmp_path: Path) -> None:
    model = ModelSpec.model_validate(SIZES)
    values = {**random_values(model), "norm.weight": np.full(32, 1e6, np.float32)}
    manifest = published(root, save_model(root, 8, spec_of(model), values=values), tmp_path)
    with pytest.raises(NotExportable, match=r"model\.norm\.weight has a value .* float16"):
        export_folder(manifest, tmp_path / "model.tar")
