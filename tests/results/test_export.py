"""Records for other programs, read back by an independent reader of the formats."""

import csv
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.results import checksums
from holdfast.results.export import crc32c, flat, write_csv, write_events
from holdfast.results.record import read_result, write_result

LINES = [
    {
        "round": 1,
        "task": 1,
        "accuracy": 0.5,
        "task_accuracy": [0.5],
        "losses": {"classification": 1.25},
        "selected": [3, 4],
        "bytes": {"server": {"down": 10_000_000_000}},
        "grown": ["a", "b"],
    },
    {"round": 2, "task": 2, "accuracy": 0.75, "task_accuracy": [1.0, 0.5], "losses": {}, "selected": [1], "grown": []},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    figures = {"task_sizes": [2, 2], "accuracy_after_task": [0.5, 0.75], "accuracy_matrix": [[0.5], [1.0, 0.5]]}
    real = read_result(Path(__file__).parent / "old_run")
    write_result(tmp_path / "run", replace(real, **figures, last_accuracy=0.75, curves={}))  # type: ignore[arg-type]
    return tmp_path / "run"


def test_numbers_have_dotted_names_and_lists_are_counted() -> None:
    assert dict(flat(LINES[0])) == {
        "round": 1,
        "task": 1,
        "accuracy": 0.5,
        "task_accuracy.1": 0.5,
        "losses.classification": 1.25,
        "selected.count": 2,
        "bytes.server.down": 1e10,
        "grown.count": 2,
    }


def test_csv_has_a_line_a_round_and_gaps_where_there_is_nothing(run: Path, tmp_path: Path) -> None:
    write_csv(run, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["accuracy"] for row in rows] == ["0.5", "0.75"]
    assert [row["losses.classification"] for row in rows] == ["1.25", ""]
    assert rows[1]["task_accuracy.2"] == "0.5"
    assert rows[0]["bytes.server.down"] == "10000000000"


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def unframed(blob: bytes) -> list[bytes]:
    """The records of a TFRecord file, every checksum compared."""
    records = []
    while blob:
        (length,) = struct.unpack("<Q", blob[:8])
        content = blob[12 : 12 + length]
        for part, stored in ((blob[:8], blob[8:12]), (content, blob[12 + length : 16 + length])):
            rotated = (struct.unpack("<I", stored)[0] - 0xA282EAD8) & 0xFFFFFFFF
            assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(part)
        records.append(content)
        blob = blob[16 + length :]
    return records


def fields(message: bytes) -> list[tuple[int, object]]:
    """The fields of a protocol buffer: number and value."""
    found: list[tuple[int, object]] = []

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
            found.append((key >> 3, value))
        elif key & 7 == 1:
            found.append((key >> 3, struct.unpack("<d", message[at : at + 8])[0]))
            at += 8
        elif key & 7 == 2:
            length, at = varint(at)
            found.append((key >> 3, message[at : at + length]))
            at += length
        else:
            assert key & 7 == 5
            found.append((key >> 3, struct.unpack("<f", message[at : at + 4])[0]))
            at += 4
    return found


def test_events_hold_every_number_at_its_round(run: Path, tmp_path: Path) -> None:
    file = write_events(run, tmp_path / "events")
    assert "tfevents" in file.name
    first, *rounds = unframed(file.read_bytes())
    assert dict(fields(first))[3] == b"brain.Event:2"
    for record, line in zip(rounds, LINES, strict=True):
        event = dict(fields(record))
        assert event[2] == line["round"]
        summary = event[5]
        assert isinstance(summary, bytes)
        values = [dict(fields(value)) for _, value in fields(summary) if isinstance(value, bytes)]
        found = {value[1].decode(): value[2] for value in values if isinstance(value[1], bytes)}
        expected = {name.replace(".", "/"): value for name, value in flat(line) if name not in ("round", "task")}
        assert found == pytest.approx(expected)


def test_runs_of_one_name_do_not_overwrite_each_other(run: Path, tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(run, tmp_path / "all" / place / "lga")
    (tmp_path / "all" / "demo.png").touch()
    words = [sys.executable, "-m", "holdfast", "export", "all/a", "all/b", "all/demo.png", "--out", "out", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"files": ["out/a-lga.csv", "out/b-lga.csv"]}
    assert (tmp_path / "out" / "b-lga.csv").exists()


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_nor_do_those_whose_folders_have_one_name(
    run: Path, tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]], form: str
) -> None:
    places = ("a/runs/x", "b/runs/x", "runs-x")  # the last is what the first two would be called
    for place in places:
        shutil.copytree(run, tmp_path / place)
    folders = [tmp_path / place for place in places]
    code, out, _ = holdfast("export", *folders, "--out", tmp_path / "out", "--format", form, "--json")
    files = json.loads(out)["files"]
    assert (code, len(set(files))) == (0, 3)
    assert all(Path(file).exists() for file in files)


def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(
    run: Path, tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, _ = holdfast("export", tmp_path / "nothere", "--out", tmp_path / "out")
    assert (code, (tmp_path / "out").exists()) == (2, False)
    (tmp_path / "a.toml").touch()
    code, _, err = holdfast("export", run, "--out", tmp_path / "a.toml")
    assert code == 2
    assert "a.toml is a file; choose another" in err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run").touch()
    code, _, err = holdfast("export", run, "--out", tmp_path / "out", "--format", "tensorboard")
    assert code == 2
    assert "run is a file; choose another" in err


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_a_record_that_lacks_its_end_is_not_passed_on(
    run: Path, tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]], form: str
) -> None:
    (run / "record.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    (run / checksums.NAME).unlink()  # as in runs of older versions
    code, _, err = holdfast("export", run, "--out", tmp_path / "out", "--format", form)
    assert (code, err.strip().count("\n")) == (2, 0)
    assert "record.jsonl is damaged (its end does not match result.json)" in err
