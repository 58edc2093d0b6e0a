"""docs/deploy.md, followed word by word: its agreement, its commands in their order, and the report at the end."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.processes import free_ports, glyphs, status, write_images

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_the_page_leads_from_the_agreement_to_the_report(tmp_path: Path) -> None:
    text = PAGE.read_text()
    [agreement] = re.findall(r'```toml title="federation.toml"\n(.*?)```', text, re.DOTALL)
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    commands = [line[2:] for block in blocks for line in block.splitlines()]
    for port, free in zip(("9092", "9093"), free_ports(2), strict=True):
        agreement = agreement.replace(f":{port}", f":{free}")  # others may use the page's ports on this machine
    (tmp_path / "federation.toml").write_text(agreement)
    images = glyphs(2, 20)
    for site, part in (("north", slice(0, 10)), ("south", slice(10, 20))):
        write_images(tmp_path / "images" / site, {name: arrays[part] for name, arrays in images.items()})
    started: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    try:
        for command in commands:
            name, *arguments = shlex.split(command.removesuffix("&"))
            assert name == "holdfast"
            argv = [sys.executable, "-m", "holdfast", *arguments]
            if command.endswith("&"):
                log = open(tmp_path / f"{len(started)}.log", "wb")  # noqa: SIM115
                started.append(subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=log, stderr=log))
                log.close()
                if arguments[0] == "proxy":
                    _wait(lambda: (tmp_path / "kits/proxy/state/status.json").exists(), tmp_path)
                if len(started) == 4:
                    _wait(lambda: status(tmp_path / "kits/server").get("state") == "finished", tmp_path)
                continue
            done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, command + done.stdout + done.stderr
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20)
    report = (tmp_path / "report.html").read_text()
    assert "lga" in report
    assert len(commands) == 11


def _wait(until, folder: Path) -> None:
    end = time.monotonic() + 120
    while not until():
        logs = "\n".join(file.read_text()[-2000:] for file in folder.glob("*.log"))
        assert time.monotonic() < end, logs
        time.sleep(0.1)
