"""A page as parsed, and a page in a real headless browser."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason="needs /usr/bin/chromium")


class Page(HTMLParser):
    """Elements with their attributes, scripts with their text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words = [], [], []
        self._script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        else:
            self.words.append(data)

    @property
    def data(self):
        """What the page embeds for its table of samples."""
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("type") == "application/json"))


def chromium(page: Path, *flags: str, seconds: float = 60) -> str:
    """The page's document once its scripts are through. Raises AssertionError for whatever they wrote to the console."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return done.stdout


def driven(page: Path, beside: Path, driver: str, *flags: str, width: int = 1280) -> Any:
    """What the driver, the body of a function, returns inside a copy of the page written to `beside`.

    The page's policy forbids a driver, so the copy drops the policy. It stands in a frame, since no window of this browser
    is as narrow as a phone. width: of the frame, pixels.
    """
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    wrapped = f"<script>parent.postMessage(JSON.stringify((() => {{ {driver} }})()), '*');</script></body>"
    beside.write_text(text.replace("</body>", wrapped), encoding="utf-8")
    around = beside.with_name("around.html")
    around.write_text(f"""<!doctype html><meta name="color-scheme" content="light dark"><pre id="log"></pre>
    <script>addEventListener("message", (event) => {{ document.getElementById("log").textContent = event.data; }});</script>
    <iframe src="{beside.name}" style="border: 0; width: {width}px; height: 800px"></iframe>""")
    window = f"--window-size={max(width + 40, 800)},900"
    match = re.search(r'<pre id="log">(.+?)</pre>', chromium(around, window, "--hide-scrollbars", *flags), re.S)
    assert match, "the driver did not finish"
    return json.loads("".join(Page(match[1]).words))
