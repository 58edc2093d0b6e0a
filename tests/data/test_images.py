"""ImageSet and DataSet."""

import torch

from holdfast.data.images import DataSet, Images, ImageSet

LABELS = torch.tensor([2, 0, 1, 2, 0, 1])


def image_set() -> ImageSet:
    return ImageSet(Images(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 3, 4, 4)), LABELS)


def test_by_class_lists_each_class_in_order() -> None:
    assert {c: rows.tolist() for c, rows in image_set().by_class.items()} == {0: [1, 4], 1: [2, 5], 2: [0, 3]}


def test_select_keeps_the_first_images_and_renumbers_the_classes() -> None:
    part = image_set().select([2, 0], 1)
    assert part.images[:][:, 0, 0, 0].tolist() == [0, 1]
    assert part.labels.tolist() == [0, 1]


def test_a_data_set_keeps_names_with_their_classes() -> None:
    data = DataSet("x", ("a", "b", "c"), image_set(), image_set(), (0.0,) * 3, (1.0,) * 3, True)
    part = data.select([2, 1], None, 1)
    assert part.classes == ("c", "b")
    assert (len(part.train), len(part.test), part.size) == (4, 2, 4)
