"""glyphs: small colour images of characters, drawn with the fonts that matplotlib includes; needs no download."""

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from holdfast.errors import HoldfastError
from holdfast.progress import track
from holdfast.seeding import generator, shuffled

# One character per group of look-alikes: size, place and slant vary, so there is O but no o or 0, 1 but no l or I, etc.
DIGITS = "123456789"
LATIN = "ABCDEFGHJKLMNOPQRSTUVWXYZabdefhimntÆæŒƕƣǊɐɚɤɮʎʞʤʧʩʬʭꜨꜲꜴ"
GREEK = "ͲͻΔΘΛΞΣΦΨΩαβδεζλμξπσωϑϖϗϡϣϧϪ"
CYRILLIC = "ЂЉЊБГДЖИЦЧШЪЫЭЮЯѢѤѦѨѪѬѸ҂ҤҦҨҾԂԄԎԔԖԘꙗꙢ"
PUNCTUATION_AND_LETTERLIKE = "#%&*?@[{}§©«®¶»½¿※‼⁂⁇⁉⁑⁙℀℃℄℉ℋℌℑℒℓ℔№℘ℜ℡™℣ℬℭℱℲℳℵℷ⅋ⅣⅥⅧⅨⅪⅫↂ❝❞❡❢"  # noqa: RUF001
CURRENCY = "$¢£¤¥₠₦₧₨₩₪€₮₯₰₳₴₹₺₽"
ARROWS = "←↑→↓↔↖↗↘↙↪↰↳↴↵↶↷↹↺↻⇅⇈⇊⇕⇤⇥⇦⇧⇩⇱⇲⇶➠➢➩➲➴➶⤡⤢⤩⤴⤾⤿⥂⬀⬁⬂⬃⬄"
MATHEMATICS = "+<=>~¬±÷∀∂∅∇∈∓√∞∠∢∫∬∮∴∵≈≎≗≟≠≤≥≶⊆⊇⊌⊕⊗⊞⊟⊢⊣⊥⊰⊱⊳⊻⊼⊾⋈⋒⧄⧅⧆⧎⧏⧐⧓⨱"
TECHNICAL = "⌂⌇⌑⌓⌕⌘⌥⌦⌨⌫⌬⍰⎇⎋⏏⏥"
GEOMETRY = "╔╗╚╝╠╣╦╩╬▙▚▛▜■▤▦▧▨▬▲▶◀◆◈◌◍●◑◓◔◗◠◡◢◣◤◥◧◪◫◭◱⬓⬖⬙⬚⭔"
MISCELLANY = (
    "☁☂☃☄★☆☇☈☉☋☌☍☎☐☑☒☕☙☜☝☞☟☠☢☣☥☧☪☫☬☭☮☯☳☸☼☽☾☿♀♁♂♃♄♅♆♇♈♉♊♋♌♎♏♐♑♒♓♔♕"
    "♖♗♘♠♢♣♥♨♪♫♮♻♾♿⚀⚁⚄⚑⚒⚓⚕⚖⚗⚘⚙⚛⚜⚞⚠⚡⚢⚣⚩⚯⚱⚵⚶⚷⚸⛁"
)
DINGBATS = "✂✆✈✉✌✍✎✑✓✜✞✠✡✣✦✪✴✺❀❂❄❈❦"
FACES_AND_ANIMALS = "🐭🐱🐵😃😇😈😎😴"
CHARACTERS = (
    DIGITS
    + LATIN
    + GREEK
    + CYRILLIC
    + PUNCTUATION_AND_LETTERLIKE
    + CURRENCY
    + ARROWS
    + MATHEMATICS
    + TECHNICAL
    + GEOMETRY
    + MISCELLANY
    + DINGBATS
    + FACES_AND_ANIMALS
)

# No serif italics: they turn Cyrillic letters into Latin ones.
FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralBol",
)

MEAN = (0.23, 0.23, 0.23)
STD = (0.21, 0.21, 0.21)

OVERSAMPLING = 4  # drawn this much larger, then shrunk, for clean edges
MARGIN = 0.03  # fraction of the image's side that is left free on each side
EXTENT = (0.5, 0.8)  # the longer side of the rotated glyph, as a fraction of the image's side
MAX_ANGLE = math.radians(15)
# Light ink on dark paper, so that the black border of a random crop belongs to the paper; at least 0.3 apart.
PAPER, INK, TINT = (0.0, 0.3), (0.6, 1.0), 0.15
MAX_NOISE = 0.06
MANY = 3000  # from this many images on, show a progress bar

Arrays = dict[str, NDArray[Any]]
Numbers = NDArray[np.float64]


def class_characters(count: int, seed: int) -> list[str]:
    """The characters of a data set of `count` classes; a larger set starts with the characters of a smaller one."""
    if not 2 <= count <= len(CHARACTERS):
        raise HoldfastError(f"glyphs has 2 to {len(CHARACTERS)} classes, not {count}; choose a number in that range")
    return shuffled(generator(seed, "glyphs", "order"), CHARACTERS)[:count]


