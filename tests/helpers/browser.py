"""A headless browser of the Chromium family, driven through the pipes of its DevTools protocol; nothing is installed for it.

The protocol: https://chromedevtools.github.io/devtools-protocol/. With `--remote-debugging-pipe` a browser reads requests from
file descriptor 3 and writes answers and events to 4, each a JSON text that ends in a NUL.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe")


def browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page of a browser.

    Attributes:
        said: what its console said and what its scripts threw.
        asked: addresses that it asked for.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb"), os.fdopen(back, "rb")
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a request, and wait for the browser's answer to it."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        self._to.write(json.dumps(request).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (c := self._back.read(1)) not in (b"\0", b""):
            text += c
        if not text:
            raise RuntimeError("the browser ended")
        message = json.loads(text)
        name, facts = message.get("method"), message.get("params", {})
        self._events.append(message)
        if name == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(a.get("value", a.get("description"))) for a in facts["args"]))
        elif name == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description", details["text"]))
        elif name == "Log.entryAdded":
            self.said.append(facts["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.asked.append(facts["request"]["url"])
        return message

    def open(self, address: str, width: int, height: int, scheme: str) -> None:
        """Open a page in a window of some size, `light` or `dark`, and wait until it is loaded."""
        self.said.clear()
        self.asked.clear()
        self._events.clear()
        small = width < 700
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=small)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.do("Page.navigate", url="about:blank")
        self.do("Page.navigate", url=address)
        while not any(e.get("method") == "Page.loadEventFired" for e in self._events) or self.run("document.URL") != address:
            self.run("new Promise((done) => setTimeout(done, 20))")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, waited for if it is a promise."""
        found = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key by its name: Tab, Enter, ArrowDown."""
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36}[key]
        for kind in ("keyDown", "keyUp"):
            self.do(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, as PNG."""
        found = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def opened(command: str) -> Generator[Tab]:
    """A page of a new browser, which ends with the block."""
    ends = [*os.pipe(), *os.pipe()]
    read, to, back, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)  # clear of 3 and 4
    for end in ends:
        os.close(end)

    def connect() -> None:
        os.dup2(read, 3)
        os.dup2(write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its children may write a little longer
        line = [command, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(line, pass_fds=(3, 4), preexec_fn=connect, stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        try:
            yield Tab(to, back)
        finally:
            process.terminate()
            process.wait(30)
