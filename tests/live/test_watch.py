"""`holdfast watch`: runs move on a local page while they are written, and nothing but the page is served."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser

from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.experiment import run_to_folder
from holdfast.live.server import application
from holdfast.live.watched import POINTS, Tail, Watched, expected_end, is_running, locked_inodes, thinned
from holdfast.results.record import only_writer, read_record

SECONDS = 60


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "task": 1, "accuracy": number / 10, "losses": {"a": 1.0, "b": 0.5}, **more}


def add(file: Path, text: str) -> None:
    with open(file, "a") as stream:
        stream.write(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any], cache: Path) -> Path:
    """A folder with one finished run."""
    folder = tmp_path_factory.mktemp("watched") / "runs"
    run_to_folder(load_config({**small, "seed": 1, "method": {"name": "fedavg"}}), folder / "a" / "done")
    return folder


# what is read


def test_only_complete_lines_are_read_and_only_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "record.jsonl")
    assert tail.read() == []  # there is no file yet
    text = json.dumps(line(2))
    add(tail.file, json.dumps(line(1)) + "\n" + text[:9])
    assert [one["round"] for one in tail.read()] == [1]
    first = tail.lines[0]
    add(tail.file, text[9:] + "\n")
    assert [one["round"] for one in tail.read()] == [1, 2]
    assert tail.lines[0] is first  # not parsed again
    assert [one["round"] for one in tail.read()] == [1, 2]


def test_a_record_that_was_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    """As when a run is resumed after a round that was recorded but not checkpointed."""
    tail = Tail(tmp_path / "record.jsonl")
    add(tail.file, "".join(json.dumps(line(n)) + "\n" for n in (1, 2, 3)))
    tail.read()
    (tmp_path / "new").write_text(json.dumps(line(1, accuracy=0.9)) + "\n")
    os.replace(tmp_path / "new", tail.file)
    assert [one["accuracy"] for one in tail.read()] == [0.9]


def test_lines_that_are_no_rounds_are_skipped(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "record.jsonl")
    add(tail.file, f'{{"round": 1\n[1]\n{json.dumps(line(1))}\n{{"round": "x"}}\n')
    assert tail.read() == [line(1)]


def test_the_state_of_a_finished_run_is_that_of_its_record(finished: Path) -> None:
    [run] = Watched(finished).state()["runs"]
    record = read_record(finished / "a" / "done")
    assert (run["name"], run["state"], run["method"], run["seed"]) == ("a/done", "finished", "fedavg", 1)
    assert (run["round"], run["rounds"], run["task"], run["tasks"]) == (6, 6, 3, 3)
    assert run["curve"] == [(one["round"], pytest.approx(one["accuracy"], abs=1e-5)) for one in record]
    assert run["starts"] == [0, 2, 4]
    assert run["bytes"]["server"] == sum(sum(one["bytes"]["server"].values()) for one in record)
    assert (run["ends"], run["training"], run["refused"]) == (None, [], 0)


def test_a_run_is_running_while_a_process_holds_its_lock(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(finished / "a" / "done", folder)
    (folder / "result.json").unlink()
    lines = (folder / "record.jsonl").read_text().splitlines(keepends=True)
    (folder / "record.jsonl").write_text("".join(lines[:3]))
    watched, plan = Watched(tmp_path), json.loads((folder / "plan.json").read_text())
    [run] = watched.state()["runs"]
    assert (run["state"], run["training"], run["ends"]) == ("stopped", [], None)
    with only_writer(folder):
        [run] = watched.state()["runs"]
    assert run["state"] == "running"
    assert run["training"] == [f"client {client}" for client in plan["selected"][3]]
    assert run["ends"] > run["changed"]
    (folder / ".lock").touch()  # what a killed process leaves behind
    assert watched.state()["runs"][0]["state"] == "stopped"


def test_watching_never_takes_the_lock_and_never_writes(finished: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*")}
    Watched(finished).state()
    assert {file: file.stat().st_mtime_ns for file in finished.rglob("*")} == before


def test_without_a_list_of_locks_a_quiet_run_counts_as_stopped(tmp_path: Path) -> None:
    assert is_running(tmp_path, None, 1.0) is False
    (tmp_path / ".lock").touch()
    assert is_running(tmp_path, None, 1.0) is True
    assert is_running(tmp_path, None, 3600.0) is False
    assert (tmp_path / ".lock").stat().st_ino not in (locked_inodes() or set())


def test_the_time_left_follows_the_clients_that_are_left() -> None:
    lines = [
        {"seconds": {"train": 3.0, "grow": 1.0}, "selected": [1, 2]},
        {"seconds": {"train": 8.0}, "selected": [1, 2]},
    ]
    # 2 and 4 seconds per client: 3 in the median; 5 clients are left
    assert expected_end(lines, [[1, 2], [1, 2], [1, 2, 3], [4, 5]], 1000.0) == 1015.0
    assert expected_end(lines, [[1, 2], [1, 2]], 1000.0) is None
    assert expected_end([], [[1]], 1000.0) is None


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    points: list[tuple[int, float | None]] = [(i, 0.1) for i in range(1, 1002)]
    assert len(thinned(points)) <= POINTS + 1
    assert (thinned(points)[0], thinned(points)[-1]) == ((1, 0.1), (1001, 0.1))
    assert thinned(points[:7]) == points[:7]
    assert thinned([]) == []


def test_refused_updates_and_absent_clients_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[method]\nname = "lga"\n')
    refusal = {"client": "east", "kind": "norm", "reason": "the update is 40 times the median"}
    add(tmp_path / "record.jsonl", json.dumps(line(1, refused=[refusal] * 7, missing=["west"])) + "\n")
    [run] = Watched(tmp_path).state()["runs"]
    assert (run["refused"], run["missing"], len(run["refusals"])) == (7, 1, 5)
    assert run["refusals"][0] == {"round": "1", **refusal}
    add(tmp_path / "record.jsonl", json.dumps(line(2, refused=[{**refusal, "client": 3}])) + "\n")
    assert Watched(tmp_path).state()["runs"][0]["refusals"][-1]["client"] == "client 3"


def test_folders_that_are_no_runs_do_not_hide_the_others(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "all")
    for name, text in (("x", "name = ["), ("y", "method = 3"), ("z", '[method]\nname = "lga"\n')):
        (tmp_path / "all" / name).mkdir()
        (tmp_path / "all" / name / "config.toml").write_text(text)
    (tmp_path / "all" / "z" / "plan.json").write_text('{"selected": 3, "tasks": 7}')
    assert [run["name"] for run in Watched(tmp_path / "all").state()["runs"]] == ["a/done"]


# what is served


@pytest.mark.parametrize("name", ["starlette.applications", "uvicorn"])
def test_without_the_extra_there_is_one_sentence(
    name: str, finished: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    code, out, err = holdfast("watch", finished, "--port", 0)
    assert (code, out) == (2, "")
    assert "pip install 'holdfast[live]'" in " ".join(err.split())
    assert err.strip().count("\n") == 0


def test_a_folder_that_is_not_there_is_one_sentence(
    tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, err = holdfast("watch", tmp_path / "none")
    assert code == 2
    assert "name the folder that holds your runs" in " ".join(err.split())


class Server:
    """`holdfast watch` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "holdfast", "watch", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+) shows ", said)
        assert found, (said, self.process.stderr.read() if self.process.stderr and not said else "")
        self.address = found[1]
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                self.get("/state")
                return
            except urllib.error.URLError:
                time.sleep(0.05)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(self.address + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def close(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=SECONDS)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Iterator[tuple[Server, Path]]:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    folder = tmp_path_factory.mktemp("live") / "runs"
    shutil.copytree(finished, folder)
    server = Server(folder)
    yield server, folder
    assert server.close() == 0  # Ctrl-C is the way to end it, not a mistake


def test_the_server_answers_this_machine_with_the_page_alone(watched: tuple[Server, Path]) -> None:
    server, _ = watched
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):  # this machine's other addresses do not reach it
        socket.create_connection(("127.0.0.2", port), timeout=SECONDS)
    for path in ("/", "/live.css", "/live.js", "/state"):
        status, headers, body = server.get(path)
        assert (status, bool(body)) == (200, True)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert server.get(path, method="POST")[0] == 405
    for path in ("/../pyproject.toml", "/server.py", "/a/done/config.toml", "/docs"):
        assert server.get(path)[0] == 404
    assert server.get("/state", Host="evil.example")[0] == 400


