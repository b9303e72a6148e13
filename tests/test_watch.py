"""Laws of watching a run: on the loopback address alone, only what it has to serve, and never in the run's way."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import numpy as np
import pytest
import report as benchmark
from synthetic_run import CONFIG, evaluation, samples_of, step_row, write_run

from gspo.reporting import watch as watching
from gspo.reporting.records import RecordsError, RunRecords
from gspo.reporting.watch import Watch, fingerprint, serve, state

needs_chromium = pytest.mark.skipif(not benchmark.CHROMIUM.exists(), reason="needs /usr/bin/chromium")


@pytest.fixture
def small(tmp_path):
    """A run of a few steps, whose report is quickly drawn."""
    folder = tmp_path / "small"
    records = RunRecords(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    append(records, 1, 2, 3)
    return folder


def append(records, *steps):
    for step in steps:
        records.append({"step": step, "reward/mean": 0.1 * step})


@contextmanager
def serving(folder):
    with serve(folder) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/version", *, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


# ---- what is served, and to whom --------------------------------------------------------------------------


def test_it_listens_on_the_loopback_address_alone(small):
    with serving(small) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_only_three_paths_are_served_and_only_to_get(small):
    with serving(small) as server:
        assert [ask(server, path)[0] for path in ("/", "/report", "/version", "/version?x=1")] == [200] * 4
        for path in ("/metrics.jsonl", "/../config.json", "/report.html", "/%2e%2e/", "/report/"):
            assert ask(server, path)[0] == 404
        for method in ("POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/", method=method)[0] == 501


def test_a_page_of_somebody_else_that_was_led_here_is_refused(small):
    with serving(small) as server:
        port = server.server_address[1]
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            "localhost.evil.example",
            "",
        ):
            status, text, _ = ask(server, "/report", Host=host)
            assert status == 421 and "reward" not in text
        for host in (f"127.0.0.1:{port}", "localhost", "LOCALHOST:9000"):  # another port: forwarded through ssh
            assert ask(server, Host=host)[0] == 200


def test_pages_say_what_they_may_do_and_are_kept_by_nobody(small):
    with serving(small) as server:
        _, text, headers = ask(server, "/")
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "frame-ancestors 'none'" in policy
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
        assert "http:" not in text and "https:" not in text
        assert "frame-ancestors 'self'" in ask(server, "/report")[2]["Content-Security-Policy"]


def test_a_port_that_is_taken_is_named(small):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 cannot be had"):
            serve(small, port)


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(RecordsError, match="is no folder of a run"):
            serve(folder)


# ---- following a run --------------------------------------------------------------------------------------


def test_a_run_may_be_watched_before_it_has_begun(tmp_path):
    watch = Watch(tmp_path / "new")
    assert "The run has not begun yet." in watch.page() and state(watch.folder)[0].startswith("new: waiting for the run")
    RunRecords(watch.folder)
    assert Watch(watch.folder).page() == watch.page()
    (watch.folder / "config.json").write_text("{}")
    time.sleep(0.1)
    assert "No step was recorded." in watch.page()


def test_before_the_first_step_the_page_says_so_and_shows_the_cold_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert state(tmp_path) == (f"{tmp_path.name}: no training step is recorded yet", True)
    cold = RunRecords(tmp_path / "cold_start")
    for step in range(1, 4):
        cold.append({"step": step, "cold_start/loss": 1 / step})
    page = Watch(tmp_path).page()
    assert "No step was recorded." in page and 'id="cold-start"' in page
    assert state(tmp_path) == (f"{tmp_path.name}: cold start at step 3, no training step is recorded yet", True)


def test_the_state_follows_the_records_whatever_their_last_line(small):
    assert state(small)[0].startswith("small: step 3 of 500, recorded ") and state(small)[1]
    with (small / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert "step 3 of 500" in state(small)[0] and "0.3" in Watch(small).page()
    RunRecords(small).truncate_after(3)
    append(RunRecords(small), 500)
    assert state(small) == ("small: all 500 steps are recorded", False)


def test_the_version_changes_with_the_records_and_with_nothing_else(small):
    records, seen = RunRecords(small), [fingerprint(small)]
    (small / "report.html").write_text("x")
    assert fingerprint(small) == seen[0]
    append(records, 4)
    seen.append(fingerprint(small))
    records.write_samples(4, [{"id": "a"}])
    seen.append(fingerprint(small))
    assert len(set(seen)) == 3


def test_the_report_is_drawn_when_asked_for_and_rests_in_between(small, monkeypatch):
    drawn = []
    monkeypatch.setattr(watching, "render", lambda folder: drawn.append(time.sleep(0.05)) or f"page {len(drawn)}")
    watch, records = Watch(small), RunRecords(small)
    assert not drawn and watch.page() == watch.page() == "page 1"
    first = watch.version()
    append(records, 4)
    assert watch.version() == first and watch.page() == "page 1"  # at rest: the training beside it comes first
    time.sleep(watching.REST * 0.05 + 0.1)
    assert watch.version() != first and watch.page() == "page 2"


def test_files_that_cannot_be_read_make_a_page_that_says_so(small):
    (small / "versions.json").write_text("{<b>")
    page = Watch(small).page()
    assert "versions.json: is damaged" in page and "<b>" not in page


def test_watching_writes_nothing_into_the_run(small):
    before = sorted((p.name, p.stat().st_mtime_ns) for p in small.rglob("*"))
    with serving(small) as server:
        assert all(ask(server, path)[0] == 200 for path in ("/", "/report", "/version"))
    assert sorted((p.name, p.stat().st_mtime_ns) for p in small.rglob("*")) == before


WRITER = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
import numpy as np
from synthetic_run import evaluation, samples_of, step_row
from gspo.reporting.records import RunRecords
rng, records = np.random.default_rng(0), RunRecords(sys.argv[1])
for step in range(1, 21):
    records.write_samples(step, samples_of(step, rng, 8))
    line = json.dumps(step_row(step, 20, rng) | (evaluation(0.5, rng) if step % 10 == 0 else {})) + "\\n"
    with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
        for part in (line[:100], line[100:]):  # torn for a moment in every step
            file.write(part); file.flush(); time.sleep(0.02)
"""


