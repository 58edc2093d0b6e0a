import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast.data import cache
from holdfast.data.cache import cache_folder, cached
from holdfast.errors import HoldfastError

KEY: cache.Key = {"name": "toy", "size": 4}


class Maker:
    """Makes small arrays and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"images": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "labels": np.array([5, 7])}


def only_entry(folder: Path) -> Path:
    (entry,) = (path for path in folder.iterdir() if path.suffix != ".lock")
    return entry


def test_first_use_makes_and_second_use_reads(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(2):
        arrays = cached(tmp_path / "deep" / "cache", KEY, make)
        assert make.calls == 1
        assert sorted(arrays) == ["images", "labels"]
        for name, expected in Maker()().items():
            assert isinstance(arrays[name], np.memmap)
            assert arrays[name].dtype == expected.dtype
            np.testing.assert_array_equal(arrays[name], expected)


def test_entry_holds_key_and_checksums_and_leaves_no_temporary_folder(tmp_path: Path) -> None:
    cached(tmp_path, KEY, Maker())
    entry = only_entry(tmp_path)
    assert entry.name == "toy-" + hashlib.sha256(b'{"layout":2,"name":"toy","size":4}').hexdigest()[:16]
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["key"] == KEY
    assert sorted(meta["files"]) == ["images.npy", "labels.npy"]
    assert meta["files"]["labels.npy"] == {
        "bytes": (entry / "labels.npy").stat().st_size,
        "sha256": hashlib.sha256((entry / "labels.npy").read_bytes()).hexdigest(),
    }
    assert list(tmp_path.iterdir()) == [entry]
    assert sorted(p.name for p in entry.iterdir()) == ["images.npy", "labels.npy", "meta.json"]


def test_order_of_the_key_does_not_matter_but_its_values_do(tmp_path: Path) -> None:
    make = Maker()
    cached(tmp_path, {"name": "toy", "size": 4}, make)
    cached(tmp_path, {"size": 4, "name": "toy"}, make)
    assert make.calls == 1
    cached(tmp_path, {"name": "toy", "size": 5}, make)
    assert make.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_writing_to_an_array_does_not_reach_the_disk(tmp_path: Path) -> None:
    cached(tmp_path, KEY, Maker())["images"][:] = 99
    make = Maker()
    assert cached(tmp_path, KEY, make)["images"].max() == 23
    assert make.calls == 0


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap_key(path: Path) -> None:
    path.write_text(path.read_text().replace('"toy"', '"boy"'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tampered": lambda entry: flip_last_byte(entry / "images.npy"),
    "truncated": lambda entry: os.truncate(entry / "images.npy", 100),
    "array missing": lambda entry: (entry / "labels.npy").unlink(),
    "array too many": lambda entry: (entry / "more.npy").write_bytes((entry / "labels.npy").read_bytes()),
    "meta missing": lambda entry: (entry / "meta.json").unlink(),
    "meta is not JSON": lambda entry: (entry / "meta.json").write_text("{"),
    "meta is another thing": lambda entry: (entry / "meta.json").write_text("[1]"),
    "meta of another key": lambda entry: swap_key(entry / "meta.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_rebuilt_with_one_line_of_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    make = Maker()
    cached(tmp_path, KEY, make)
    assert capsys.readouterr().err == ""
    entry = only_entry(tmp_path)
    DAMAGE[damage](entry)
    np.testing.assert_array_equal(cached(tmp_path, KEY, make)["images"], Maker()()["images"])
    captured = capsys.readouterr()
    assert make.calls == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(entry) in captured.err
    assert "rebuilding it" in captured.err
    cached(tmp_path, KEY, make)
    assert make.calls == 2
    assert only_entry(tmp_path) == entry


def save_objects(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def save_bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(np.array([1, 2])))


@pytest.mark.parametrize("save", [save_objects, save_bare_pickle])
def test_a_pickle_is_never_loaded(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """Even with a checksum that fits, it counts as damage."""
    cached(tmp_path, KEY, Maker())
    entry = only_entry(tmp_path)
    save(entry / "labels.npy")
    meta = json.loads((entry / "meta.json").read_text())
    content = (entry / "labels.npy").read_bytes()
    meta["files"]["labels.npy"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (entry / "meta.json").write_text(json.dumps(meta))
    make = Maker()
    assert cached(tmp_path, KEY, make)["labels"].tolist() == [5, 7]
    assert make.calls == 1


def test_the_process_that_is_second_waits_and_uses_the_entry_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, made = threading.Event(), Maker()

    def slow() -> dict[str, np.ndarray]:
        begun.set()
        time.sleep(0.5)
        return {"images": np.full(3, 1)}

    first = threading.Thread(target=lambda: cached(tmp_path, KEY, slow))
    first.start()
    assert begun.wait(10)
    assert cached(tmp_path, KEY, made)["images"].tolist() == [1, 1, 1]
    first.join()
    assert made.calls == 0
    assert "waiting for it" in capsys.readouterr().err


KILLED = """
import os, sys
from pathlib import Path
from holdfast.data.cache import entry_of

