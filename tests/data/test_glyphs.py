"""The embedded glyphs: every class legible and unlike the others, every image a function of its seed."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from holdfast.data import glyphs
from holdfast.data.glyphs import CHARACTERS, class_characters, faces_of, render
from holdfast.errors import HoldfastError

# Each string is a group of look-alikes, by code where Latin, Greek and Cyrillic letters cannot be told apart here.
CONFUSABLE = [
    "Oo0\u039f\u03bf\u041e\u043e\u25cb\u25ef",
    "1lI|i!\u0399\u0406\u2160\u2223",
    "Cc\u03f9\u0421\u0441",
    "Ss\u0405\u0455",
    "Vv\u03bd\u0474\u2228\u2164",
    "Ww\u051c\u051d",
    "Xx\u0425\u0445\u03a7\u03c7\u00d7\u2715\u2169",
    "Zz\u0396",
    "Kk\u039a\u03ba\u041a\u043a",
    "Pp\u03a1\u03c1\u0420\u0440",
    "Yy\u03a5\u0423\u0443\u04ae\u03b3",
    "Uu\u222a\u22c3",
    "Jj\u0408\u0458",
    "A\u0391\u0410",
    "B\u0392\u0412\u0432\u00df",
    "E\u0395\u0415",
    "H\u0397\u041d\u043d",
    "M\u039c\u041c\u043c",
    "N\u039d",
    "T\u03a4\u0422\u0442\u22a4",
    "a\u0430",
    "e\u0435",
    "3\u0417\u0437\u0292\u04e0",
    "9gq",
    "\u0393\u0413\u0433r",
    "\u03a0\u041f\u043f\u220f\u2229",
    "\u03a6\u0424\u0444\u03c6",
    "\u03a8\u03c8\u0470",
    "\u0394\u2206\u25b3",
    "\u03a3\u2211",
    "\u03a9\u2126",
    "\u039b\u2227^\u041b",
    "\u0398\u03b8\u0472\u2296",
    "\u039e\u2261\u2630",
    "\u03bc\u00b5",
    "\u0428\u0448\u0429\u0449",
    "\u0426\u0446\u040f",
    "-_~\u2013\u2014\u2212",
    "/\\|\u2044",
    "\u263a\u263b\u2639",
    "\u2654\u265a",
    "\u2657\u265d",
    "\u25d0\u25d1",
    "\u259a\u259e",
    "\u266a\u2669",
    "\u266b\u266c",
    "\u264d\u264f",
    "\u2665\u2661\u2764",
]
LOOK_ALIKE = 0.945  # correlation of two blurred, equally large glyphs
BLUR = 0.6  # in pixels of a 24 x 24 image: little enough that hatching survives
STRETCHES = (0.8, 0.9, 1.0, 1.1, 1.25)  # faces differ in width


def digest(arrays: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def ink_of(images: np.ndarray) -> np.ndarray:
    """(N, S, S): how far each pixel is from the paper, whose colour the border shows."""
    images = images.astype(np.float32) / 255
    border = np.concatenate([images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], axis=2)
    return np.abs(images - np.median(border, axis=2)[:, :, None, None]).mean(1)


def normalised(character: str, stretch: float = 1) -> np.ndarray:
    """The glyph in its first face, blurred, as large as fits 24 x 24, with zero mean and unit length."""
    mask = glyphs._mask(character, faces_of(character)[0], 96)
    width, height = mask.width * stretch, mask.height
    scale = 20 / max(width, height)
    mask = mask.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BOX)
    square = Image.new("L", (24, 24))
    square.paste(mask, ((24 - mask.width) // 2, (24 - mask.height) // 2))
    pixels = np.asarray(square.filter(ImageFilter.GaussianBlur(BLUR)), np.float64).ravel()
    pixels -= pixels.mean()
    return pixels / np.linalg.norm(pixels)


def test_at_least_500_different_characters() -> None:
    assert len(CHARACTERS) >= 500
    assert len(set(CHARACTERS)) == len(CHARACTERS)
    assert all(len(faces_of(character)) >= 2 for character in CHARACTERS)


@pytest.mark.parametrize("group", CONFUSABLE)
def test_one_of_a_group_of_look_alikes_at_most(group: str) -> None:
    present = set(group) & set(CHARACTERS)
    assert len(present - {"i"}) <= 1, present  # i keeps its dot


def test_no_two_glyphs_coincide() -> None:
    shapes = np.stack([normalised(character) for character in CHARACTERS])
    for stretch in STRETCHES:
        alike = shapes @ np.stack([normalised(character, stretch) for character in CHARACTERS]).T
        np.fill_diagonal(alike, 0)
        pairs = [CHARACTERS[i] + CHARACTERS[j] for i, j in np.argwhere(alike > LOOK_ALIKE)]
        assert pairs == []


@pytest.mark.parametrize("pair", ["Oo", "Cc", "Ss", "Uu", "Ww", "Xx", "Zz", "A\u0391", "\u0428\u0448"])
def test_the_comparison_would_notice_look_alikes(pair: str) -> None:
    assert max(normalised(pair[0]) @ normalised(pair[1], stretch) for stretch in STRETCHES) > LOOK_ALIKE


def test_every_face_of_every_character_has_ink_and_is_no_empty_box() -> None:
    for face in glyphs.FACES:
        missing = glyphs._mask("\U0010fffd", face, 64).tobytes()  # what the font draws for a character it lacks
        for character in CHARACTERS:
            if face in faces_of(character):
                mask = glyphs._mask(character, face, 64)
                assert min(mask.size) >= 3, (character, face)
                assert max(mask.size) >= 16, (character, face)
                assert mask.tobytes() != missing, (character, face)


def test_every_face_of_every_character_is_legible_and_inside_the_image() -> None:
    for character in CHARACTERS:
        faces = faces_of(character)
        for i in range(len(faces)):
            chance = np.random.default_rng(i).random(5)
            chance[0] = (i + 0.5) / len(faces)
            ink = glyphs._place(character, 32, chance)
            edge = np.concatenate([ink[0], ink[-1], ink[:, 0], ink[:, -1]])
            assert edge.max() < 0.1, (character, faces[i])
            assert (ink > 0.3).sum() >= 12, (character, faces[i])


def test_ink_and_paper_always_contrast() -> None:
    ink, paper = glyphs._colours(np.random.default_rng(0).random((2000, 8)))
    contrast = (ink - paper).mean(1)  # light on dark
    assert contrast.min() > 0.25
    assert contrast.std() > 0.1


def test_no_image_is_blank() -> None:
    noise = np.random.default_rng(0).standard_normal((1, 3, 32, 32))
    images = render(len(CHARACTERS), 1, 1, 32, seed=3)
    for split in ("train", "test"):
        ink = ink_of(images[f"{split}_images"])
        # Half the least contrast of ink and paper, which the noise of an image without ink does not reach.
        assert ((ink > 0.15).sum((1, 2)) >= 8).all()
        assert (ink_of(np.full((1, 3, 32, 32), 60) + 255 * 0.06 * noise) > 0.15).sum() == 0


@pytest.mark.parametrize("size", [16, 32, 45, 64])
def test_shapes_types_and_labels(size: int) -> None:
    arrays = render(3, 4, 2, size, seed=0)
    assert arrays["train_images"].shape == (12, 3, size, size)
    assert arrays["test_images"].shape == (6, 3, size, size)
    assert arrays["train_images"].dtype == arrays["test_images"].dtype == np.uint8
    assert arrays["train_labels"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert arrays["test_labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert arrays["train_labels"].dtype == arrays["test_labels"].dtype == np.int64


def test_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from holdfast.data.glyphs import render; a = render(6, 5, 3, 32, seed=11); "
        "print(hashlib.sha256(b''.join(a[n].tobytes() for n in sorted(a))).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == digest(render(6, 5, 3, 32, seed=11))


def test_more_classes_and_more_images_extend_a_set() -> None:
    small, large = render(4, 3, 2, 32, seed=5), render(7, 6, 5, 32, seed=5)
    assert class_characters(7, 5)[:4] == class_characters(4, 5)
    for split, few, many in (("train", 3, 6), ("test", 2, 5)):
        a = small[f"{split}_images"].reshape(4, few, 3, 32, 32)
        b = large[f"{split}_images"].reshape(7, many, 3, 32, 32)
        assert np.array_equal(a, b[:4, :few])


def test_seeds_splits_and_images_differ() -> None:
    first, second = render(3, 2, 2, 32, seed=0), render(3, 2, 2, 32, seed=1)
    assert class_characters(20, 0) != class_characters(20, 1)
    assert not np.array_equal(first["train_images"], second["train_images"])
    every = np.concatenate([first["train_images"], first["test_images"]]).reshape(12, -1)
    assert len(np.unique(every, axis=0)) == 12


def test_a_character_is_drawn_differently_under_another_seed() -> None:
    one, other = (glyphs._images_of("A", "train", 2, 32, seed) for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_global_generators_are_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    render(3, 2, 2, 32, seed=0)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_mean_and_deviation_are_those_of_the_images() -> None:
    pixels = render(100, 5, 1, 32, seed=0)["train_images"] / 255
    assert np.allclose(pixels.mean((0, 2, 3)), glyphs.MEAN, atol=0.04)
    assert np.allclose(pixels.std((0, 2, 3)), glyphs.STD, atol=0.02)


@pytest.mark.parametrize("count", [-1, 0, 1, len(CHARACTERS) + 1])
def test_a_wrong_number_of_classes_is_refused(count: int) -> None:
    with pytest.raises(HoldfastError, match=f"2 to {len(CHARACTERS)} classes, not {count}"):
        class_characters(count, 0)


def test_a_character_no_font_has_is_refused() -> None:
    with pytest.raises(HoldfastError, match="lack the character"):
        faces_of("\U0010fffd")


def test_the_whole_list_can_be_asked_for() -> None:
    assert sorted(class_characters(len(CHARACTERS), 2)) == sorted(CHARACTERS)
