import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from holdfast.data import digits


@pytest.mark.parametrize("size", [8, 12, 32])
def test_shapes_types_and_labels(size: int) -> None:
    arrays = digits.load(size)
    assert arrays["train_images"].shape == (1433, 3, size, size)
    assert arrays["test_images"].shape == (364, 3, size, size)
    assert arrays["train_images"].dtype == arrays["test_images"].dtype == np.uint8
    assert arrays["train_labels"].dtype == arrays["test_labels"].dtype == np.int64
    assert len(digits.CLASSES) == 10
    assert set(arrays["train_labels"]) == set(arrays["test_labels"]) == set(range(10))
    assert (arrays["train_images"][:, 0] == arrays["train_images"][:, 2]).all()


def test_first_four_fifths_of_every_class_train_and_the_rest_test() -> None:
    arrays = digits.load(8)
    original = load_digits()
    for c in range(10):
        of_class = np.round(original.images[original.target == c] * 255 / 16)
        train = arrays["train_images"][arrays["train_labels"] == c][:, 1]
        test = arrays["test_images"][arrays["test_labels"] == c][:, 1]
        assert len(train) == int(0.8 * len(of_class))
        np.testing.assert_array_equal(np.concatenate([train, test]), of_class)


def test_enlarging_is_bilinear() -> None:
    small, large = digits.load(8)["test_images"], digits.load(32)["test_images"]
    for row in (0, 100, 363):
        expected = Image.fromarray(small[row, 0]).resize((32, 32), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(large[row, 0], np.asarray(expected))


def test_mean_and_std_are_the_measured_ones() -> None:
    pixels = digits.load(8)["train_images"] / 255
    assert pixels.mean((0, 2, 3)).round(2).tolist() == list(digits.MEAN)
    assert pixels.std((0, 2, 3)).round(2).tolist() == list(digits.STD)
