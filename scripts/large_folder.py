"""Decodes a generated ImageNet of many files with a kill in the middle: `python scripts/large_folder.py [CLASSES]`.

Prints one line of JSON: files, seconds, how many files were decoded before the kill, the peak memory of any process,
and the size of the cache. The files are in a temporary folder, which is removed at the end."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, VALIDATION, SIDE, SIZE = 500, 12, 96, 64
KILL_AT = 0.4  # of the blocks


def write_files(root: Path, classes: int) -> int:
    """Writes ImageNet's layout: a hundred different pictures, each under many names."""
    rng = np.random.Generator(np.random.PCG64(0))
    blobs = []
    for _ in range(100):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
        blobs.append(file.getvalue())
    for c in range(classes):
        for part, count in (("train", TRAIN), ("val", VALIDATION)):
            folder = root / part / f"n{c:08d}"
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"n{c:08d}_{i}.JPEG").write_bytes(blobs[(c + i) % len(blobs)])
    return classes * (TRAIN + VALIDATION)


def journalled(cache: Path) -> int:
    """How many files have been decoded so far."""
    lines = [line for file in cache.glob("holdfast/.*.growing/*.jsonl") for line in file.read_text().splitlines()]
    return sum(json.loads(line)[1] for line in lines if line.endswith("]"))


def main() -> None:
    classes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        root, cache = Path(folder) / "data", Path(folder) / "cache"
        files = write_files(root / "imagenet", classes)
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HOLDFAST_DATA": str(root)}
        command = [sys.executable, "-m", "holdfast", "data", "prepare", "imagenet", "--size", str(SIZE), "--json"]
        start = time.perf_counter()
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while first.poll() is None and journalled(cache) < KILL_AT * files:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()
        kept = journalled(cache)
        done = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        facts = {
            "files": files,
            "images": done["train"] + done["test"],
            "seconds": round(time.perf_counter() - start, 1),
            "kept_after_kill": kept,
            "peak_megabytes": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
            "cache_megabytes": round(sum(f.stat().st_size for f in cache.rglob("*.npy")) / 2**20),
        }
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
