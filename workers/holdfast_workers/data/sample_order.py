"""The sample at each position of training: a pure function of (seed, epoch, position).

Positions count samples from the start of the run. Each epoch is a permutation of all samples,
computed element by element (a Feistel network over the smallest even-bit domain, walked until it
falls inside the range; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). So no
list is kept, any rank can compute any position, and the whole state is one integer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_SHIFTS = (30, 27, 31)
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_OF_WORDS = (*map(np.uint64, _SHIFTS), *map(np.uint64, _MULTIPLIERS))
"""Both for arrays: to convert them takes as long as to use them."""
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_BLOCK = 4096

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]


def permute(positions: Indices, samples: int, seed: int, epoch: int) -> Indices:
    """The samples at `positions` of an epoch: a bijection on [0, samples)."""
    if samples < 1:
        raise ValueError("there are no samples to order")
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    order = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(order >= samples)
    while outside.size:
        order[outside] = _feistel(order[outside], half_bits, keys)
        outside = outside[order[outside] >= samples]
    return order.astype(np.int64)


def samples_at(positions: Indices, samples: int, seed: int) -> Indices:
    """The sample at each position of the run; positions may span epochs."""
    epochs, within = np.divmod(positions, samples)
    order = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        order[chosen] = permute(within[chosen], samples, seed, int(epoch))
    return order


class ConsecutiveSamples:
    """Samples at consecutive positions, looked up in blocks: a few of them take nearly as long as
    many. Thread-safe."""

    def __init__(self, samples_at: Callable[[Indices], Indices]) -> None:
        def block(number: int) -> Indices:
            return samples_at(np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64))

        self._samples_at = samples_at
        self._block = lru_cache(2)(block)

    def samples_at(self, positions: Indices) -> Indices:
        """What `samples_at` says of these positions, whatever they are."""
        blocks = positions // _BLOCK
        if not len(blocks) or (blocks != blocks[0]).any():
            return self._samples_at(positions)
        number = int(blocks[0])
        return self._block(number)[positions - number * _BLOCK]


def derived_seed(seed: int, *parts: int) -> int:
    """The seed of a part of an order, such as a group of samples: 64 bits, scrambled."""
    word = seed & _WORD
    for part in parts:
        word = _mix_word(_mix_word(word) + part)
    return word


def micro_batch_positions(
    window: int,
    micro_batch_index: int,
    *,
    data_index: int,
    data_parallel: int,
    micro_batch: int,
    global_batch: int,
) -> Indices:
    """The positions that one data-parallel rank reads in one micro-batch of a step.

    A step reads a window of `global_batch` positions (0 is the first window; the `Ledger` assigns
    windows to steps). The window is cut into micro-batches, dealt to the data-parallel ranks in
    turn. `data_index` is the rank's index among them, `data_parallel` their number. Where they are
    not dealt evenly, there is none left for the last pass of some ranks: no positions.
    """
    dealt = (micro_batch_index * data_parallel + data_index) * micro_batch
    if dealt >= global_batch:
        return np.arange(0, dtype=np.int64)
    start = window * global_batch + dealt
    return np.arange(start, start + micro_batch, dtype=np.int64)


def passes(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Forward and backward passes of a step, the same on every rank."""
    return -(-global_batch // (micro_batch * data_parallel))


def samples_digest(positions: Indices, samples: Indices) -> int:
    """64-bit digest of a set of (position, sample) pairs.

    Digests of disjoint sets add up (modulo 2**64) to the digest of their union, so the digest of
    a step does not depend on how many ranks shared it.
    """
    words = _mix(_mix(positions.astype(np.uint64)) + samples.astype(np.uint64))
    return int(words.sum(dtype=np.uint64))


def _feistel(values: _Words, half_bits: int, keys: list[np.uint64]) -> _Words:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    start = derived_seed(seed, epoch)
    return [np.uint64(_mix_word(start + _GOLDEN * (round_ + 1))) for round_ in range(_ROUNDS)]


def _mix(words: _Words) -> _Words:
    """Scramble each 64-bit word, bijectively (finalizer of SplitMix64, Steele et al. 2014). Arrays
    wrap around silently, unlike numpy's scalars."""
    shift_0, shift_1, shift_2, factor_0, factor_1 = _OF_WORDS
    words = (words ^ (words >> shift_0)) * factor_0
    words = (words ^ (words >> shift_1)) * factor_1
    return words ^ (words >> shift_2)


def _mix_word(word: int) -> int:
    """`_mix` of one word, whose higher bits are cut off: faster than an array of it."""
    (shift_0, shift_1, shift_2), (factor_0, factor_1) = _SHIFTS, _MULTIPLIERS
    word &= _WORD
    word = (word ^ (word >> shift_0)) * factor_0 & _WORD
    word = (word ^ (word >> shift_1)) * factor_1 & _WORD
    return word ^ (word >> shift_2)
