"""How many images are decoded per second, by one core and by all."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from PIL import Image

from holdfast.bench import Ratio, Report
from holdfast.data.decoding import cores, decode_files, make_room

FILES, TIMES, SIDE, SIZE = 6_000, 4, 128, 64
BOUND = 1.7


def measure(tell: Callable[[str], None]) -> Report:
    """Decodes JPEG files from 128 pixels to 64, each several times."""
    with tempfile.TemporaryDirectory() as folder:
        tell(f"writing {FILES} JPEG files")
        names = _write(Path(folder))
        speeds = {}
        for processes in (1, cores()):
            tell(f"decoding with {processes} process{'es' * (processes > 1)}")
            target = Path(folder) / "images.npy"
            make_room(target, FILES * TIMES, SIZE)
            start = perf_counter()
            for _ in decode_files(target, Path(folder), names * TIMES, SIZE, processes=processes):
                pass
            speeds[processes] = FILES * TIMES / (perf_counter() - start)
    rows = [[str(processes), f"{speed:.0f}"] for processes, speed in speeds.items()]
    ratio = Ratio(f"{cores()} processes / 1", speeds[cores()] / speeds[1], BOUND)
    return Report([ratio], ["processes", "images per second"], rows, {"images_a_second": speeds})


def _write(folder: Path) -> list[str]:
    """Writes smooth random pictures: a few waves per colour."""
    rng = np.random.Generator(np.random.PCG64(0))
    names = [f"{i}.jpg" for i in range(FILES)]
    for start in range(0, FILES, 100):
        coarse = rng.integers(0, 256, (100, 8, 8, 3), dtype=np.uint8)
        for name, pixels in zip(names[start : start + 100], coarse, strict=True):
            Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / name, quality=90)
    return names
