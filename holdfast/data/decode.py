"""Turns an image file of any kind into square RGB pixels, for training data and for a user's own photos."""

from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from holdfast.errors import HoldfastError


class BadImage(HoldfastError):
    """A file exists but cannot be read as an image."""


def decode_image(file: BinaryIO | Path, size: int, name: str) -> np.ndarray:
    """The centre square of the image, upright and resized: (3, size, size) uint8; error messages call it `name`."""
    try:
        with Image.open(file) as image:
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(_centre_square(_to_rgb(image), size))  # (size, size, 3)
    except FileNotFoundError as error:
        raise BadImage(f"there is no image {name}; check the path") from error
    except Exception as error:  # Pillow's readers raise nearly any type on a broken file
        raise BadImage(f"{name} cannot be read as an image ({_reason(error)}); replace or remove it") from error
    return pixels.transpose(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Eight bits of red, green and blue: transparent parts become white, 16-bit grey is scaled down."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range")
    if image.mode.startswith("I"):  # Pillow would clip these at 255; "I" is how its older versions open 16-bit PNG
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _centre_square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.resize((size, size), Image.Resampling.BOX, box=(left, top, left + side, top + side))


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # its text names a Python object, not the file
        return "no known image format"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
