"""Size of a run's report and the time that it takes to open: `python benchmarks/report.py [RUN...]`, by default of a run of
500 steps with every metric and sample that a report reads, a mixture of 24 layers of experts, written by the same code as
a real one's but made up.

Opening is measured inside a headless Chromium, a fresh one each time, the page read from disk: from when the page is asked
for until the second frame after its load event, with everything laid out and drawn. Starting the browser is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote

from gspo.reporting.html import render

CHROMIUM = Path("/usr/bin/chromium")
WINDOW = (1280, 800)
STEPS = 500

HARNESS = """<!doctype html><style>body {{ margin: 0 }} iframe {{ border: 0; width: 100vw; height: 100vh }}</style>
<body><script>
const frame = document.createElement("iframe");
const tell = (ms) => fetch("http://127.0.0.1:{port}/?" + encodeURIComponent(JSON.stringify(ms)), {{ mode: "no-cors" }});
frame.onload = () => {{
  const loaded = performance.now() - start;
  requestAnimationFrame(() => requestAnimationFrame(() => tell([loaded, performance.now() - start])));
}};
const start = performance.now();
frame.src = {page};
document.body.append(frame);
</script>"""


def opened_ms(page: Path, *, timeout_s: float = 60) -> tuple[float, float]:
    """Milliseconds until a page's load event, and until it is drawn, in a browser that is started for it.

    Raises TimeoutError if it does not open in time.
    """
    told: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.append(unquote(self.path.partition("?")[2]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server.timeout = 0.5
        harness = Path(folder) / "harness.html"
        harness.write_text(HARNESS.format(port=server.server_address[1], page=json.dumps(page.resolve().as_uri())))
        command = browser(folder, harness.as_uri())
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                end = time.monotonic() + timeout_s
                while not told:
                    server.handle_request()
                    if time.monotonic() > end:
                        raise TimeoutError(f"{page}: not open after {timeout_s} s")
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # its helpers too, which write into the profile that is removed next
    loaded, drawn = json.loads(told[0])
    return loaded, drawn


def browser(folder: str, address: str) -> list[str]:
    """The command of a headless browser with a profile of its own."""
    window = f"--window-size={WINDOW[0]},{WINDOW[1]}"
    quiet = ["--disable-background-networking", "--no-first-run", "--disable-component-update"]
    return [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        window,
        f"--user-data-dir={folder}",
        *quiet,
        address,
    ]


def made_up(folder: Path) -> Path:
    """A run of STEPS steps of a mixture, as the tests make it, with samples of every step."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from synthetic_run import write_run

    return write_run(folder, STEPS, samples_every=1, layers=24)


def measure(run: Path, page: Path, repeats: int) -> str:
    """One line: seconds to draw, bytes, milliseconds to open."""
    start = time.perf_counter()
    page.write_text(render(run), encoding="utf-8", newline="\n")
    drawn = time.perf_counter() - start
    times = [opened_ms(page) for _ in range(repeats)]
    loaded, shown = (sorted(part) for part in zip(*times, strict=True))
    middle = f"loaded after {statistics.median(loaded):.0f} ms, drawn after {statistics.median(shown):.0f}"
    return (
        f"{run}: written in {drawn:.1f} s, {page.stat().st_size:,} bytes; {middle} (slowest {shown[-1]:.0f} of {repeats})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for run in options.runs or [made_up(Path(folder) / "made-up")]:
            print(measure(run, Path(folder) / "report.html", options.repeats), flush=True)


if __name__ == "__main__":
    main()
