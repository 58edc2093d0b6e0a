"""Getting a data set: downloads from a real server that may fail, and imports of context files and folders."""

import hashlib
import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from holdfast.config import DataSettings
from holdfast.data.images import DataSet
from holdfast.data.prepare import download, import_local
from holdfast.data.sources import SOURCES, Download, load_data
from holdfast.errors import HoldfastError

CONTENT = bytes(range(256)) * 4_000  # a megabyte
MINI = SOURCES["mini-imagenet"]


@dataclass
class Server:
    """What the server has been asked, and how it is to behave."""

    url: str
    asked: list[str | None] = field(default_factory=list)  # the parts that were asked for, None for everything
    ranges: bool = True  # does it know what a part of a file is?
    cut: int | None = None  # bytes after which it hangs up, once
    chunked: bool = False  # without saying how much there is


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Server

    def do_GET(self) -> None:
        server, wanted = self.behaviour, self.headers["Range"]
        server.asked.append(wanted)
        self.close_connection = True
        if self.path != "/data.bin":
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
        self.send_response(206 if start else 200)
        body = CONTENT[start:]
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        size = ("Transfer-Encoding", "chunked") if server.chunked else ("Content-Length", str(len(body)))
        self.send_header(*size)
        self.end_headers()
        if server.chunked:
            self.wfile.write(f"{len(body):x}\r\n".encode())
        self.wfile.write(body[: server.cut])
        if server.chunked and server.cut is None:
            self.wfile.write(b"\r\n0\r\n\r\n")
        server.cut = None

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        Handler.behaviour = Server(f"http://127.0.0.1:{running.server_address[1]}/data.bin")
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Handler.behaviour
        running.shutdown()
        thread.join()


def wanted(url: str, sha256: str | None = None) -> Download:
    return Download(url, "data.bin", len(CONTENT), sha256 or hashlib.sha256(CONTENT).hexdigest())


