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
        None, "only the first so many training images of a class; in a federated folder, of each client"
    )
    test_per_class: Count | None = setting(None, "only the first so many test images of a class")
    size: Annotated[int, Field(ge=16, le=512)] | None = setting(
        None, "image side in pixels; the data set's own, if not given"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        0, "of generated data: which characters, and how they are drawn; of folders: which images are for testing"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        None, "of a folder without test images: the part of each class that is drawn for testing; 0.2 if not given"
    )
    flip: bool | None = setting(
        None, "may images be mirrored? the data set's own, if not given; not those of one's own folders"
    )
    corrupt: Literal["fail", "skip"] | None = setting(
        None, "images that cannot be read: fail (name them and stop), or skip (name them and go on); fail if not given"
    )
