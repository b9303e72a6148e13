"""`gspo watch RUN`: a run's report, live, on the loopback address, while the run trains."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from .html import render
from .records import RecordsError, read_config
from .text import visible

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
"""Hosts that a request may name. Any other, as in DNS rebinding, is a page of somebody else's that was led here."""

REST = 4
"""The report is drawn again only after a rest this many times as long as the last drawing took: at most a fifth of one
core is taken from the training beside it."""

TAIL_BYTES = 1 << 18  # of metrics.jsonl: more than a row takes
SILENT_S = 10.0  # a connection that sends nothing for so long is closed

Answer = tuple[int, str, str]
"""Status, content type, text."""


class Watch:
    """The report of one run, drawn when it is asked for and the run's files have changed.

    May be asked from several threads; one at a time draws.
    """

    def __init__(self, folder: Path):
        """folder: the run's, which need not be there yet. Raises RecordsError if something else is in its place."""
        other = folder.exists() and not folder.is_dir()
        if other or (folder.is_dir() and not is_run(folder) and any(folder.iterdir())):
            raise RecordsError(f"{folder}: is no folder of a run: it holds neither config.json nor metrics.jsonl")
        self.folder = folder
        self._lock = Lock()
        self._page, self._version = "", ""
        self._rest_until = 0.0

    def version(self) -> str:
        """Which report `page` would give: another once the files changed and the rest after a drawing is over."""
        return self._version if self._version and time.monotonic() < self._rest_until else fingerprint(self.folder)

    def page(self) -> str:
        """The report as it is now, or, where a file of the run cannot be read, a page that says so."""
        with self._lock:
            version = self.version()
            if version != self._version:
                start = time.monotonic()
                self._page = self._drawn()
                self._version = version
                self._rest_until = time.monotonic() + REST * (time.monotonic() - start)
        return self._page

    def _drawn(self) -> str:
        if not is_run(self.folder):
            return _plain("The run has not begun yet.")
        try:
            return render(self.folder)
        except Exception as error:  # files vanish where a run resumes, and may be damaged in any way
            return _plain(f"There is no report: {error}")


def _plain(sentence: str) -> str:
    """A page of one sentence."""
    head = '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><title>no report</title>'
    return f'{head}<p style="font: 16px system-ui, sans-serif; margin: 40px">{html.escape(visible(sentence))}</p>'


def is_run(folder: Path) -> bool:
    """Whether a run has begun in the folder."""
    return any((folder / name).is_file() for name in ("config.json", "metrics.jsonl"))


def fingerprint(folder: Path) -> str:
    """A short text that changes whenever a file of the run's records does."""
    try:
        entries = [*folder.iterdir(), *(folder / "cold_start").glob("*.jsonl")]
        known = [p for p in entries if not p.name.startswith(("report.html", "."))]
        stats = sorted((p.name, (s := p.stat()).st_mtime_ns, s.st_size) for p in known)
    except OSError as error:  # gone, or something in it just now
        stats = [str(error), time.monotonic_ns()]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def state(folder: Path) -> tuple[str, bool]:
    """Where the run is, in a few words, and whether steps are still to come."""
    name = visible(folder.resolve().name, keep="")
    if not is_run(folder):
        return f"{name}: waiting for the run to begin; {visible(str(folder), keep='')} is not there yet", True
    try:
        steps = read_config(folder).get("training", {}).get("steps")
    except RecordsError as error:
        return visible(str(error)), False
    row = last_row(folder)
    if row is None or row["step"] == 0:
        cold = last_row(folder / "cold_start")
        word = "measured before training, " if row else f"cold start at step {cold['step']:,}, " if cold else ""
        return f"{name}: {word}no training step is recorded yet", True
    if row["step"] == steps:
        return f"{name}: all {steps:,} steps are recorded", False
    of = f" of {steps:,}" if steps else ""
    return f"{name}: step {row['step']:,}{of}, recorded {_ago(folder)}", True


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last whole row of metrics.jsonl, None if there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:  # torn, or cut by the seek
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return None


def _ago(folder: Path) -> str:
    try:
        seconds = max(0.0, time.time() - (folder / "metrics.jsonl").stat().st_mtime)
    except OSError:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def serve(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address that answers GET of `/`, `/report` and `/version`, and nothing else.

    port: 0 takes any that is free. It refuses requests that name another host. Not covered: other users of this machine
    may open the page too. Raises RecordsError for a folder of something else, OSError, with the port, if that is taken.
    """
    watch = Watch(folder)
    try:
        return _Server(watch, port)
    except OSError as error:
        raise OSError(f"port {port} of {ADDRESS} cannot be had ({error.strerror}): choose another, or 0 for any") from error


def watch(folder: Path, *, port: int = 0) -> None:
    """Serve the report of a run until Ctrl-C, which ends the watching and not the run. Raises what `serve` does."""
    with serve(folder, port) as server:
        note = "" if is_run(folder) else ", which is not there yet,"
        print(f"watching {folder}{note} at http://{ADDRESS}:{server.server_address[1]}/ until Ctrl-C", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("stopped watching; the run goes on as it was", flush=True)


def _shell(folder: Path) -> tuple[str, str]:
    """The page around the report, and what it may do: run its own script, ask this server, frame its pages."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    page = Environment(loader=PackageLoader("gspo.reporting", "."), autoescape=True, undefined=StrictUndefined)
    script = Path(__file__).with_name("watch.js").read_text(encoding="utf-8")
    name = visible(folder.resolve().name, keep="")
    text = page.get_template("watch.html.j2").render(name=name, script=Markup(script))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; frame-src 'self'"
    return text, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a browser that holds a connection open does not keep Ctrl-C waiting

    def __init__(self, watch: Watch, port: int) -> None:
        self.watch = watch
        self.shell, self.policy = _shell(watch.folder)
        super().__init__((ADDRESS, port), _Handler)

    def answer(self, path: str) -> Answer:
        if path == "/":
            return 200, "text/html", self.shell
        if path == "/report":
            return 200, "text/html", self.watch.page()
        if path == "/version":
            words, live = state(self.watch.folder)
            return 200, "application/json", json.dumps({"version": self.watch.version(), "state": words, "live": live})
        return 404, "text/plain", "there is nothing here; the page is at /\n"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # a browser that left
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_S
    server_version, sys_version = "gspo", ""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")
        if (host[0] or host[2]).lower() not in NAMES:
            return self._send(421, "text/plain", f"this server answers to {' and '.join(NAMES)} alone\n", {})
        path = self.path.partition("?")[0]
        policy = self.server.policy if path == "/" else "frame-ancestors 'self'"
        self._send(*self.server.answer(path), {"Content-Security-Policy": policy})

    def _send(self, status: int, kind: str, text: str, headers: Mapping[str, str]) -> None:
        body = text.encode()
        self.send_response(status)
        fixed = {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        sizes = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (sizes | fixed | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal stays readable."""
