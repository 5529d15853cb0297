"""A headless Chromium, over its DevTools pipe: JSON messages that end with a zero byte, on descriptors 3 and 4."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60  # seconds: no measure, only the end of waiting
_OF_CONSOLE = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


def find() -> str | None:
    """The browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page.

    Attributes:
        requests: addresses that were asked for since `open`.
        console: what was said there.
    """

    def __init__(self, program: str, profile: Path) -> None:
        (child_in, self._out), (self._in, child_out) = os.pipe(), os.pipe()
        command = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu"]
        command += ["--hide-scrollbars", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to be root within one
        # The shell puts the pipes where Chromium looks for them (plain sh takes one digit alone).
        shell = ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "bash", *command]
        self._log = open(profile.with_suffix(".log"), "w+", encoding="utf-8")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(shell, pass_fds=(child_in, child_out), stdout=self._log, stderr=self._log)
        os.close(child_in)
        os.close(child_out)
        self._rest, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.console: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path, width: int, height: int, dark: bool = False) -> None:
        """Loads a file in a window of that size, with all of its pictures."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.requests.clear()
        self.console.clear()
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def photograph(self, path: Path) -> None:
        """The whole page, as wide as the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self._out)  # it ends then
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._log.close()

    def _next(self) -> Any:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            found = os.read(self._in, 1 << 20) if ready else b""
            if not found:
                self._log.seek(0)
                raise AssertionError(f"the browser does not answer; it said: {self._log.read()[-3000:]}")
            self._rest += found
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method in _OF_CONSOLE:
            self.console.append(json.dumps(params))
        return message
