"""An exported folder is one that `transformers` loads, with the logits of the model here."""

from __future__ import annotations

import json
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.support.checkpoint.model_checkpoint import export_folder, save_model
from tests.support.checkpoint.random_models import SIZES, Values, random_values, spec_of
from tests.support.checkpoint.saved_worlds import save_world

from holdfast_workers.checkpoint.export import NotExportable, write_export
from holdfast_workers.checkpoint.local_files import LocalStorage
from holdfast_workers.checkpoint.manifest import BadCheckpoint
from holdfast_workers.checkpoint.open_storage import open_storage
from holdfast_workers.checkpoint.storage import Storage, write_small
from holdfast_workers.models.llama import Llama
from holdfast_workers.models.llama_parameters import hugging_face_name
from holdfast_workers.published.export_folder import plan_folder
from holdfast_workers.published.folder_parts import read_parts
from holdfast_workers.published.model_config import read_config
from holdfast_workers.spec import (
    ModelSpec,
)
from holdfast_workers.spec.model import WeightDtype

LLAMA3 = {"type": "llama3", "factor": 8.0, "original_sequence_length": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_size": 16},
    "llama tied, llama3": {"tied_embeddings": True, "rope_scaling": LLAMA3},
    "llama, linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    "mistral": {"sliding_window": 5, "head_size": 12},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-6},
    "qwen2 tied, windows": {
        **{"qkv_bias": True, "tied_embeddings": True, "sliding_window": 5, "window_from": 1},
        "head_size": 12,
    },
    "qwen3": {"qk_norm": True, "head_size": 12, "rope_theta": 1e6},
    "qwen3, windows": {"qk_norm": True, "sliding_window": 4, "window_from": 2},
}


def tokens_of(model: ModelSpec) -> torch.Tensor:
    length = model.sequence_length
    return (torch.arange(2 * length).view(2, length) * 7) % (model.vocabulary or 256)


def our_logits(model: ModelSpec, values: Values) -> torch.Tensor:
    ours = Llama(model, model.vocabulary or 256)
    ours.reset_tables()
    ours.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    with torch.no_grad():
        logits: torch.Tensor = ours(tokens_of(model))
    return logits


def their_logits(folder: Path, model: ModelSpec) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    theirs, found = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits: torch.Tensor = theirs.eval()(tokens_of(model)).logits
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_each_family_with_equal_logits(
    root: Storage, tmp_path: Path, family: str
) -> None:
    model = ModelSpec.model_validate(SIZES | FAMILIES[family])
    values = random_values(model)
    manifest = save_model(root, 8, spec_of(model), values=values)
    folder, _ = export_folder(manifest, tmp_path / "model.tar", shard_bytes=20_000)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == family.partition(" ")[0].strip(",")
    theirs, ours = their_logits(folder, model), our_logits(model, values)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert ours.std() > 0.1
    fields = {**read_config(config).fields, "sequence_length": model.sequence_length}
    assert ModelSpec.model_validate(fields) == model.model_copy(update={"head_size": model.width})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"qkv_bias": True, "qk_norm": True}, ["qkv_bias", "qk_norm"]),
        ({"sliding_window": 4, "window_from": 1}, ["sliding_window", "window_from = 1"]),
        ({"dim": 30, "head_size": 8}, ["model.dim", "30 with 4"]),
    ],
)
def test_flags_that_no_architecture_has_together_are_named(
    root: Storage, flags: dict[str, Any], named: list[str]
) -> None:
    model = ModelSpec.model_validate(SIZES | flags)
    with pytest.raises(NotExportable, match="export it with its own names") as refused:
        read_parts(save_model(root, 8, spec_of(model)), open_storage)
    assert all(name in str(refused.value) for name in named)


def test_a_folder_needs_the_built_in_llama(root: Storage) -> None:
    with pytest.raises(NotExportable, match="own names"):
        read_parts(save_world(root, 7, 1, {"dp_shard": 2, "tp": 2}), open_storage)


@given(
    layers=st.sampled_from([1, 2, 11]),
    shard_bytes=st.integers(1, 60_000),
    dtype=st.sampled_from(get_args(WeightDtype)),
    note=st.binary(max_size=1100),
)
@settings(deadline=None, max_examples=20)
def test_every_plan_is_a_tar_file_of_whole_shards(
    layers: int, shard_bytes: int, dtype: WeightDtype, note: bytes
) -> None:
    model = ModelSpec(dim=8, layers=layers, heads=2, sequence_length=8, vocabulary=260)
    values = random_values(model)
    with tempfile.TemporaryDirectory() as folder:
        root = LocalStorage(Path(folder) / "checkpoints")
        manifest = save_model(root, 8, spec_of(model), values=values)
        parts = read_parts(manifest, open_storage)
        parts = replace(parts, dtype=dtype, files={**parts.files, "note": note})
        plan = plan_folder(manifest, parts, shard_bytes)
        assert plan == plan_folder(manifest, parts, shard_bytes)
        written = Path(folder) / "model.tar"
        with written.open("w+b") as file:
            write_export(root.below(manifest.folder), plan, file)
        assert written.stat().st_size == plan.nbytes <= plan.room_bytes
        with tarfile.open(written, "r:") as tar:
            assert {(info.mtime, info.uid, info.uname) for info in tar} == {(0, 0, "")}
            tar.extractall(Path(folder) / "model", filter="data")
            ends = [info.offset_data + info.size for info in tar]
        content = written.read_bytes()
        assert not any(any(content[end : end - end % -tarfile.BLOCKSIZE]) for end in ends)
        loaded: dict[str, torch.Tensor] = {}
        of_files: dict[str, str] = {}
        files = sorted(Path(folder, "model").glob("*.safetensors"))
        for path in files:
            with safe_open(path, framework="pt") as opened:
                assert opened.metadata()["format"] == "pt"
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            of_files |= dict.fromkeys(found, path.name)
            nbytes = sum(tensor.nbytes for tensor in found.values())
            assert nbytes <= shard_bytes or len(found) == 1
            assert not loaded.keys() & found.keys()
            loaded |= found
        for name, value in values.items():
            kind = getattr(torch, dtype)
            expected = torch.from_numpy(value).to(kind)
            assert torch.equal(loaded.pop(hugging_face_name(name)), expected)
        assert not loaded
        assert Path(folder, "model/note").read_bytes() == note
        index = Path(folder, "model/model.safetensors.index.json")
        assert index.exists() == (len(files) > 1)
        if index.exists():
            assert json.loads(index.read_text())["weight_map"] == of_files
        else:
            assert [path.name for path in files] == ["model.safetensors"]


def test_a_folder_of_damaged_files_is_never_made(root: Storage, tmp_path: Path) -> None:
    manifest = save_model(root, 8, spec_of(ModelSpec.model_validate(SIZES)))
    checkpoint = root.below(manifest.folder)
    content = bytearray(checkpoint.read("__0_0.distcp"))
    content[-1] ^= 1
    write_small(checkpoint, "__0_0.distcp", bytes(content))
    with pytest.raises(BadCheckpoint, match="__0_0"):
        export_folder(manifest, tmp_path / "model.tar")
