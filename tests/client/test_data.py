"""The images of one client: its data by ids from 0 on, and the copies that it keeps, by negative ids."""

import pytest
import torch
from torch import Tensor

from holdfast.client.data import ClientImages
from holdfast.data.images import Images, ImageSet
from holdfast.protocol.codec import MalformedMessage, pack

SIZE = 4


def pictures(*shades: int) -> Tensor:
    """Images (N, 3, S, S), each of its own shade."""
    return torch.tensor(shades, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIZE, SIZE).contiguous()


def image_set(shades: list[int], labels: list[int]) -> ImageSet:
    return ImageSet(Images(pictures(*shades)), torch.tensor(labels, dtype=torch.int64))


def shades_of(images: ClientImages, ids: Tensor) -> list[int]:
    pixels = images.pixels(ids)
    assert pixels.dtype == torch.uint8
    assert pixels.shape[1:] == (3, SIZE, SIZE)
    assert all(bool((one == one[0, 0, 0]).all()) for one in pixels)
    return pixels[:, 0, 0, 0].tolist()


def names_of(images: ClientImages, ids: Tensor) -> list[str]:
    return [images.classes[c] for c in images.class_of(ids).tolist()]


def owls_and_foxes() -> ClientImages:
    """Images 0 to 5; 1 and 4 are equal owls, 2 is a fox that looks the same."""
    return ClientImages(image_set([10, 20, 20, 30, 20, 40], [1, 1, 0, 0, 1, 0]), ("fox", "owl"))


def test_ids_from_zero_on_are_data_and_negative_ids_are_copies() -> None:
    images = owls_and_foxes()
    every = torch.arange(6)
    assert shades_of(images, every) == [10, 20, 20, 30, 20, 40]
    assert names_of(images, every) == ["owl", "owl", "fox", "fox", "owl", "fox"]
    (copied,) = images.copy({"fox": torch.tensor([5, 3]), "owl": torch.tensor([0])})
    assert {name: ids.tolist() for name, ids in copied.items()} == {"fox": [-1, -2], "owl": [-3]}
    mixed = torch.tensor([-3, 2, -1, 0, -2])
    assert shades_of(images, mixed) == [10, 20, 40, 10, 30]
    assert names_of(images, mixed) == ["owl", "fox", "fox", "owl", "fox"]
    assert shades_of(images, torch.tensor([-2, -2])) == [30, 30]
    assert shades_of(images, every) == [10, 20, 20, 30, 20, 40]
    assert len(images.pixels(torch.empty(0, dtype=torch.int64))) == 0
    with pytest.raises(IndexError):
        images.pixels(torch.tensor([-4]))


def test_equal_images_of_a_class_are_copied_once() -> None:
    images = owls_and_foxes()
    memory, data = images.copy({"owl": torch.tensor([1, 0]), "fox": torch.tensor([2])}, {"owl": torch.tensor([4, 1])})
    assert memory["owl"].tolist() == [-1, -2]
    assert data["owl"].tolist() == [-1, -1]  # both equal the first owl
    assert memory["fox"].tolist() == [-3]  # it looks the same, but is of another class
    assert names_of(images, torch.tensor([-1, -2, -3])) == ["owl", "owl", "fox"]
    assert shades_of(images, torch.tensor([-1, -2, -3])) == [20, 10, 20]
    assert len(images.copies) == 3


def test_copies_are_copied_again_and_all_others_forgotten() -> None:
    images = owls_and_foxes()
    (first,) = images.copy({"owl": torch.tensor([0, 1]), "fox": torch.tensor([3, 5])})
    assert len(images.copies) == 4
    # Kept: one owl and one fox, in another order; new: a fox from the data; an image that is a copy already stays one.
    kept, new = images.copy({"fox": first["fox"][1:], "owl": first["owl"][:1]}, {"fox": torch.tensor([2, 5])})
    assert shades_of(images, kept["fox"]) == [40]
    assert shades_of(images, kept["owl"]) == [10]
    assert shades_of(images, new["fox"]) == [20, 40]
    assert new["fox"][1] == kept["fox"][0]
    assert len(images.copies) == len(images.copied) == 3
    assert all(int(ids.max()) < 0 for held in (kept, new) for ids in held.values())
    # As many as before, in another order.
    turned, one = images.copy({"fox": new["fox"].flip(0)}, {"owl": torch.tensor([1])})
    assert shades_of(images, turned["fox"]) == [40, 20]
    assert shades_of(images, one["owl"]) == [20]
    assert images.copy({}, {"owl": torch.empty(0, dtype=torch.int64)})[1]["owl"].tolist() == []
    assert len(images.copies) == len(images.copied) == 0