def test_an_unchanged_state_is_not_sent_again(watched: tuple[Server, Path]) -> None:
    server, _ = watched
    _, headers, body = server.get("/state")
    assert json.loads(body)["runs"]
    again = server.get("/state", **{"If-None-Match": headers["etag"]})
    assert (again[0], again[2]) == (304, b"")


def test_a_run_in_the_background_moves_on_the_page(
    watched: tuple[Server, Path], browser: Browser, small: dict[str, Any], tmp_path: Path
) -> None:
    server, folder = watched
    plan = {**small["plan"], "rounds": 400}
    settings = {**small, "plan": plan, "run": {"engine": "serial"}, "seed": 2, "method": {"name": "fedavg"}}
    code = (
        f"from holdfast.config import load_config; from holdfast.experiment import run_to_folder; "
        f"from pathlib import Path; run_to_folder(load_config({settings!r}), Path({str(folder / 'moving')!r}))"
    )
    browser.open(server.address)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        card = "[...document.querySelectorAll('article')].find(one => one.querySelector('h2').textContent === 'moving')"
        seen: dict[int, str] = {}
        deadline = time.monotonic() + SECONDS
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
            state = browser.ask(
                f"(one => one && one.className === 'running' && one.querySelector('svg .curve').getAttribute('d') !== "
                f"'M0 0' ? [one.querySelector('progress').value, one.querySelector('.curve').getAttribute('d'), "
                f"one.textContent] : null)({card})"
            )
            if state:
                seen[int(state[0])] = state[1]
                text = state[2]
        assert len(seen) == 3
        assert sorted(seen) == list(seen)  # rounds only go up
        assert all(len(seen[a]) < len(seen[b]) for a, b in zip(list(seen), list(seen)[1:], strict=False))
        assert "fedavg on glyphs, seed 2" in text
        assert re.search(r"round \d+ of 1200, task 1 of 3 · .* MB with the server.* · 0 refused, 0 absent", text)
        assert re.search(r"about [\d.]+ (s|min|h) left", text)
        assert re.search(r"In this round: client \d", text)
        assert browser.ask("document.querySelector('#running h2').textContent") == "moving"
        assert browser.ask("document.querySelector('#others h2').textContent") == "a/done"
    finally:
        run.terminate()
        run.wait(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while browser.ask(f"{card}.className") != "stopped" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert browser.ask("document.querySelector('#status').textContent").endswith("0 running, 1 stopped, 1 finished")
    assert browser.ask("document.querySelectorAll('button, form, input').length") == 0
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        for width in (1280, 390):
            browser.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
            )
            assert browser.ask("document.documentElement.scrollWidth") <= width
            assert browser.picture(tmp_path / f"{scheme}-{width}.png").stat().st_size > 5000
    browser.scheme("")
    assert browser.complaints(allowed=(server.address, "data:")) == []


def test_a_page_whose_server_is_gone_says_so(browser: Browser, finished: Path) -> None:
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application(Watched(finished).state), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        browser.open(f"http://127.0.0.1:{listener.getsockname()[1]}")
        deadline = time.monotonic() + SECONDS
        while not browser.ask("document.querySelectorAll('article').length") and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(timeout=SECONDS)
        listener.close()
    while browser.ask("document.querySelector('#status').className") != "lost" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "the last known state" in browser.ask("document.querySelector('#status').textContent")
    assert browser.ask("document.querySelectorAll('article').length") == 1


def test_a_port_that_is_taken_is_one_sentence(finished: Path, holdfast: Callable[..., tuple[int, str, str]]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = holdfast("watch", finished, "--port", taken.getsockname()[1])
    assert code == 2
    assert "choose another with --port" in " ".join(err.split())


def test_the_application_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(HoldfastError, match="needs starlette and uvicorn"):
        application(dict)
