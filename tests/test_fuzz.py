"""The short version of the fuzzing in `make torture`: every reader takes an input or refuses it with a sentence."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz.py"


def fuzz(*words: str | Path) -> tuple[int, str]:
    line = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def test_readers_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    code, said = fuzz("--inputs", "3000", "--state", tmp_path / "fuzz.json")
    assert code == 0, said
    assert "inputs over 21 readers: 0 uncaught exceptions, 0 hangs over 5 s, 0 deaths of the process" in said
    state = json.loads((tmp_path / "fuzz.json").read_text())
    assert all(counts["refused"] + counts["accepted"] == counts["done"] for counts in state["readers"].values())
    code, said = fuzz("--inputs", "3000", "--state", tmp_path / "fuzz.json")  # nothing is left to do
    assert code == 0
    assert json.loads((tmp_path / "fuzz.json").read_text()) == state


HARM = """
import json, os, sys, time
sys.path.insert(0, {folder!r})
import fuzz, fuzz_readers

def read(blob):
    kind = len(blob) % 4
    if kind == 1:
        raise KeyError("not a sentence")
    if kind == 2:
        bytearray(3 << 30)
    if kind == 3:
        time.sleep(60)

fuzz.SECONDS, fuzz.SHARES = 0.2, {{"x": 1}}
fuzz_readers.readers = lambda top: {{"x": fuzz_readers.Reader(read, [b"1234"])}}
fuzz.__file__ = __file__
sys.exit(fuzz.main())
"""


def test_the_script_notices_every_kind_of_failure(tmp_path: Path) -> None:
    """So that a run without failures is known to have none."""
    script = tmp_path / "harm.py"
    script.write_text(HARM.format(folder=str(SCRIPT.parent)))
    line = [sys.executable, str(script), "--inputs", "60", "--state", str(tmp_path / "fuzz.json")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    for kind in ("exception, the first of", "hang, the first of", "MemoryError", "KeyError"):
        assert kind in done.stdout
