"""A real browser for tests of pages: Chromium, told what to do over its DevTools protocol."""

import asyncio
import base64
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest

START_SECONDS = 60.0


def find_browser() -> str:
    """Chromium's or Chrome's path; skips, or fails where ALBERT_DS_REQUIRE_BROWSER is set."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None and os.environ.get("ALBERT_DS_REQUIRE_BROWSER"):
        pytest.fail("no chromium on PATH, and ALBERT_DS_REQUIRE_BROWSER is set")
    if path is None:
        pytest.skip("needs chromium on PATH (Debian's package chromium)")
    return path


class Page:
    """A page as one reader sees it; use `look_at`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.requests: list[str] = []  # URLs that the browser asked for
        self.errors: list[str] = []  # exceptions of scripts
        self._loaded: set[str] = set()  # documents, by the number that the browser gives a load

    async def call(self, method: str, **params) -> dict:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (message := await self._receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    async def _receive(self) -> dict:
        message = await self._socket.receive_json(timeout=START_SECONDS)
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Page.lifecycleEvent" if message["params"]["name"] == "load":
                self._loaded.add(message["params"]["loaderId"])
        return message

    async def open(self, path: Path, *, width: int, is_dark: bool = False) -> None:
        for domain in ("Page", "Network", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        begun = await self.call("Page.navigate", url=path.absolute().as_uri())
        while begun["loaderId"] not in self._loaded:  # the browser's first page may end now, too
            await self._receive()

    async def ask(self, expression: str):
        """The value of a JavaScript expression."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def screenshot(self) -> bytes:
        """A PNG of the whole page."""
        reply = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(reply["data"])


async def _with_page(port: int, use):
    async with aiohttp.ClientSession() as session:
        pages: list[dict] = []
        while not pages:  # the browser listens before it has opened one
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [page for page in await answer.json() if page["type"] == "page"]
        url = pages[0]["webSocketDebuggerUrl"]
        async with session.ws_connect(url, max_msg_size=1 << 27) as socket:
            return await use(Page(socket))


def with_page(profile: Path, use):
    """The result of `use(page)`, a coroutine function, in a fresh browser."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    quiet = ("--disable-background-networking", "--disable-dev-shm-usage", "--no-first-run")
    command = [find_browser(), *flags, *quiet, "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        said = iter(process.stderr.readline, "")
        match = next(filter(None, (re.search(r"ws://127\.0\.0\.1:(\d+)", line) for line in said)))
        return asyncio.run(_with_page(int(match[1]), use))
    finally:
        process.terminate()
        process.communicate(timeout=120)
