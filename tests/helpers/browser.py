"""A headless Chromium that tests look at pages with, over its pipe: no package is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
--disable-background-networking --disable-component-update --disable-sync""".split()
SECONDS = 60  # for what a page should have done at once


def program():
    """The path of a Chromium, or the test is skipped, and says so."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium on this machine: the page was not looked at in a browser")
    return found


class Browser:
    """One tab; `events` are what the page said since it was opened."""

    def __init__(self, profile):
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # --remote-debugging-pipe reads descriptor 3 and writes descriptor 4
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        shell = ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*ends), "browser"]
        flags = [*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            [*shell, program(), *flags],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self._buffer, self._number, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """One command of the DevTools protocol -> its result."""
        self._number += 1
        message = dict(id=self._number, method=method, params=params)
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, width=1400, height=1000, scheme="light", **media):
        """Load a file; `media` are other features, such as prefers_reduced_motion."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = {"prefers-color-scheme": scheme}
        features |= {name.replace("_", "-"): value for name, value in media.items()}
        features = [dict(name=name, value=value) for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events = []
        self.call("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def run(self, script):
        """The value of a script in the page, from outside its policy."""
        ran = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in ran, ran["exceptionDetails"]
        return ran["result"].get("value")

    def until(self, script):
        """The value of a script as soon as it is something."""
        limit = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < limit, f"never: {script}"
            time.sleep(0.05)
        return value

    def place(self, script):
        """The rectangle of an element, once it is in sight: left, top, width, height."""
        self.run(f"({script}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        time.sleep(0.1)
        box = f"(r => [r.left, r.top, r.width, r.height])(({script}).getBoundingClientRect())"
        return self.run(box)

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path, whole=False):
        """A screenshot as PNG -> the path."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self):
        """What went wrong in the page: errors, refusals, anything on its console."""
        loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [e["params"] for e in self.events if e.get("method") in loud]

    def requests(self):
        """The addresses that the page asked for."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def close(self):
        self._session = None
        self.call("Browser.close")
        self.process.wait(SECONDS)
        os.close(self._write), os.close(self._read)
