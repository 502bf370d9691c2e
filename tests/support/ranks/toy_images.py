"""Small images whose class can be seen: a coloured square, at another place for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_images(folder: Path, *, classes: int = 4, per_class: int = 12, size: int = 16) -> None:
    """PNG files of noise with a coloured square, in a subfolder of `folder` for each class."""
    noise = np.random.default_rng(3)
    half = size // 2
    for number in range(classes):
        place = folder / f"class-{number}"
        place.mkdir(parents=True)
        top, left = half * (number // 2 % 2), half * (number % 2)
        for image in range(per_class):
            pixels = noise.integers(0, 120, (size, size, 3), dtype=np.uint8)
            pixels[top : top + half, left : left + half, number % 3] += np.uint8(100)
            Image.fromarray(pixels).save(place / f"{image}.png")
