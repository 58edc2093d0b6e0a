"""Turns an image file of any kind into square RGB pixels, for training data and for a user's own photos."""

import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from holdfast.errors import HoldfastError

LARGEST = 2**28  # bytes of an image file
MOST_PIXELS = 89_478_485  # from here on Pillow warns of a decompression bomb; 716 MB while it is decoded
STRIP = 2**22  # pixels that are converted at once, because some conversions take 16 bytes per pixel
# Formats that are read. Pillow would start another program for some of the others, whatever the file's name is.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "PPM", "WEBP", "TIFF", "JPEG2000")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit is an error here


class BadImage(HoldfastError):
    """A file exists but cannot be read as an image."""


def decode_image(file: BinaryIO | Path, size: int, name: str) -> np.ndarray:
    """The centre square of the image, upright and resized: (3, size, size) uint8; error messages call it `name`."""
    try:
        if isinstance(file, Path) and file.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        with Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, and at most {MOST_PIXELS:,} are read")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(_centre_square(_to_rgb(image), size))  # (size, size, 3)
    except FileNotFoundError as error:
        raise BadImage(f"there is no image {name}; check the path") from error
    except Exception as error:  # Pillow's readers raise nearly any type on a broken file
        raise BadImage(f"{name} cannot be read as an image ({_reason(error)}); replace or remove it") from error
    return pixels.transpose(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Eight bits of red, green and blue, converted strip by strip."""
    rows = max(1, STRIP // image.width)
    if image.height <= rows:
        return _converted(image)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(_converted(strip), (0, top))
    return whole


def _converted(image: Image.Image) -> Image.Image:
    """Transparent parts become white, 16-bit grey is scaled down."""
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
