"""The settings of the data: which images, and which part of them."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.settings import STRICT, Count, setting


@dataclass(frozen=True, config=STRICT)
class DataSettings:
    """Which images, and which part of them."""

    name: str = setting("glyphs", "data set: see `holdfast data list`, or folder:<path>")
    path: str | None = setting(None, "the archive or folder of the data set, if it is not found below HOLDFAST_DATA")
    classes: Annotated[int, Field(ge=2, le=100_000)] | None = setting(
        None, "how many classes; all if not given, 25 for glyphs"
    )
    first_class: Annotated[int, Field(ge=0, le=100_000)] = setting(0, "leave out the classes before this one")
    train_per_class: Count | None = setting(
        None, "use only the first so many training images per class; in a federated folder, per class and client"
    )
    test_per_class: Count | None = setting(None, "use only the first so many test images per class")
    size: Annotated[int, Field(ge=16, le=512)] | None = setting(
        None, "image side in pixels; the data set's own if not given"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        0, "seed of the data; glyphs: which characters, and how they are drawn; folder: which images are for testing"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None, "folder without test images: the fraction of each class that is used for testing; 0.2 if not given"
    )
    flip: bool | None = setting(
        None, "allow mirrored images; the data set's own choice if not given, which is false for a folder"
    )
    corrupt: Literal["fail", "skip"] | None = setting(
        None, "images that cannot be read: fail (name them and stop) or skip (name them and continue); default: fail"
    )