def test_a_run_that_another_process_is_writing_is_followed_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "REST", 0.5)
    folder = tmp_path / "run"
    RunRecords(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"training": {"steps": 20}}))
    with serving(folder) as server:
        assert json.loads(ask(server)[1])["live"] and "No step was recorded" in ask(server, "/report")[1]
        words = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)]
        with subprocess.Popen(words) as writer:
            pages, end = [], time.monotonic() + 90
            while json.loads(ask(server)[1])["live"] and time.monotonic() < end:
                pages.append(ask(server, "/report"))
                time.sleep(0.2)
        assert writer.returncode == 0
        steps = [int(m[1]) for _, text, _ in pages if (m := re.search(r"<span>(\d+) of 20 steps</span>", text))]
        assert {status for status, _, _ in pages} == {200} and steps and steps == sorted(steps)
        assert not any("There is no report" in text for _, text, _ in pages)
        while "<span>20 of 20 steps</span>" not in ask(server, "/report")[1] and time.monotonic() < end:
            time.sleep(0.2)
        assert json.loads(ask(server)[1])["state"] == "run: all 20 steps are recorded"


def test_ctrl_c_ends_the_command_and_torch_was_never_loaded(small, interruptible):
    code = "import sys; from gspo.cli import main; r = main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(r)"
    words = [sys.executable, "-c", code, "watch", str(small)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(re.fullmatch(rf"watching {re.escape(str(small))} at http://127\.0\.0\.1:(\d+)/ until Ctrl-C\n", line)[1])
        held = socket.create_connection(("127.0.0.1", port))  # a browser that keeps a connection open
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/report")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()  # leaving `with` would wait for it
            held.close()
    assert (process.returncode, out, err) == (0, "stopped watching; the run goes on as it was\nFalse\n", "")


# ---- in a browser -----------------------------------------------------------------------------------------

DRIVER = """<script>
const told = (what) => fetch("/told?" + encodeURIComponent(JSON.stringify(what)));
const wait = async (ready) => { while (!ready()) await new Promise((done) => setTimeout(done, 50)); };
const inside = (id) => seen.contentDocument.getElementById(id);
const here = () => ({
  step: inside("step").value, order: inside("order").value, filter: inside("filter").value,
  open: [...seen.contentDocument.querySelectorAll("details")].map((d) => d.open),
  top: Math.round(inside("section-3").getBoundingClientRect().top), steps: inside("step").options.length,
  typing: seen.contentDocument.activeElement.id, shown: inside("count").textContent.split(" ")[0],
});
(async () => {
  await wait(() => seen);
  inside("order").value = "up";
  inside("filter").value = "so the sum";
  for (const id of ["order", "filter"]) inside(id).dispatchEvent(new seen.contentWindow.Event("input"));
  seen.contentDocument.querySelector("details").open = true;
  seen.focus(); inside("filter").focus({preventScroll: true});
  seen.contentWindow.scrollTo({top: inside("section-3").offsetTop - 40, behavior: "instant"});
  const before = here(), first = version;
  await told({before});
  await wait(() => version !== first && !coming);
  await told({after: here(), frames: document.querySelectorAll("iframe").length, light: by("light").className});
})();
</script></body>"""


@needs_chromium
def test_in_a_browser_the_page_changes_under_a_reader_who_notices_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "REST", 0.5)
    folder = write_run(tmp_path / "run", 4, samples_every=1)
    rng, records, told = np.random.default_rng(1), RunRecords(folder), {}
    with serving(folder) as server:
        plain = server.RequestHandlerClass

        class Driven(plain):
            def do_GET(self):
                path, _, query = self.path.partition("?")
                if path == "/told":
                    told.update(json.loads(unquote(query)))
                    if "after" not in told:  # the run goes on: a new figure above the reader, and a step more of samples
                        records.append(step_row(5, 500, rng) | evaluation(0.5, rng) | {"kl/reference": 0.1})
                        records.write_samples(5, samples_of(5, rng))
                        RunRecords(folder / "cold_start").append({"step": 121, "cold_start/loss": 0.2})
                    return self._send(200, "text/plain", "", {})
                if path == "/driven":
                    status, kind, text = self.server.answer("/")
                    free = {"Content-Security-Policy": "default-src * 'unsafe-inline'"}
                    return self._send(status, kind, text.replace("</body>", DRIVER), free)
                return super().do_GET()

        server.RequestHandlerClass = Driven
        address = f"http://127.0.0.1:{server.server_address[1]}/driven"
        with subprocess.Popen(benchmark.browser(str(tmp_path / "profile"), address), stderr=subprocess.DEVNULL) as browser:
            try:
                end = time.monotonic() + 60
                while "after" not in told and time.monotonic() < end:
                    time.sleep(0.1)
            finally:
                browser.terminate()
    before, after = told["before"], told["after"]
    assert after["steps"] == before["steps"] + 1 and after["step"] == "5"  # untouched, so the newest step is shown
    for key in ("order", "filter", "open", "typing"):
        assert after[key] == before[key]
    assert before["open"][0] and before["typing"] == "filter"
    assert abs(after["top"] - before["top"]) <= 2
    assert told["frames"] == 1 and told["light"] == "on"
