"""Tiny models that the library transformers makes and saves, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE = {"intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA = {**_WIDE, "head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Learned positions, dropout, a head that is the embedding, transposed matrices.
    "gpt2": ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "gpt2, without dropout": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "qwen2": ("qwen2", {**_WIDE, "tie_word_embeddings": False}),
    # Scaled embeddings, two kinds of blocks, eager attention, capped logits.
    "gemma2": ("gemma2", {**_GEMMA, "sliding_window": 8}),
    # Two tables of rotary angles.
    "gemma3_text": ("gemma3_text", {**_GEMMA, "sliding_window": 8, "sliding_window_pattern": 2}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1}),
    "falcon": ("falcon", {"alibi": True, "bias": True}),
    "bloom": ("bloom", {}),
    "phi": ("phi", {"intermediate_size": 48, "partial_rotary_factor": 0.5, "resid_pdrop": 0.1}),
    "phi3": ("phi3", {**_WIDE}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 48}),
    "mixtral": ("mixtral", {**_WIDE, "num_local_experts": 4}),
    # Numbers that are saved beside the parameters.
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{"intermediate_size": 48, "moe_intermediate_size": 16, "num_key_value_heads": 4},
            **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
            **{"v_head_dim": 8, "first_k_dense_replace": 1},
        },
    ),
    "mamba": ("mamba", {"state_size": 4, "expand": 2}),
}
"""The `model_type`, and what its configuration has beside `SIZES`."""


def save_model(folder: Path, case: str, dtype: str = "float32", **changes: Any) -> Any:
    """Save a model of which no weight is without effect, under the names that it has in the
    library. Returns it."""
    import torch  # late, as the library: every run of tests collects this module
    import transformers

    kind, settings = CASES[case]
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    config = config_class(**{**SIZES, **settings, **changes})
    torch.manual_seed(5)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        tables = {*dict(model.named_buffers())} - {*model.state_dict()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in tables:
                tensor.add_(torch.randn(tensor.shape) / 8)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size="20KB", save_original_format=False
    )
    return model