def render(count: int, train_per_class: int, test_per_class: int, size: int, seed: int) -> Arrays:
    """Training and test images, class by class; an image depends on seed, character, split, index and size alone."""
    characters = class_characters(count, seed)
    wanted = {"train": train_per_class, "test": test_per_class}
    arrays: Arrays = {}
    for split, per_class in wanted.items():
        arrays[f"{split}_images"] = np.empty((count * per_class, 3, size, size), np.uint8)
        arrays[f"{split}_labels"] = np.repeat(np.arange(count, dtype=np.int64), per_class)
    for label, character in _with_bar(characters, sum(wanted.values())):
        for split, per_class in wanted.items():
            rows = slice(label * per_class, (label + 1) * per_class)
            arrays[f"{split}_images"][rows] = _images_of(character, split, per_class, size, seed)
    return arrays


def _with_bar(characters: list[str], per_class: int) -> Iterator[tuple[int, str]]:
    numbered = enumerate(characters)
    many = len(characters) * per_class > MANY
    return track(numbered, "drawing glyphs", len(characters)) if many else iter(numbered)


def _images_of(character: str, split: str, count: int, size: int, seed: int) -> NDArray[np.uint8]:
    """(N, 3, S, S): the first `count` images of one character in one split."""
    uniform = generator(seed, "glyphs", character, split).random((count, 14))  # one row per image, prefix-stable
    noise = generator(seed, "glyphs", character, split, "noise").standard_normal((count, 3, size, size), np.float32)
    ink = np.stack([_place(character, size, row) for row in uniform[:, :5]])  # (N, S, S), 1 where the glyph is
    ink_colour, paper = _colours(uniform[:, 5:13])  # (N, 3) each
    pixels = paper[:, :, None, None] + ink[:, None] * (ink_colour - paper)[:, :, None, None]  # (N, 3, S, S)
    pixels += noise * (MAX_NOISE * uniform[:, 13, None, None, None]).astype(np.float32)
    return np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def _place(character: str, size: int, uniform: Numbers) -> NDArray[np.float32]:
    """(S, S): the glyph in a random face, rotated, scaled and shifted, but entirely inside the image."""
    faces = faces_of(character)
    mask = _mask(character, faces[int(uniform[0] * len(faces))], size * OVERSAMPLING)
    angle = _between((-MAX_ANGLE, MAX_ANGLE), uniform[1])
    cos, sin = math.cos(angle), math.sin(angle)
    width = mask.width * cos + mask.height * abs(sin)  # of the rotated mask
    height = mask.height * cos + mask.width * abs(sin)
    side = size * OVERSAMPLING
    scale = side * _between(EXTENT, uniform[2]) / max(width, height)
    x = _centre(width * scale, side, uniform[3])
    y = _centre(height * scale, side, uniform[4])
    # From a point of the image back to the point of the mask that is seen there.
    a, b = cos / scale, sin / scale
    back = (a, b, mask.width / 2 - a * x - b * y, -b, a, mask.height / 2 + b * x - a * y)
    placed = mask.transform((side, side), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
    return np.asarray(placed.reduce(OVERSAMPLING)).astype(np.float32) / np.float32(255)


def _centre(extent: float, side: int, fraction: float) -> float:
    """Where the middle of something `extent` long may lie so that all of it is inside the margins."""
    reach = extent / 2 + MARGIN * side
    return _between((reach, side - reach), fraction)


def _between(bounds: tuple[float, float], fraction: float) -> float:
    return float(bounds[0] + (bounds[1] - bounds[0]) * fraction)


def _colours(uniform: Numbers) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(N, 3) ink and (N, 3) paper from (N, 8) numbers in [0, 1), both slightly tinted."""
    tint = TINT * (2 * uniform[:, :6].reshape(-1, 2, 3) - 1)
    tint -= tint.mean(2, keepdims=True)  # a tint moves the hue but not the contrast
    grey = np.stack([INK[0] + (INK[1] - INK[0]) * uniform[:, 6], PAPER[0] + (PAPER[1] - PAPER[0]) * uniform[:, 7]], 1)
    pair = np.clip(grey[:, :, None] + tint, 0, 1).astype(np.float32)  # (N, ink or paper, 3)
    return pair[:, 0], pair[:, 1]


@cache
def faces_of(character: str) -> list[str]:
    """The faces that have this character."""
    faces = [face for face in FACES if _charmap(face).get(ord(character), 0) != 0]  # glyph 0 is the empty box
    if not faces:
        raise HoldfastError(f"the fonts of this matplotlib lack the character {character!r}; reinstall matplotlib")
    return faces


@cache
def _charmap(face: str) -> dict[int, int]:
    """From a character's code to its glyph in the font."""
    return dict(FT2Font(str(_font_file(face))).get_charmap())


def _font_file(face: str) -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


@lru_cache(maxsize=len(FACES))
def _mask(character: str, face: str, height: int) -> Image.Image:
    """The glyph at about `height` pixels, white on black, cropped to its ink."""
    font = _font(face, height)
    left, top, right, bottom = map(round, font.getbbox(character))
    image = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(image).text((1 - left, 1 - top), character, fill=255, font=font)
    return image.crop(image.getbbox())


@cache
def _font(face: str, height: int) -> ImageFont.FreeTypeFont:
    # Every build of Pillow has the basic layout, so all of them draw the same.
    return ImageFont.truetype(str(_font_file(face)), height, layout_engine=ImageFont.Layout.BASIC)
