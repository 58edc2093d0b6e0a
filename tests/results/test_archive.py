"""Archives of runs: what goes in comes out, commands read them like folders, and damaged ones are refused."""

import gzip
import json
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.compare import known_runs, run_all
from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.experiment import run_name
from holdfast.results import archive
from holdfast.results.record import read_clients, read_config, read_record, read_result, read_run
from holdfast.results.report import write_report
from holdfast.results.runs import add_to_archive, packed, runs_below, runs_in, runs_of
from holdfast.results.stored import stored

OLD = Path(__file__).parent / "old_run"  # written before results and records had a schema
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An archive with two seeds of one experiment and a trial that diverged."""
    for seed in (1, 2):
        folder = tmp_path / "made" / "small" / f"lga-{seed}"
        shutil.copytree(OLD, folder)
        for name, old, new in (
            ("config.toml", "seed = 1", f"seed = {seed}"),
            ("result.json", '"seed": 1', f'"seed": {seed}'),
        ):
            (folder / name).write_text((folder / name).read_text().replace(old, new, 1))
    diverged = tmp_path / "made" / "small" / "lga-9"
    diverged.mkdir()
    (diverged / "diverged").write_text("exit code 2\n")
    add_to_archive(tmp_path / "a.jsonl.gz", sorted((tmp_path / "made" / "small").iterdir()))
    return tmp_path / "a.jsonl.gz"


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    archive._read_lines.cache_clear()


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]


def write(file: Path, *lines: object) -> Path:
    raw = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    file.write_bytes(gzip.compress(raw))
    return file


def test_what_goes_in_comes_out(file: Path, tmp_path: Path) -> None:
    folder, run = tmp_path / "made" / "small" / "lga-2", archive.address(file, "small/lga-2")
    assert read_run(run) == read_run(folder)
    result = read_result(run)
    assert read_config(run) == read_config(folder)
    assert read_clients(run, result) == read_clients(folder, result)
    assert read_result(archive.address(file, "lga-2")) == read_result(folder)  # the end of a name is enough
    [first, *_] = lines_of(file)
    assert {key: first[key] for key in ("schema", "name", "commit")} == {
        "schema": 1,
        "name": "small/lga-1",
        "commit": None,
    }
    assert len(first["plan"]) == 64
    assert first["machine"] == read_result(folder).machine


def test_the_same_runs_give_the_same_bytes_and_a_run_is_replaced(file: Path, tmp_path: Path) -> None:
    before, folders = file.read_bytes(), sorted((tmp_path / "made" / "small").iterdir())
    assert before[:10] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"  # no time, no name, no system
    add_to_archive(file, folders[::-1])
    assert file.read_bytes() == before
    assert add_to_archive(file, folders[:1], commit="abc") == ["small/lga-1"]
    assert [line["commit"] for line in lines_of(file)] == ["abc", None, None]


def test_a_trial_that_diverged_is_kept_and_is_no_finished_run(file: Path) -> None:
    assert [line["name"] for line in archive.read(file)] == ["small/lga-1", "small/lga-2", "small/lga-9"]
    assert archive.names(file) == ["small/lga-1", "small/lga-2"]
    with pytest.raises(HoldfastError, match=r"small/lga-9 has no result: its training diverged \(exit code 2\)"):
        read_result(archive.address(file, "small/lga-9"))


def test_runs_are_found_in_archives_and_folders(file: Path, tmp_path: Path) -> None:
    archived = [archive.address(file, f"small/lga-{seed}") for seed in (1, 2)]
    folders = [tmp_path / "made" / "small" / f"lga-{seed}" for seed in (1, 2)]
    assert runs_of(file) == runs_in([file, file]) == archived
    assert runs_of(folders[0]) == folders[:1]
    assert runs_below(tmp_path) == runs_in([tmp_path]) == [*archived, *folders]
    with pytest.raises(HoldfastError, match="has no single run called 'lga-3'; did you mean 'small/"):
        read_result(archive.address(file, "lga-3"))


def test_what_an_archive_has_is_not_run_again(file: Path, tmp_path: Path) -> None:
    config = load_config(read_config(OLD))
    shutil.rmtree(tmp_path / "made")
    run = archive.address(file, "small/lga-1")
    assert known_runs(tmp_path)[run_name(config)] == run
    [done] = run_all([config], tmp_path)
    assert (done.folder, done.fresh, done.result) == (run, False, read_result(OLD))
    assert list(tmp_path.iterdir()) == [file]


def test_pictures_lie_beside_the_archive(file: Path, tmp_path: Path) -> None:
    run = archive.address(file, "lga-1")
    assert stored(run).picture("prototypes.png") is None
    assert known_runs(tmp_path, "prototypes.png") == {}
    (tmp_path / "small" / "lga-1").mkdir(parents=True)
    (tmp_path / "small" / "lga-1" / "prototypes.png").write_bytes(b"")
    assert stored(run).picture("prototypes.png") == tmp_path / "small" / "lga-1" / "prototypes.png"
    assert list(known_runs(tmp_path, "prototypes.png").values()) == [archive.address(file, "small/lga-1")]


def test_commands_read_archives(file: Path, tmp_path: Path, holdfast: Command) -> None:
    code, table, _ = holdfast("show", file, "--markdown")
    assert (code, "| lga perturb_steps=1 iterations=2 | 2 |" in table) == (0, True)
    assert json.loads(holdfast("show", f"{file}:lga-2", "--json")[1])["seed"] == 2
    assert holdfast("show", f"{file}:lga-1")[1] == holdfast("show", OLD)[1]
    code, out, _ = holdfast("report", file, "--out", tmp_path / "page.html", "--json")
    assert (code, json.loads(out)["runs"]) == (0, [f"{file}:small/lga-1", f"{file}:small/lga-2"])
    assert "All clients" in (tmp_path / "page.html").read_text()
    code, out, _ = holdfast("export", f"{file}:lga-1", "--out", tmp_path / "csv")
    assert (code, (tmp_path / "csv" / "lga-1.csv").read_text().count("\n")) == (0, 7)


GOOD = {"schema": 1, "name": "a/b", "config": None, "plan": None, "clients": None, "machine": None, "commit": None}


@pytest.mark.parametrize(
    "line",
    [
        b"{\n",
        b"\n",
        b"[1]\n",
        b'{"a": ' + b"[" * 100_000 + b"\n",
        b"\xff\n",
        {**GOOD, "result": None, "record": []},
        {**GOOD, "result": {}, "record": {}},
        {**GOOD, "result": {}},
        {**GOOD, "result": {}, "record": [], "schema": "1"},
        {**GOOD, "result": {}, "record": [], "name": "../../b"},
        {**GOOD, "result": {}, "record": [], "name": "/b"},
        {**GOOD, "result": {}, "record": [], "name": ""},
        {**GOOD, "result": {}, "record": [], "name": 3},
        {**GOOD, "result": {}, "record": [], "config": "x"},
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object) -> None:
    file = write(tmp_path / "a.jsonl.gz", packed(OLD, "a/a"), line)
    with pytest.raises(HoldfastError, match=r"a\.jsonl\.gz, line 2, is not a run"):
        archive.names(file)


def test_other_mistakes_are_one_sentence(tmp_path: Path, holdfast: Command) -> None:
    file, line = tmp_path / "a.jsonl.gz", packed(OLD, "a/a")
    write(file, line, line)
    assert "line 2, has the run 'a/a' for a second time" in holdfast("show", file)[2]
    write(file, {**line, "schema": 2})
    assert "line 1, was written by a newer version of Holdfast; update" in holdfast("show", file)[2]
    file.write_bytes(b"not gzip")
    assert "is not an archive of runs" in holdfast("show", file)[2]
    file.write_bytes(write(file, line).read_bytes()[:-20])
    assert "is not an archive of runs" in holdfast("report", file)[2]
    file.unlink()
    assert "cannot read the archive" in holdfast("show", file)[2]
    write(file)
    assert "there is no finished run in these archives" in holdfast("show", file)[2]


@pytest.mark.parametrize(
    ("key", "part"), [("result", "result.json"), ("record", "record.jsonl"), ("clients", "clients")]
)
def test_a_damaged_part_is_named(tmp_path: Path, key: str, part: str) -> None:
    wrong = {"result": {"a": 1}, "record": [1], "clients": {"names": [], "groups": [], "held": [[99]]}}
    file = write(tmp_path / "a.jsonl.gz", {**packed(OLD, "a/a"), key: wrong[key]})
    with pytest.raises(HoldfastError, match=rf"{part} of .*a\.jsonl\.gz:a/a is damaged"):
        write_report([file], tmp_path / "page.html")


@pytest.mark.parametrize("plan", [{"class_names": ["x"] * 6}, {"groups": [["Zo"]]}, {"clients": ["a"]}, {"groups": []}])
def test_a_plan_that_does_not_fit_the_result_is_named(tmp_path: Path, plan: dict[str, Any]) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    facts = json.loads((OLD / "plan.json").read_text())
    (tmp_path / "run" / "plan.json").write_text(json.dumps({**facts, **plan}))
    with pytest.raises(HoldfastError, match=r"plan\.json is damaged"):
        write_report([tmp_path / "run"], tmp_path / "page.html")


@pytest.mark.parametrize("limit", ["MAX_LINE", "MAX_FILE"])
def test_a_file_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(archive, limit, 100_000)
    line = packed(OLD, "a/a")
    with pytest.raises(HoldfastError, match="larger than an archive may be"):
        archive.add(
            tmp_path / "b.jsonl.gz",
            [{**line, "name": f"a/{i}", "config": {"x": "0" * 60_000}} for i in range(9)]
            + [{**line, "name": "a/x", "config": {"x": "0" * 200_000}}],
        )
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b"0" * 50_000_000 if limit == "MAX_LINE" else b"0\n" * 25_000_000))
    with pytest.raises(HoldfastError, match=r"a\.jsonl\.gz is larger|line 1, is not a run"):
        archive.names(file)


def test_a_changed_line_is_refused_and_archives_without_hashes_are_read(file: Path) -> None:
    lines = lines_of(file)
    write(file, *({**line, "config": {"seed": 3}} for line in lines))
    with pytest.raises(HoldfastError, match=r"line 1, is not a run \(it does not match its hash\)"):
        archive.names(file)
    write(file, *({key: value for key, value in line.items() if key != "sha256"} for line in lines))
    assert archive.names(file) == ["small/lga-1", "small/lga-2"]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a/\ud800", "a\x1b[2J", "é" * 128])
def test_a_name_that_is_no_folders_is_refused(file: Path, name: str) -> None:
    lines = [{key: value for key, value in line.items() if key != "sha256"} for line in lines_of(file)]
    write(file, {**lines[0], "name": name})
    with pytest.raises(HoldfastError, match=r"line 1, is not a run \(.* is not a valid run name\)"):
        archive.names(file)


# results and records of other versions


def test_runs_of_before_schemas_are_read(tmp_path: Path, holdfast: Command) -> None:
    assert "schema" not in json.loads((OLD / "result.json").read_text())
    code, out, _ = holdfast("show", OLD)
    assert (code, "17.5 MB sent to clients, 17.5 MB back" in out) == (0, True)
    assert "observe" not in out
    assert holdfast("report", OLD, "--out", tmp_path / "page.html")[0] == 0
    assert [line["round"] for line in read_record(OLD)] == [1, 2, 3, 4, 5, 6]


def test_a_newer_schema_is_said(tmp_path: Path, holdfast: Command) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    facts = json.loads((OLD / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps({"schema": 3, **facts}))
    code, _, err = holdfast("show", tmp_path / "run")
    assert (code, err.strip().count("\n")) == (2, 0)
    assert "was written by a newer version of Holdfast (schema 3); update Holdfast" in " ".join(err.split())


def test_new_records_and_results_have_a_schema(small: dict[str, Any], tmp_path: Path) -> None:
    [done] = run_all([load_config({**small, "method": {"name": "fedavg"}})], tmp_path)
    assert json.loads((done.folder / "result.json").read_text())["schema"] == 2
    lines = [json.loads(line) for line in (done.folder / "record.jsonl").read_text().splitlines()]
    assert {line["schema"] for line in lines} == {2}
    assert all("schema" not in line for line in read_record(done.folder))


def test_an_older_run_keeps_its_weights_and_gets_the_label_of_its_settings(file: Path) -> None:
    """LGA's default weights are others than when this run was made."""
    relabel = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "archive_runs.py"))["relabel"]
    [first, *_] = runs_of(file)
    config = read_config(first)
    assert config is not None
    assert config["method"]["groups"] == "own"
    before = lines_of(file)
    assert relabel(file) == 2
    archive._read_lines.cache_clear()
    assert "groups=own" in read_result(first).method
    assert relabel(file) == 0
    for old, new in zip(before, lines_of(file), strict=True):
        assert old["record"] == new["record"]
        if old["result"]:
            assert {**old["result"], "method": ""} == {**new["result"], "method": ""}
