import errno
import json
import os
import pickle
import threading
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
    (entry,) = folder.iterdir()
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
    # sha256 of {"name":"toy","size":4}
    assert entry.name == "toy-765c496195ba787a"
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["key"] == KEY
    assert sorted(meta["sha256"]) == ["images.npy", "labels.npy"]
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
def test_damaged_entry_is_made_anew_with_one_line_of_notice(
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
    assert "made anew" in captured.err
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
    (entry / "meta.json").write_text(json.dumps(cache._meta(KEY, sorted(entry.glob("*.npy")))))
    make = Maker()
    assert cached(tmp_path, KEY, make)["labels"].tolist() == [5, 7]
    assert make.calls == 1


def test_the_process_that_is_second_uses_the_entry_of_the_first(tmp_path: Path) -> None:
    def slow() -> dict[str, np.ndarray]:
        cached(tmp_path, KEY, lambda: {"images": np.full(3, 1)})  # another process, in the meantime
        return {"images": np.full(3, 2)}

    assert cached(tmp_path, KEY, slow)["images"].tolist() == [1, 1, 1]
    only_entry(tmp_path)


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
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_runs_are_swept_after_a_day(tmp_path: Path) -> None:
    cached(tmp_path, KEY, Maker())
    entry = only_entry(tmp_path)
    old, young = (tmp_path / f".{entry.name}.{word}.tmp" for word in ("old", "young"))
    for folder in (old, young):
        folder.mkdir()
        (folder / "images.npy").touch()
    os.utime(old, (0, 0))
    (entry / "meta.json").unlink()
    cached(tmp_path, KEY, Maker())
    assert sorted(tmp_path.iterdir()) == sorted([entry, young])


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
    assert list(tmp_path.iterdir()) == []


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
