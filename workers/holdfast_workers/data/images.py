"""Decodes a folder of images into one file, once per node, and maps it into memory.

The folder has a subfolder for each class, in the order of their names, with PNG and JPEG files at
any depth; files of other types, and names that begin with a dot, are ignored. Images are turned as
their EXIF data says, put on black where they are transparent, and brought to one size: the middle
square, scaled. So a sample is a slice of the file, and nothing is decoded in training.
As for a corpus, the fingerprint of the content says whether nodes have the same data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.node_cache.cached_file import cached_file, source_key
from holdfast_workers.spec import MOST_CLASSES, DataSpec, ImageSizes

SUFFIXES = (".png", ".jpg", ".jpeg")
MOST_DECODED = 64_000_000
"""Pixels of an image: it is decoded as a whole before it is scaled."""
_FORMAT = "images 2"
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes with more than eight bits of a pixel; a conversion would cut them off."""


@dataclass(frozen=True)
class ImageSet:
    """Images and their classes on disk, mapped read-only."""

    records: NDArray[np.void]
    """The decoded images, of the type `_record_type`."""
    classes: tuple[str, ...]
    """The names of the classes; an image's class is an index into them."""
    fingerprint: str

    @property
    def samples(self) -> int:
        return len(self.records)

    def batch(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Images (len(samples), size, size, 3) and their classes (len(samples),)."""
        taken = self.records[samples]
        return np.ascontiguousarray(taken["pixels"]), taken["class"].astype(np.int64)


def open_images(data: DataSpec, cache_dir: Path, sizes: ImageSizes) -> ImageSet:
    """The images of `data`, decoded below `cache_dir` if they are not yet.

    Raises CorpusError if the folder does not have images of `sizes.classes` classes, or if an image
    cannot be decoded.
    """
    root = Path(data.source)
    classes = _classes(root)
    if len(classes) != sizes.classes:
        raise CorpusError(
            f"data.source {data.source!r} has images of {len(classes)} classes, model.classes is "
            f"{sizes.classes}: make them the same"
        )
    files = [(index, path) for index, name in enumerate(classes) for path in classes[name]]
    names = [(path.relative_to(root).as_posix(), path) for _, path in files]
    for _, path in names:
        if not path.is_file():
            raise CorpusError(f"{path} is no file, or a link that leads nowhere: remove it")
    key = source_key(f"{_FORMAT}/{sizes.image_size}", names)
    records = _decoded(files, sizes.image_size)
    file = cached_file(cache_dir, "images", key, records)
    mapped = np.memmap(file.path, dtype=_record_type(sizes.image_size), mode="r")
    return ImageSet(mapped, tuple(classes), file.fingerprint)


def _classes(root: Path) -> dict[str, list[Path]]:
    """The images of each class, by its name, in the order in which they are read."""
    if not root.is_dir():
        raise CorpusError(f"data.source {str(root)!r} is not a folder on this node")
    folders = sorted(path for path in root.iterdir() if _is_seen(path.name) and path.is_dir())
    found = {folder.name: _images_below(folder) for folder in folders}
    if not any(found.values()):
        kinds = ", ".join(SUFFIXES)
        raise CorpusError(
            f"data.source {str(root)!r} has no image ({kinds}) in a subfolder: put those of each "
            "class into a subfolder of its own"
        )
    empty = [name for name, images in found.items() if not images]
    if empty:
        raise CorpusError(f"data.source {str(root)!r} has no image of the class {empty[0]!r}")
    if len(found) == 1:
        (only,) = found
        raise CorpusError(
            f"data.source {str(root)!r} has images of one class only, {only!r}: add another"
        )
    if len(found) > MOST_CLASSES:
        raise CorpusError(
            f"data.source {str(root)!r} has {len(found)} classes, at most {MOST_CLASSES} can be "
            "learned"
        )
    return found


def _images_below(folder: Path) -> list[Path]:
    return sorted(
        Path(inner, name)
        for inner, folders, names in os.walk(folder, followlinks=True)
        for name in _without_circles(inner, folders, names)
        if _is_seen(name) and name.lower().endswith(SUFFIXES)
    )


def _without_circles(inner: str, folders: list[str], names: list[str]) -> list[str]:
    """`names`; removes from `folders` what is not walked: hidden ones, and links that lead back."""
    above = {path.resolve() for path in (Path(inner), *Path(inner).parents)}
    folders[:] = [
        each for each in folders if _is_seen(each) and Path(inner, each).resolve() not in above
    ]
    return names


def _is_seen(name: str) -> bool:
    return not name.startswith(".")


def _record_type(size: int) -> np.dtype[np.void]:
    return np.dtype([("pixels", np.uint8, (size, size, 3)), ("class", "<u2")])


def _decoded(files: Sequence[tuple[int, Path]], size: int) -> Iterator[bytes]:
    """A record of each file."""
    for index, path in files:
        yield _pixels(path, size) + index.to_bytes(2, "little")


def _pixels(path: Path, size: int) -> bytes:
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.mode in _WIDE_MODES:
                raise ValueError(f"its mode {image.mode} has more than 8 bits: convert it first")
            if image.width * image.height > MOST_DECODED:
                raise ValueError(f"{image.width} × {image.height} pixels, at most {MOST_DECODED}")
            image.draft("RGB", (size, size))  # a JPEG is decoded at a smaller scale
            upright = ImageOps.exif_transpose(image)
            square = ImageOps.fit(_on_black(upright), (size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorpusError(f"{path} cannot be decoded as an image: {error}") from error
    return square.tobytes()


def _on_black(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen).convert("RGB")
