"""Model FLOPs utilisation (MFU): the share of a device's peak that a training run reaches."""

from __future__ import annotations

from holdfast_workers.spec import BYTE_VOCABULARY, ModelSpec

_PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 tensor-core peaks from the manufacturers' data sheets, by a part of the device
name."""


def flops_per_token(parameters: int, spec: ModelSpec, vocabulary: int = BYTE_VOCABULARY) -> float:
    """Training FLOPs per token of a text, or per patch of an image: 6 · N + 12 · L · H · Q · T.

    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B: N parameters without the embedding
    table (a look-up does no arithmetic), unless the head uses the table too; L layers, H heads of
    size Q, sequence length T. Causal masking is not discounted and recomputation is not counted.
    Of blocks with a window of attention, T is the window. Of images, N has no positions, and the
    head's share of a patch, as it sees only their mean.
    """
    if spec.family == "vit":
        head = spec.images.classes * spec.dim
        multiplied = parameters - spec.positions * spec.dim - head + head / spec.positions
    else:
        multiplied = parameters - (0 if spec.tied_embeddings else vocabulary * spec.dim)
    seen = sum(spec.window_of(block) or spec.positions for block in range(spec.layers))
    return 6.0 * multiplied + 12.0 * spec.heads * spec.width * seen


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device by its name, longest match first; None if it is unknown."""
    for name in sorted(_PEAK_BF16_FLOPS, key=len, reverse=True):
        if name in device_name:
            return _PEAK_BF16_FLOPS[name]
    return None