def fill(place):
    (place / "half.txt").write_text("half")
    os.kill(os.getpid(), 9)

entry_of(Path(sys.argv[1]), {"name": "toy"}, fill)
"""


def test_a_killed_process_leaves_its_work_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60).returncode == -9

    def fill(place: Path) -> cache.Facts:
        assert (place / "half.txt").read_text() == "half"
        (place / "half.txt").unlink()
        np.save(place / "whole.npy", np.arange(3))
        return {"from": "half"}

    entry = cache.entry_of(tmp_path, {"name": "toy"}, fill)
    assert entry.arrays["whole"].tolist() == [0, 1, 2]
    assert entry.facts == {"from": "half"}
    assert list(tmp_path.iterdir()) == [entry.place]


def test_a_large_file_is_compared_by_length_and_its_content_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LARGE", 10)
    make = Maker()
    cached(tmp_path, KEY, make)
    entry = cache.entry_of(tmp_path, KEY, lambda _: {})
    assert cache.is_whole(entry.place)
    flip_last_byte(only_entry(tmp_path) / "images.npy")
    cached(tmp_path, KEY, make)
    assert make.calls == 1
    assert not cache.is_whole(entry.place)
    os.truncate(only_entry(tmp_path) / "images.npy", 100)
    cached(tmp_path, KEY, make)
    assert make.calls == 2


def test_many_at_once_agree(tmp_path: Path) -> None:
    results: list[list[int]] = []
    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        results.append(cached(tmp_path, KEY, Maker())["labels"].tolist())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[5, 7]] * 4
    only_entry(tmp_path)


def test_failing_make_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise HoldfastError("no such image")

    with pytest.raises(HoldfastError, match="no such image"):
        cached(tmp_path, KEY, fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_folder_that_cannot_be_made_is_one_sentence_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make = Maker()
    with pytest.raises(HoldfastError, match=r"cannot be written \(Not a directory\); set XDG_CACHE_HOME") as caught:
        cached(tmp_path / "file" / "cache", KEY, make)
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert make.calls == 0


def test_read_only_folder_is_one_sentence_but_serves_what_it_has(tmp_path: Path) -> None:
    cached(tmp_path, KEY, Maker())
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere, so a read-only folder cannot be made")
        make = Maker()
        assert cached(tmp_path, KEY, make)["labels"].tolist() == [5, 7]
        with pytest.raises(HoldfastError, match=r"cannot be written \(Permission denied\); set XDG_CACHE_HOME"):
            cached(tmp_path, {"name": "other"}, make)
        assert make.calls == 0
    finally:
        tmp_path.chmod(0o755)


def test_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(HoldfastError, match=r"cannot be written \(No space left on device\); set XDG_CACHE_HOME"):
        cached(tmp_path, KEY, Maker())
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_an_error_of_make_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise OSError("the archive is gone")

    with pytest.raises(OSError, match="the archive is gone"):
        cached(tmp_path, KEY, fail)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "holdfast"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "holdfast"
