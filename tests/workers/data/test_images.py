"""Images are decoded once, whole or not at all, and named by their content."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from holdfast_workers.data import images
from holdfast_workers.data.corpus import CorpusError
from holdfast_workers.data.images import ImageSet, open_images
from holdfast_workers.spec import DataSpec, ImageSizes

SIZES = ImageSizes(image_size=8, patch_size=4, classes=2)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    picture(folder / "dog" / "b.png", (0, 0, 200))
    picture(folder / "cat" / "deep" / "z.png", (200, 0, 0))
    picture(folder / "cat" / "a.JPG", (0, 200, 0))
    (folder / "cat" / "notes.txt").write_text("not an image")
    (folder / "list.csv").write_text("nor this")
    return folder


def opened(folder: Path, cache: Path, sizes: ImageSizes = SIZES) -> ImageSet:
    return open_images(DataSpec(source=str(folder)), cache, sizes)


def test_classes_and_images_are_in_the_order_of_their_names(pictures: Path, tmp_path: Path) -> None:
    found = opened(pictures, tmp_path / "cache")
    assert (found.classes, found.samples) == (("cat", "dog"), 3)
    pixels, classes = found.batch(np.array([2, 1, 0]))
    assert (pixels.shape, pixels.dtype) == ((3, 8, 8, 3), np.dtype(np.uint8))
    assert classes.tolist() == [1, 0, 0]
    assert pixels[0, 0, 0].tolist() == [0, 0, 200]
    assert pixels[1, 7, 7].tolist() == [200, 0, 0]
    np.testing.assert_allclose(pixels[2, 3, 3], [0, 200, 0], atol=3)  # JPEG is not exact


def test_the_middle_square_is_scaled(pictures: Path, tmp_path: Path) -> None:
    wide = Image.new("RGB", (40, 16), (0, 0, 0))
    wide.paste((90, 90, 90), (12, 0, 28, 16))
    wide.save(pictures / "dog" / "b.png")
    pixels, _ = opened(pictures, tmp_path / "cache").batch(np.array([2]))
    assert (pixels[:, :, 1:-1] == 90).all()  # the edges blend
    assert (pixels > 70).all()


def test_images_without_three_channels_become_colours(pictures: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 70).save(pictures / "dog" / "b.png")
    Image.new("RGBA", (8, 8), (1, 2, 3, 255)).save(pictures / "dog" / "c.png")
    Image.new("P", (8, 8)).save(pictures / "dog" / "d.png")
    pixels, _ = opened(pictures, tmp_path / "cache").batch(np.array([2, 3, 4]))
    assert [image[0, 0].tolist() for image in pixels] == [[70] * 3, [1, 2, 3], [0] * 3]


def test_an_image_is_turned_as_its_exif_data_says(pictures: Path, tmp_path: Path) -> None:
    turned = Image.new("RGB", (8, 8))
    turned.paste((250, 250, 250), (0, 0, 4, 8))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    turned.save(pictures / "dog" / "b.jpg", exif=exif, quality=95)
    pixels, _ = opened(pictures, tmp_path / "cache").batch(np.array([2]))
    assert pixels[0][0].min() > 200
    assert pixels[0][-1].max() < 50


def test_what_cannot_be_seen_is_black(pictures: Path, tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(pictures / "dog" / "b.png")
    pixels, _ = opened(pictures, tmp_path / "cache").batch(np.array([2]))
    assert not pixels.any()


def test_wide_pixels_and_huge_images_are_refused(pictures: Path, tmp_path: Path) -> None:
    Image.new("I;16", (8, 8), 4096).save(pictures / "dog" / "b.png")
    with pytest.raises(CorpusError, match=r"dog/b\.png .* more than 8 bits"):
        opened(pictures, tmp_path / "cache")
    Image.new("1", (9000, 9000)).save(pictures / "dog" / "b.png")
    with pytest.raises(CorpusError, match=r"9000 × 9000 pixels, at most 64000000"):
        opened(pictures, tmp_path / "cache")


def test_hidden_names_are_ignored_linked_folders_are_read_and_dead_links_are_named(
    pictures: Path, tmp_path: Path
) -> None:
    before = opened(pictures, tmp_path / "cache").samples
    (pictures / ".hidden").mkdir()
    (pictures / "dog" / "._b.png").write_bytes(b"no image")
    picture(tmp_path / "more" / "c.png", (1, 2, 3))
    (pictures / "dog" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "again").symlink_to(tmp_path / "more")
    assert opened(pictures, tmp_path / "cache").samples == before + 1
    (pictures / "dog" / "dead.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(CorpusError, match=r"dead\.png is no file, or a link that leads nowhere"):
        opened(pictures, tmp_path / "cache")


def test_a_second_opening_decodes_nothing(pictures: Path, tmp_path: Path) -> None:
    first = opened(pictures, tmp_path / "cache")
    with patch.object(images, "_pixels", side_effect=AssertionError):
        second = opened(pictures, tmp_path / "cache")
        with pytest.raises(AssertionError):
            opened(pictures, tmp_path / "cache", ImageSizes(4, 4, 2))
    assert second.fingerprint == first.fingerprint


def test_nodes_have_one_fingerprint_if_their_images_are_the_same(
    pictures: Path, tmp_path: Path
) -> None:
    first = opened(pictures, tmp_path / "cache").fingerprint
    shutil.copytree(pictures, tmp_path / "elsewhere")
    assert opened(tmp_path / "elsewhere", tmp_path / "other").fingerprint == first
    assert opened(pictures, tmp_path / "cache", ImageSizes(4, 4, 2)).fingerprint != first
    (pictures / "cat" / "a.JPG").rename(pictures / "dog" / "a.JPG")
    moved = opened(pictures, tmp_path / "cache").fingerprint
    picture(pictures / "dog" / "b.png", (0, 0, 201))
    changed = opened(pictures, tmp_path / "cache").fingerprint
    assert len({first, moved, changed}) == 3


def test_concurrent_openings_decode_once_and_leave_no_temporary_file(
    pictures: Path, tmp_path: Path
) -> None:
    decode = images._pixels
    with (
        patch.object(images, "_pixels", side_effect=decode) as decoded,
        ThreadPoolExecutor(8) as pool,
    ):
        found = list(pool.map(lambda _: opened(pictures, tmp_path / "cache"), range(8)))
    assert decoded.call_count == 3
    assert len({each.fingerprint for each in found}) == 1
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_truncated_file_is_decoded_again(pictures: Path, tmp_path: Path) -> None:
    whole = opened(pictures, tmp_path / "cache").records.tobytes()
    (cached,) = (tmp_path / "cache").glob("images-*")
    os.truncate(cached, 3)
    assert opened(pictures, tmp_path / "cache").records.tobytes() == whole


def test_a_missing_folder_a_file_and_a_folder_without_images_are_refused(
    pictures: Path, tmp_path: Path
) -> None:
    for source in (tmp_path / "nowhere", pictures / "list.csv"):
        with pytest.raises(CorpusError, match=f"{source.name}' is not a folder on this node"):
            opened(source, tmp_path / "cache")
    with pytest.raises(CorpusError, match=r"no image .* in a subfolder"):
        opened(pictures / "cat" / "deep", tmp_path / "cache")


def test_a_wrong_number_of_classes_is_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"2 classes, model.classes is 3"):
        opened(pictures, tmp_path / "cache", ImageSizes(8, 4, 3))
    (pictures / "bird").mkdir()
    with pytest.raises(CorpusError, match="no image of the class 'bird'"):
        opened(pictures, tmp_path / "cache")
    shutil.rmtree(pictures / "bird")
    shutil.rmtree(pictures / "cat")
    with pytest.raises(CorpusError, match="of one class only, 'dog'"):
        opened(pictures, tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"no image", "half"])
def test_an_image_that_cannot_be_decoded_is_named(
    pictures: Path, tmp_path: Path, content: bytes | str
) -> None:
    broken = pictures / "dog" / "b.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(CorpusError, match=r"dog/b\.png cannot be decoded as an image"):
        opened(pictures, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.part"))
    broken.write_bytes(whole)
    assert opened(pictures, tmp_path / "cache").samples == 3
