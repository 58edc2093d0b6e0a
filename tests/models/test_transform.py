"""Augmentation, image by image against the plain definition."""

import pytest
import torch

from holdfast.models.transform import BRIGHTNESS, Transform, crop_and_flip
from holdfast.seeding import torch_generator

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)


def images(count: int = 6, size: int = 10) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch_generator(0))


def test_plain_normalises_each_channel() -> None:
    x = images()
    y = Transform(MEAN, STD, flip=True).plain(x)
    for c in range(3):
        torch.testing.assert_close(y[:, c], (x[:, c] / 255 - MEAN[c]) / STD[c])


def test_crop_and_flip_equal_cutting_each_image_by_hand() -> None:
    x = images()
    shifts = torch.tensor([[0, 0], [8, 8], [4, 4], [1, 7], [3, 0], [4, 4]])
    mirrored = torch.tensor([False, False, False, False, True, True])
    y = crop_and_flip(x, shifts, mirrored)
    for i, (row, column) in enumerate(shifts.tolist()):
        padded = torch.zeros(3, 18, 18, dtype=torch.uint8)
        padded[:, 4:14, 4:14] = x[i]
        cut = padded[:, row : row + 10, column : column + 10]
        assert torch.equal(y[i], cut.flip(-1) if mirrored[i] else cut)
    assert torch.equal(y[2], x[2])
    assert torch.equal(y[5], x[5].flip(-1))


def test_all_draws_come_from_the_given_generator() -> None:
    transform, before = Transform(MEAN, STD, flip=True), torch.get_rng_state()
    first = transform.augmented(images(), torch_generator(1))
    assert torch.equal(first, transform.augmented(images(), torch_generator(1)))
    assert not torch.equal(first, transform.augmented(images(), torch_generator(2)))
    assert torch.equal(before, torch.get_rng_state())


def test_brightness_and_clamping_stay_in_bounds() -> None:
    white = torch.full((500, 3, 16, 16), 200, dtype=torch.uint8)
    y = Transform((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), flip=False).augmented(white, torch_generator(3))
    centre = y[:, 0, 8, 8] * 255 / 200  # the brightness factor, as no crop moves the centre off the image
    assert centre.max() <= 255 / 200 + 1e-6  # clamped at white
    assert centre.min() >= 1 - BRIGHTNESS - 1e-6
    assert centre.std() > 0.08
    assert torch.equal(y[:, 0, 8, 8], y[:, 2, 8, 8])  # one factor an image


@pytest.mark.parametrize("flip", [True, False])
def test_only_data_that_may_be_mirrored_is(flip: bool) -> None:
    ramp = torch.arange(16, dtype=torch.uint8).mul(10).expand(200, 3, 16, 16).contiguous()
    y = Transform((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), flip=flip).augmented(ramp, torch_generator(4))
    falling = (y[:, 0, 8, 4] > y[:, 0, 8, 11]).float().mean()
    assert 0.35 < falling < 0.65 if flip else falling == 0


def test_the_result_is_channels_last() -> None:
    assert (
        Transform(MEAN, STD, True)
        .augmented(images(), torch_generator(0))
        .is_contiguous(memory_format=torch.channels_last)
    )
    assert Transform(MEAN, STD, True).plain(images()).is_contiguous(memory_format=torch.channels_last)