def test_copies_do_not_change_with_the_data() -> None:
    stored = pictures(10, 20)
    images = ClientImages(ImageSet(Images(stored), torch.tensor([0, 0])), ("owl",))
    (copied,) = images.copy({"owl": torch.tensor([0, 1])})
    stored.zero_()
    assert shades_of(images, torch.arange(2)) == [0, 0]
    assert shades_of(images, copied["owl"]) == [10, 20]


def test_other_data_leaves_copies_and_their_classes() -> None:
    images = owls_and_foxes()
    (copied,) = images.copy({"owl": torch.tensor([1]), "fox": torch.tensor([3, 5])})
    images.replace_data(image_set([50, 60], [0, 1]), ("elk", "owl"))
    assert images.classes[:2] == ["elk", "owl"]
    assert shades_of(images, torch.arange(2)) == [50, 60]
    assert names_of(images, torch.arange(2)) == ["elk", "owl"]
    assert shades_of(images, copied["fox"]) == [30, 40]
    assert names_of(images, copied["fox"]) == ["fox", "fox"]
    assert names_of(images, copied["owl"]) == ["owl"]
    # Again, with copies of both: a class without copies and without data is no longer known.
    both = images.copy({"elk": torch.tensor([0]), "owl": copied["owl"]})[0]
    images.replace_data(image_set([70], [0]), ("hen",))
    assert sorted(images.classes) == ["elk", "hen", "owl"]
    assert shades_of(images, both["elk"]) == [50]
    assert names_of(images, torch.cat([both["elk"], both["owl"], torch.tensor([0])])) == ["elk", "owl", "hen"]


def test_copies_travel_as_bytes_beside_other_data() -> None:
    images = owls_and_foxes()
    (copied,) = images.copy({"owl": torch.tensor([1]), "fox": torch.tensor([3, 5])})
    blob = images.to_bytes()
    same, other = owls_and_foxes(), ClientImages(image_set([50, 60], [0, 1]), ("elk", "owl"))
    for loaded in (same, other):
        loaded.take_copies(blob)
        assert shades_of(loaded, copied["fox"]) == [30, 40]
        assert names_of(loaded, copied["fox"]) == ["fox", "fox"]
        assert shades_of(loaded, copied["owl"]) == [20]
        assert names_of(loaded, copied["owl"]) == ["owl"]
    assert same.classes == ["fox", "owl"]
    assert shades_of(other, torch.arange(2)) == [50, 60]
    assert names_of(other, torch.arange(2)) == ["elk", "owl"]
    empty = owls_and_foxes()
    images.take_copies(empty.to_bytes())
    assert len(images.copies) == len(images.copied) == 0


COPIES, COPIED, NAMES = pictures(1, 2), torch.tensor([0, 1]), {"classes": ["fox", "owl"]}


def packed(facts: dict[str, object], **tensors: Tensor) -> bytes:
    return pack("copies", tensors, facts)


MALFORMED = {
    "not a message": b"something else altogether",
    "empty": b"",
    "another kind": pack("state", {"copies": COPIES, "copied": COPIED}, NAMES),
    "no classes": packed({}, copies=COPIES, copied=COPIED),
    "classes that are no names": packed({"classes": [1, 2]}, copies=COPIES, copied=COPIED),
    "no copies": packed(NAMES, copied=COPIED),
    "no classes of copies": packed(NAMES, copies=COPIES),
    "too few classes of copies": packed(NAMES, copies=COPIES, copied=COPIED[:1]),
    "a class without a name": packed({"classes": ["fox"]}, copies=COPIES, copied=COPIED),
    "a negative class": packed(NAMES, copies=COPIES, copied=-COPIED),
    "images of another size": packed(NAMES, copies=COPIES[..., :2], copied=COPIED),
    "classes that are no whole numbers": packed(NAMES, copies=COPIES, copied=COPIED.float()),
    "a table of classes": packed(NAMES, copies=COPIES, copied=COPIED.view(2, 1)),
    "a single number": packed(NAMES, copies=torch.tensor(1), copied=COPIED),
    "pixels that are no bytes": packed(NAMES, copies=COPIES.float(), copied=COPIED),
}


@pytest.mark.parametrize("damage", MALFORMED)
def test_malformed_copies_are_refused_and_changes_nothing(damage: str) -> None:
    images = owls_and_foxes()
    (copied,) = images.copy({"owl": torch.tensor([0])})
    with pytest.raises(MalformedMessage) as refused:
        images.take_copies(MALFORMED[damage])
    assert "\n" not in str(refused.value)
    assert images.classes == ["fox", "owl"]
    assert shades_of(images, copied["owl"]) == [10]


def test_copies_that_are_cut_off_are_refused() -> None:
    images = owls_and_foxes()
    images.copy({"owl": torch.tensor([0])})
    blob = images.to_bytes()
    for length in (7, 40, len(blob) - 1):
        with pytest.raises(MalformedMessage):
            owls_and_foxes().take_copies(blob[:length])
