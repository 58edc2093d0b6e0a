"""A headless Chromium for tests of pages."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60  # for anything that a browser is asked
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]


class Browser:
    """A headless Chromium that is driven as a person would: by mouse and keys. It talks by the DevTools protocol, JSON
    with a zero after each message, through the two pipes that it is given as files 3 and 4."""

    def __init__(self, folder: Path) -> None:
        for name in ("in", "out"):
            os.mkfifo(folder / name)
        flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
        with open(folder / "log", "w") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", 'exec "$@" 3<in 4>out', "sh", str(CHROMIUM), *flags], cwd=folder, stdout=log, stderr=log
            )
        self._in, self._out = open(folder / "in", "wb", buffering=0), open(folder / "out", "rb", buffering=0)  # noqa: SIM115
        self._buffer, self._count, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{room}.enable")

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has said nothing for {SECONDS} s"
            more = self._out.read(1 << 20)
            assert more, "Chromium has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        self._count += 1
        where = {"sessionId": self._session} if self._session else {}
        self._in.write(json.dumps({"id": self._count, "method": method, "params": given, **where}).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while (answer := self._message(deadline)).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def open(self, place: Path | str, width: int = 1280, height: int = 900) -> None:
        """Shows a page that has loaded, from a file or an address."""
        self.resize(width, height)
        self.events.clear()
        self.call("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        deadline = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message(deadline)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def scheme(self, name: str) -> None:
        """light or dark; an empty name is the browser's own choice."""
        wanted = [{"name": "prefers-color-scheme", "value": name}] if name else []
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def picture(self, file: Path) -> Path:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
        return file

    def press(self, key: str, code: int, text: str = "") -> None:
        about = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, element: str) -> None:
        """Clicks into the middle of what an expression names."""
        middle = "(b => [b.x + b.width / 2, b.y + b.height / 2])(e.getBoundingClientRect())"
        x, y = self.ask(f"(e => {{ e.scrollIntoView({{block: 'center'}}); return {middle}; }})({element})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self, allowed: tuple[str, ...] = ("file:", "data:")) -> list[dict[str, Any]]:
        """Errors of the page, and what it would have a user see or fetch from elsewhere than `allowed`."""
        found = []
        for event in self.events:
            given = event["params"]
            error = given.get("type") in ("error", "assert") or given.get("entry", {}).get("level") == "error"
            url = given.get("request", {}).get("url", "file:")
            if (
                event["method"] in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening")
                or (event["method"] in ("Runtime.consoleAPICalled", "Log.entryAdded") and error)
                or (event["method"] == "Network.requestWillBeSent" and not url.startswith(("file:", *allowed)))
            ):
                found.append(event)
        return found

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(timeout=SECONDS)
        finally:
            self._process.kill()
            self._in.close()
            self._out.close()