def fails(what: Download, root: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        download(what, root)
    assert "\n" not in str(caught.value)
    assert not (root / "data.bin").exists()
    return str(caught.value)


def check_whole(root: Path) -> None:
    assert (root / "data.bin").read_bytes() == CONTENT
    assert [file.name for file in root.iterdir()] == ["data.bin"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_is_downloaded_whole(tmp_path: Path, server: Server, chunked: bool) -> None:
    server.chunked = chunked
    root = tmp_path / "not" / "there yet"
    assert download(wanted(server.url), root) == root / "data.bin"
    check_whole(root)
    assert server.asked == [None]


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT)
    assert download(wanted(server.url), tmp_path) == tmp_path / "data.bin"
    assert server.asked == []


def test_another_file_of_that_name_is_left_alone(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data.bin").write_bytes(b"precious")
    with pytest.raises(HoldfastError, match=r"data\.bin is not the published file: .* delete it and run"):
        download(wanted(server.url), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == b"precious"
    assert server.asked == []


@pytest.mark.parametrize("ranges", [True, False], ids=["continues", "starts again"])
def test_a_download_that_was_cut_goes_on(tmp_path: Path, server: Server, ranges: bool) -> None:
    server.ranges, server.cut = ranges, 700_001
    said = fails(wanted(server.url), tmp_path)
    assert said.startswith(f"{server.url} cannot be downloaded (")
    assert "run the same command again to continue, or download it yourself and import it with --from" in said
    assert "700,001 of 1,024,000 bytes" in said
    part = tmp_path / "data.bin.part"
    assert part.read_bytes() == CONTENT[:700_001]
    download(wanted(server.url), tmp_path)
    assert server.asked == [None, "bytes=700001-"]
    check_whole(tmp_path)


def test_a_download_that_is_cut_again_and_again(tmp_path: Path, server: Server) -> None:
    for n in range(1, 4):
        server.cut = 100_000
        assert f"{n}00,000 of 1,024,000 bytes" in fails(wanted(server.url), tmp_path)
    download(wanted(server.url), tmp_path)
    assert server.asked == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    check_whole(tmp_path)


def test_a_download_of_unknown_length_that_was_cut(tmp_path: Path, server: Server) -> None:
    server.chunked, server.cut = True, 700_001
    assert fails(wanted(server.url), tmp_path).startswith(f"{server.url} cannot be downloaded (")
    download(wanted(server.url), tmp_path)
    check_whole(tmp_path)


def test_a_part_that_is_whole_already_is_only_checked(tmp_path: Path, server: Server) -> None:
    """As a process leaves it that is killed at the very end."""
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    download(wanted(server.url), tmp_path)
    assert server.asked == []
    check_whole(tmp_path)


def test_another_file_than_the_published_one_is_refused(tmp_path: Path, server: Server) -> None:
    said = fails(wanted(server.url, "0" * 64), tmp_path)
    found = hashlib.sha256(CONTENT).hexdigest()[:12]
    assert said == (
        f"{tmp_path / 'data.bin.part'} is not the published file: its SHA-256 is {found}..., not 000000000000...; "
        "delete it and run the command again"
    )


def test_a_half_that_was_of_something_else_is_noticed(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data.bin.part").write_bytes(b"x" * 1000)
    assert "is not the published file" in fails(wanted(server.url), tmp_path)
    (tmp_path / "data.bin.part").unlink()  # as it says
    download(wanted(server.url), tmp_path)
    check_whole(tmp_path)


def test_a_file_that_the_server_does_not_have(tmp_path: Path, server: Server) -> None:
    url = server.url.replace("data.bin", "gone.bin")
    assert fails(wanted(url), tmp_path).startswith(f"{url} cannot be downloaded (Not Found); ")


def test_no_server_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    said = fails(wanted(f"http://127.0.0.1:{port}/data.bin"), tmp_path)
    assert "Connection refused" in said
    assert said.endswith("run the same command again to continue, or download it yourself and import it with --from")


def test_a_server_that_talks_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            caller, _ = listening.accept()
            with caller:
                caller.recv(1000)
                caller.sendall(b"220 welcome to this mail server\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/data.bin"
        said = fails(wanted(url), tmp_path)
        thread.join()
    assert said.startswith(f"{url} cannot be downloaded (")


def test_a_data_root_that_cannot_be_made(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HoldfastError, match=r"^cannot make the folder .*file/root \(Not a directory\); set HOLDFAST_"):
        download(wanted(server.url), tmp_path / "file" / "root")
    assert server.asked == []


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(file, "PNG")
    return file.getvalue()


FILES = {f"{name}/{i}.png": png(10 * i) for name in ("n01", "n02", "n03") for i in range(6)}


def write_zip(path: Path, top: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(top + name, content)
    return path


def write_folder(path: Path) -> Path:
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def load(place: Path | None) -> DataSet:
    return load_data(DataSettings(name="mini-imagenet", path=str(place) if place else None, size=16))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["mini-imagenet.zip", "miniImageNet.zip", "download (1).zip"])
def test_an_archive_is_copied(tmp_path: Path, root: Path, name: str) -> None:
    given = write_zip(tmp_path / name)
    content = given.read_bytes()
    target = import_local(MINI, given, root, load)
    assert target == root / (name if "ini" in name else "mini-imagenet.zip")
    assert list(root.iterdir()) == [target]
    given.unlink()
    assert not target.is_symlink()
    assert target.read_bytes() == content
    assert load(None).classes == ("n01", "n02", "n03")


@pytest.mark.parametrize("name", ["mini-imagenet", "my pictures"])
def test_a_folder_is_linked(tmp_path: Path, root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = write_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    target = import_local(MINI, Path(name), root, load)  # a relative place, and the link has to find it
    assert target == root / "mini-imagenet"
    assert target.is_symlink()
    assert target.samefile(given)
    assert load(None).classes == ("n01", "n02", "n03")


def test_an_archive_with_a_folder_in_it_is_read_as_before_it_was_imported(tmp_path: Path, root: Path) -> None:
    given = write_zip(tmp_path / "mine.zip", top="mine/")
    before = load(given)
    assert before.classes == ("n01", "n02", "n03")
    import_local(MINI, given, root, load)
    assert load(None).classes == before.classes


def test_importing_it_twice_does_no_harm(tmp_path: Path, root: Path) -> None:
    folder = write_folder(tmp_path / "mini")
    first = import_local(MINI, folder, root, load)
    assert import_local(MINI, folder, root, load) == first
    assert import_local(MINI, first, root, load) == first
    other = write_folder(tmp_path / "other")
    with pytest.raises(HoldfastError, match=r"mini-imagenet exists already; remove it first to import another$"):
        import_local(MINI, other, root, load)
    assert first.samefile(folder)


def refused(given: Path, root: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        import_local(MINI, given, root, load)
    assert "\n" not in str(caught.value)
    assert not root.exists() or not list(root.iterdir())
    return str(caught.value)


def test_nothing_to_import(tmp_path: Path, root: Path) -> None:
    given = tmp_path / "none.zip"
    assert (
        refused(given, root) == f"there is nothing at {given}; give the archive or folder of MiniImageNet with --from"
    )


def test_the_wrong_thing_is_refused_before_it_is_copied(tmp_path: Path, root: Path) -> None:
    given = tmp_path / "mini-imagenet.zip"
    given.write_bytes(b"half a download")
    assert "mini-imagenet.zip cannot be opened" in refused(given, root)
    (tmp_path / "empty").mkdir()
    assert "has no class folders" in refused(tmp_path / "empty", root)


def test_a_form_that_would_not_be_found_is_refused(tmp_path: Path, root: Path) -> None:
    given = write_zip(tmp_path / "mini.jar")
    assert f"{given} is not a known form of MiniImageNet: mini-imagenet, " in refused(given, root)


def test_a_tilde_is_the_home_folder(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "mini")
    assert import_local(MINI, Path("~/mini"), root, load).samefile(tmp_path / "mini")


def test_a_name_by_which_it_will_be_found_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tiny-imagenet-100.zip").write_bytes(b"any")
    target = import_local(SOURCES["tiny-imagenet"], tmp_path / "tiny-imagenet-100.zip", tmp_path / "root", str)
    assert target == tmp_path / "root" / "tiny-imagenet-100.zip"
