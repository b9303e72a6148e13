"""Workers: limits are hard, faults are told apart, and nothing is left running."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from gspo.rewards import RewardError
from gspo.rewards.workers import Limits, Pool, WorkerError

ACT = "worker_tasks:act"
LIMITS = Limits(timeout_s=1.0, memory_mib=300, num_workers=2)


def ask(do, value=None):
    return {"do": do, "with": value}


def echoes(*values):
    return [ask("echo", value) for value in values]


@pytest.fixture(scope="module")
def shared():
    pool = Pool(ACT, LIMITS)
    pool.run(echoes(*range(10)))
    yield pool
    pool.close()


def children():
    return psutil.Process().children(recursive=True)


def gone(pids, within_s=5.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_answers_come_in_the_order_of_the_questions(shared):
    values = [*range(300), "é🙂\ud800\x00", "x" * 100_000, *["y" * 30_000] * 5, None]
    assert [o.result["echo"] for o in shared.run(echoes(*values))] == values
    assert shared.run([]) == []


@pytest.mark.parametrize("do", [ask("spin"), ask("sleep", 60)])
def test_a_question_that_hangs_costs_its_own_limit_and_nothing_else(shared, do):
    start = time.monotonic()
    outcomes = shared.run([*echoes(*range(40)), do, *echoes(*range(40, 200)), ask("echo", "x" * 100_000)])
    assert time.monotonic() - start < 6
    assert outcomes[40].limit == "took longer than 1 s"
    assert [o.result["echo"] for i, o in enumerate(outcomes[:-1]) if i != 40] == list(range(200))
    assert len(shared._all) <= 2


def test_memory_is_limited_and_the_worker_is_replaced(shared):
    outcomes = shared.run([*echoes(1, 2), ask("eat", 1000), *echoes(3), ask("eat", 10)])
    assert [o.limit for o in outcomes] == ["", "", "needed more than 300 MiB of memory", "", ""]
    assert outcomes[4].result == {"size": 10 << 20}


def test_memory_that_earlier_questions_kept_is_not_blamed_on_the_next():
    pool = Pool(ACT, Limits(5.0, 300, 1))
    assert pool.run([ask("keep", 150)])[0].limit == ""
    assert pool.run([ask("eat", 150)])[0].result == {"size": 150 << 20}
    pool.close()


def test_a_crash_and_deep_recursion_are_the_questions(shared):
    outcomes = shared.run([ask("kill", "SIGSEGV"), ask("recurse"), ask("kill", "SIGABRT"), *echoes(*range(50))])
    assert [o.limit for o in outcomes[:3]] == [
        "crashed its worker (SIGSEGV)",
        "is nested too deeply",
        "crashed its worker (SIGABRT)",
    ]
    assert [o.result["echo"] for o in outcomes[3:]] == list(range(50))


def test_an_exception_is_told_and_is_no_limit(shared):
    (outcome,) = shared.run([ask("raise", "what is wrong")])
    assert outcome.error == "ValueError: what is wrong"
    assert not outcome.limit


def test_what_a_library_prints_does_not_disturb(shared):
    assert shared.run([ask("print", '{"result": 1}'), *echoes(5)])[1].result == {"echo": 5}


@pytest.mark.parametrize("do", [ask("leave", 3), ask("kill", "SIGKILL")])
def test_a_worker_that_dies_of_neither_limit_nor_crash_is_an_error_and_no_verdict(shared, do):
    with pytest.raises(WorkerError, match="died twice"):
        shared.run([*echoes(1), do])
    assert shared.run(echoes(2))[0].result == {"echo": 2}


@pytest.mark.parametrize(
    ("function", "words"),
    [("nowhere_to_be_found:f", "No module named 'nowhere_to_be_found'"), ("worker_tasks:none", "no attribute 'none'")],
)
def test_a_worker_that_cannot_start_says_why(function, words):
    pool = Pool(function, LIMITS)
    with pytest.raises(RewardError, match="cannot start") as caught:
        pool.run([{}])
    assert words in str(caught.value)
    assert pool._all == set()


def test_an_idle_worker_that_somebody_killed_is_replaced(shared):
    for child in children():
        child.kill()
    assert [o.result["echo"] for o in shared.run(echoes(*range(30)))] == list(range(30))


def test_a_worker_knows_neither_torch_nor_secrets(shared, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    pool = Pool(ACT, Limits(5.0, 300, 1))
    look = pool.run([ask("look")])[0].result
    pool.close()
    assert not {"torch", "numpy", "pydantic", "gspo.config", "transformers"} & set(look["modules"])
    assert "SOME_TOKEN" not in look["environment"]


def test_threads_share_the_workers(shared):
    with ThreadPoolExecutor(6) as threads:
        runs = threads.map(
            lambda n: shared.run([*echoes(*range(n, n + 50)), ask("sleep", 60 if n == 200 else 0)]), range(0, 600, 100)
        )
        for n, outcomes in zip(range(0, 600, 100), runs, strict=True):
            assert [o.result["echo"] for o in outcomes[:50]] == list(range(n, n + 50))
            assert bool(outcomes[50].limit) == (n == 200)
    assert len(shared._all) <= 2


def test_workers_outlive_the_thread_that_started_them():
    pool, found = Pool(ACT, Limits(5.0, 300, 1)), []
    thread = threading.Thread(target=lambda: found.extend(pool.run([ask("look")])))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert pool.run([ask("look")])[0].result["pid"] == found[0].result["pid"]
    pool.close()


def test_ctrl_c_ends_the_workers_that_were_at_work_and_the_pool_goes_on(interruptible):
    pool = Pool(ACT, Limits(60.0, 300, 2))
    pids = {o.result["pid"] for o in pool.run([ask("look")] * 8)}
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([ask("spin")] * 8)
    assert gone(pids)
    assert pool.run(echoes(1))[0].result == {"echo": 1}
    pool.close()


def test_a_pool_that_nobody_holds_is_closed_and_leaks_no_descriptor():
    before = psutil.Process().num_fds(), len(children())
    for _ in range(3):
        pool = Pool(ACT, LIMITS)
        pool.run([*echoes(*range(8)), ask("spin")])
        del pool
    assert (psutil.Process().num_fds(), len(children())) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_has_workers_of_its_own(shared):
    mine = {o.result["pid"] for o in shared.run([ask("look")] * 8)}
    child = os.fork()
    if child == 0:
        theirs = {o.result["pid"] for o in shared.run([ask("look")] * 8)}
        shared.close()
        os._exit(0 if theirs and not theirs & mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {o.result["pid"] for o in shared.run([ask("look")] * 8)} & mine


PARENT = """
import os, sys, threading
from gspo.rewards.workers import Limits, Pool
pool = Pool("worker_tasks:act", Limits(2.0, 300, 2))
def work():
    print(*{o.result["pid"] for o in pool.run([{"do": "look"}] * 8)}, flush=True)
    if sys.argv[2] == "busy":
        pool.run([{"do": "spin"}] * 8)
    if sys.argv[2] == "wait":
        sys.stdin.read()
if sys.argv[1] == "main":
    work()
else:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
if sys.argv[2] == "raise":
    raise ValueError
"""


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("state", ["busy", "wait", "end", "raise"])
def test_no_worker_outlives_its_parent_however_it_ends(thread, state):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, thread, state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    with parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids
        if state in ("busy", "wait"):
            time.sleep(0.3)
            parent.kill()
        parent.wait(20)
    assert gone(pids, within_s=6)
