import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.data.decode import decode_image
from holdfast.errors import HoldfastError

RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def encoded(image: Image.Image, kind: str, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def pixel(array: np.ndarray, row: int, column: int) -> tuple[int, ...]:
    return tuple(array[:, row, column].tolist())


def test_same_size_is_returned_bit_by_bit() -> None:
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (16, 16, 3), np.uint8)
    decoded = decode_image(encoded(Image.fromarray(pixels), "PNG"), 16, "x")
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels.transpose(2, 0, 1))


def test_shrinking_is_the_mean_of_boxes_and_enlarging_repeats() -> None:
    pixels = np.array([[0, 100], [60, 40]], np.uint8).repeat(2, 0).repeat(2, 1)
    file = encoded(Image.fromarray(pixels), "PNG")
    assert decode_image(file, 1, "x").tolist() == [[[50]]] * 3
    file.seek(0)
    np.testing.assert_array_equal(decode_image(file, 8, "x")[0], pixels.repeat(2, 0).repeat(2, 1))


@pytest.mark.parametrize("wide", [True, False])
def test_long_image_gives_its_centre(wide: bool) -> None:
    image = Image.new("RGB", (24, 8), RED)
    image.paste(GREEN, (8, 0, 16, 8))
    if not wide:
        image = image.transpose(Image.Transpose.ROTATE_90)
    decoded = decode_image(encoded(image, "PNG"), 4, "x")
    assert decoded.shape == (3, 4, 4)
    assert {pixel(decoded, r, c) for r in range(4) for c in range(4)} == {GREEN}


def test_exif_orientation_is_respected() -> None:
    image = Image.new("RGB", (8, 8), RED)
    image.paste(GREEN, (0, 0, 8, 4))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    decoded = decode_image(encoded(image, "PNG", exif=exif), 2, "x")
    assert pixel(decoded, 0, 0) == RED
    assert pixel(decoded, 1, 0) == GREEN


def test_alpha_lies_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 255, 0, 255))
    image = image.resize((4, 4), Image.Resampling.NEAREST)
    decoded = decode_image(encoded(image, "PNG"), 4, "x")
    assert pixel(decoded, 0, 0) == WHITE
    assert pixel(decoded, 0, 3) == GREEN


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((0, 0), 0)
    opaque = decode_image(encoded(image, "PNG"), 4, "x")
    clear = decode_image(encoded(image, "PNG", transparency=0), 4, "x")
    assert (pixel(opaque, 0, 0), pixel(opaque, 3, 3)) == (RED, GREEN)
    assert (pixel(clear, 0, 0), pixel(clear, 3, 3)) == (WHITE, GREEN)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    values = np.array([[0, 257 * 100 + 99], [257 * 200 + 99, 65535]], np.uint16)
    decoded = decode_image(encoded(Image.fromarray(values), kind), 2, "x")
    assert decoded.tolist() == [[[0, 100], [200, 255]]] * 3


def test_grey_and_black_and_white_become_three_equal_channels() -> None:
    assert (decode_image(encoded(Image.new("L", (4, 4), 77), "JPEG"), 4, "x") == 77).all()
    assert (decode_image(encoded(Image.new("1", (4, 4), 1), "PNG"), 4, "x") == 255).all()


def test_cmyk_becomes_rgb() -> None:
    decoded = decode_image(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), 8, "x")
    red, green, blue = decoded.reshape(3, -1).mean(1)
    assert red > 240
    assert max(green, blue) < 15


def test_path_and_open_file_give_the_same(tmp_path: Path) -> None:
    file = encoded(Image.linear_gradient("L"), "JPEG")
    path = tmp_path / "gradient.jpg"
    path.write_bytes(file.getvalue())
    np.testing.assert_array_equal(decode_image(path, 32, "x"), decode_image(file, 32, "x"))


def noise(kind: str) -> bytes:
    pixels = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (32, 32, 3), np.uint8)
    return encoded(Image.fromarray(pixels), kind).getvalue()


BROKEN = {
    "empty": b"",
    "text": b"I am not an image",
    "half a JPEG": noise("JPEG")[:900],
    "half a PNG": noise("PNG")[:900],
    "PNG of which only the signature is left": noise("PNG")[:8],
    "GIF without pictures": noise("GIF")[:40],
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_sentence_with_its_name(case: str) -> None:
    with pytest.raises(HoldfastError, match=r"^holiday\.jpg cannot be read as an image \(.+\); ") as caught:
        decode_image(io.BytesIO(BROKEN[case]), 16, "holiday.jpg")
    assert "BytesIO" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_floating_point_pixels_are_refused_not_guessed() -> None:
    with pytest.raises(HoldfastError, match="floating-point"):
        decode_image(encoded(Image.new("F", (4, 4), 0.5), "TIFF"), 4, "x.tiff")


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"^there is no image holiday\.jpg; check the path$"):
        decode_image(tmp_path / "holiday.jpg", 16, "holiday.jpg")
