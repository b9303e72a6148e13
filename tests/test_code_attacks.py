"""No program gets a reward without a solution, none outlives its time, and none leaves anything behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import ASSERTION_ATTACKS, SCRIPT_ATTACKS
from rewards_support import reward, sample, verdict

from gspo.rewards import RewardError, kinds
from gspo.rewards.sandbox import Limits, Sandbox, SandboxError

TESTS = "assert add(2, 3) == 5\nassert add(-4, 4) == 0\nassert abs(add(1.5, 2) - 3.5) < 1e-9\nassert all([add(7, 8) == 15])"
CHECK = "def check(candidate):\n    assert all(x == 5 for x in map(candidate, [2, 1], [3, 4]))\n"
PAIRS = {"inputs": ["31330 7\n", "1 2\n"], "outputs": ["31337\n", "3\n"]}
SETTINGS = {"type": "code", "cpu_s": 1, "wall_s": 3.0, "memory_mib": 256, "output_kib": 64}


def available():
    """The kinds that can stand here, and why the others cannot."""
    found, missing = [], {}
    for kind in kinds.KINDS:
        try:
            Sandbox(kind)
            found.append(kind)
        except SandboxError as error:
            missing[kind] = str(error)
    return found, missing


STANDING, MISSING = available() if sys.platform == "linux" else ([], {})
pytestmark = pytest.mark.skipif(not STANDING, reason=f"no sandbox can stand here: {MISSING}")


@pytest.fixture(scope="module")
def code():
    return reward(**SETTINGS)


@pytest.fixture(params=kinds.KINDS)
def each_kind(request):
    if request.param in MISSING:
        pytest.skip(MISSING[request.param])
    return reward(**SETTINGS, sandbox=request.param)


def judged(built, program, tests, **columns):
    return verdict(built, sample(f"Here:\n```python\n{program}\n```\n", tests, columns=columns))


def fails(built, program, tests, **columns):
    found = judged(built, program, tests, **columns)
    assert found.value == 0.0 and found.why, found
    return found.why


@pytest.mark.parametrize("name", ASSERTION_ATTACKS)
def test_no_attack_on_assertions_scores(code, name):
    fails(code, ASSERTION_ATTACKS[name], TESTS)


@pytest.mark.parametrize("name", SCRIPT_ATTACKS)
def test_no_attack_on_pairs_scores(code, name):
    fails(code, SCRIPT_ATTACKS[name], PAIRS)


CHECK_ATTACKS = (
    "ends_loops", "defines_check", "defines_its_own_all", "raises_generator_exit", "equals_everything",
    "exits_hard_in_the_call",
)  # fmt: skip


@pytest.mark.parametrize("name", CHECK_ATTACKS)
def test_no_attack_on_a_check_function_scores(code, name):
    fails(code, ASSERTION_ATTACKS[name], CHECK, entry_point="add")


def test_answers_on_which_the_tests_compute_for_ever_are_the_programs_fault():
    built = reward(**SETTINGS | {"wall_s": 60.0})
    assert "killed by their limits" in fails(built, "def f(): return 10 ** 14", "assert sum(range(f())) == 5")


KIND_ATTACKS = (
    "reads_other_memory", "searches_files_for_tests", "forks", "spawns", "opens_a_socket", "signals_others",
    "fills_the_disk", "makes_a_million_files", "eats_memory_slowly", "unshares", "mounts",
    "traces_its_parent", "becomes_another",
)  # fmt: skip
OUT_OF_REACH = (
    "signals_others", "signals_its_parent_by_a_pipe", "signals_its_parent_by_a_pipe_of_two", "chooses_the_signal_of_a_pipe",
    "watches_a_folder", "leases_a_file", "pins_its_parent", "schedules_its_parent", "lowers_its_parent",
    "limits_its_parent", "traces_its_parent", "leaves_the_session", "forks", "spawns", "opens_a_socket",
)  # fmt: skip
"""What the filter alone has to stop: its kind has no other wall."""


def test_every_kind_stops_what_reaches_out(each_kind):
    for name in (*KIND_ATTACKS, *OUT_OF_REACH):
        fails(each_kind, ASSERTION_ATTACKS[name], TESTS)
    assert judged(each_kind, "def add(a, b): return a + b", TESTS).value == 1.0
    assert judged(each_kind, "print(sum(map(int, input().split())))", PAIRS).value == 1.0


def test_the_filter_alone_keeps_other_processes_out_of_reach():
    built = reward(**SETTINGS, sandbox="filter")
    for name in OUT_OF_REACH:
        assert "PermissionError" in fails(built, ASSERTION_ATTACKS[name], TESTS) or "refused" in ASSERTION_ATTACKS[name]


CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def error(number, *args):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    return ctypes.get_errno()
"""
REFUSED_CALLS = {
    "kill": (62, 0, 0), "tkill": (200, -1, 0), "tgkill": (234, -1, -1, 0), "rt_sigqueueinfo": (129, -1, 0, 0),
    "rt_tgsigqueueinfo": (297, -1, -1, 0, 0), "pidfd_open": (434, -1, 0), "pidfd_send_signal": (424, -1, 0, 0, 0),
    "pidfd_getfd": (438, -1, 0, 0), "process_madvise": (440, -1, 0, 0, 0, 0), "process_mrelease": (448, -1, 0),
    "kcmp": (312, 0, 0, 0, 0, 0), "ptrace": (101, 16, -1, 0, 0), "process_vm_readv": (310, -1, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, -1, 0, 0, 0, 0, 0), "get_robust_list": (274, 0, 0, 0), "move_pages": (279, 0, 0, 0, 0, 0, 0),
    "migrate_pages": (256, 0, 0, 0, 0), "perf_event_open": (298, 0, 0, 0, 0, 0), "sched_setaffinity": (203, 0, 0, 0),
    "sched_setscheduler": (144, 0, 0, 0), "sched_setparam": (142, 0, 0), "sched_setattr": (314, 0, 0, 0),
    "setpriority": (141, 0, 0, 0), "ioprio_set": (251, 1, 0, 0), "prlimit of another": (302, 1, 4, 0, 0),
    "PR_SCHED_CORE": (157, 62, 0, 1, 0, 0), "semctl": (66, 99, 0, 0, 0), "semop": (65, 99, 0, 0), "msgctl": (71, 99, 0, 0),
    "msgsnd": (69, 99, 0, 0, 0), "msgrcv": (70, 99, 0, 0, 0, 0), "mq_unlink": (241, 0), "semtimedop": (220, 99, 0, 0, 0),
    "FIOSETOWN": (16, 0, 0x8901, 0), "SIOCSPGRP": (16, 0, 0x8902, 0), "TIOCSTI": (16, 0, 0x5412, 0),
    "F_SETOWN": (72, 0, 8, 0), "F_SETSIG": (72, 0, 10, 0), "F_SETOWN_EX": (72, 0, 15, 0), "F_NOTIFY": (72, 0, 1026, 0),
    "F_SETOWN with a high half": (72, 0, 8 | 1 << 32, 0), "a call of x32": (72 | 1 << 30, 0, 8, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*kinds.KINDS, "filter"])
def test_calls_that_reach_another_process_are_refused_whatever_their_arguments(kind):
    if kind in MISSING:
        pytest.skip(MISSING[kind])
    built = reward(**SETTINGS, sandbox=kind)
    tests = "".join(f"assert error{args} in (1, 38), {name!r}\n" for name, args in REFUSED_CALLS.items())
    assert judged(built, CALLS, tests).why == f"passes all {len(REFUSED_CALLS)} tests"


ORDINARY = """
import code, decimal, fcntl, mmap, numbers, os, queue, random, select, sqlite3, threading, time
from concurrent.futures import ThreadPoolExecutor
def works():
    r, w = os.pipe()
    os.set_inheritable(r, True)
    os.set_blocking(r, False)
    os.set_inheritable(r, False)
    fcntl.fcntl(w, fcntl.F_SETFL, fcntl.fcntl(w, fcntl.F_GETFL))
    os.close(fcntl.fcntl(r, fcntl.F_DUPFD_CLOEXEC, 10))
    os.write(os.dup(w), b"x")
    assert select.select([r], [], [], 1)[0] and os.read(r, 1) == b"x" and not os.isatty(r)
    with open(os.__file__) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as there:
        assert there[:1]
    base = sqlite3.connect(":memory:")
    base.execute("create table t (x)")
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(abs, range(-9, 1)))
"""


@pytest.mark.parametrize("kind", [*kinds.KINDS, "filter"])
def test_what_ordinary_programs_ask_of_the_system_is_allowed(kind):
    if kind in MISSING:
        pytest.skip(MISSING[kind])
    found = judged(
        reward(**SETTINGS, sandbox=kind), ORDINARY, "import code, fractions\nassert works() == fractions.Fraction(45)"
    )
    assert found.value == 1.0, found.why


def test_locks_work_in_a_scratch_folder_and_on_no_file_of_others(each_kind):
    base = (
        "import sqlite3\ndef f():\n    with sqlite3.connect('b') as base: base.execute('create table t (x)')\n    return 1"
    )
    lock = "import fcntl, os\ndef f():\n    fcntl.{}(os.open(os.__file__, 0), fcntl.LOCK_SH)\n    return 1"
    if each_kind.note.startswith("programs run behind files by Landlock"):
        for call in ("flock", "lockf"):
            assert "PermissionError" in fails(each_kind, lock.format(call), "assert f() == 1")
        return
    assert judged(each_kind, base, "assert f() == 1").value == 1.0


# ---- what a program can reach -----------------------------------------------------------------------------

SEES = """
import os
def reach(kind, path):
    try:
        if kind == "read":
            return open(path, "rb").read(1) is not None
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        return True
    except OSError:
        return False
"""


def reaches(built, kind, path):
    return judged(built, SEES, f"assert reach({kind!r}, {str(path)!r})").value == 1.0


def test_files_of_this_machine_can_neither_be_read_nor_written(each_kind, tmp_path):
    secret = tmp_path / "tests.py"
    secret.write_text("assert add(2, 3) == 5")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    for path in (secret, Path(__file__), "/etc/passwd", "/proc/self/environ", f"/proc/{os.getpid()}/environ"):
        assert not reaches(each_kind, "read", path)
    for path in (tmp_path / "new", secret, "/usr/lib/x", "/x", "/tmp/x", "/dev/shm/x", f"{sys.base_prefix}/lib/x"):
        assert not reaches(each_kind, "write", path)
    assert secret.read_text() == "assert add(2, 3) == 5"


def test_a_scratch_folder_can_be_written_and_is_new_each_time(each_kind):
    program = "import os\ndef f():\n    found = os.listdir('.')\n    open('kept', 'w').write('x')\n    return found\n"
    if each_kind.note.startswith("programs run behind files by Landlock"):
        assert "PermissionError" in fails(each_kind, program, "assert f() == []")
        return
    for _ in range(2):
        assert judged(each_kind, program, "assert f() == []\nassert f() == ['kept']").value == 1.0


def test_the_environment_holds_nothing_of_ours(each_kind, monkeypatch):
    monkeypatch.setenv("OF_OURS_KEY", "secret")
    program = "import os\ndef f(): return sorted(os.environ)"
    allowed = {"HOME", "LC_ALL", "LC_CTYPE", "PATH", "PWD", "PYTHONHASHSEED", "TMPDIR"}
    assert judged(each_kind, program, f"assert set(f()) <= {allowed}").value == 1.0


# ---- nothing is left --------------------------------------------------------------------------------------


def of_ours():
    """Processes that this one started, their command lines; what is mounted; what is open."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    started = [line for line in listed.splitlines() if "inside.entry" in line and f" {os.getpid()} " in f"{line} "]
    return started, Path("/proc/self/mountinfo").read_text(), sorted(os.listdir("/proc/self/fd"))


def test_nothing_is_left_running_mounted_or_open(each_kind):
    before = of_ours()
    temporary = set(os.listdir("/tmp"))
    for name in ("forks", "sleeps", "threads_without_end", "fills_the_disk", "leaves_the_session", "closes_everything"):
        fails(each_kind, ASSERTION_ATTACKS[name], TESTS)
    fails(each_kind, SCRIPT_ATTACKS["right_then_closes_and_sleeps"], PAIRS)
    assert of_ours() == before
    assert not [name for name in set(os.listdir("/tmp")) - temporary if "gspo" in name]


def test_programs_die_with_the_process_that_runs_them(tmp_path):
    """SIGKILL leaves nobody to clean up."""
    script = tmp_path / "run.py"
    script.write_text(
        "from gspo.rewards.sandbox import Sandbox\nimport sys\nsandbox = Sandbox()\nprint('here', flush=True)\n"
        "sandbox.run('import time\\nprint(1, flush=True)\\ntime.sleep(1000) # ' + sys.argv[1], '')\n"
    )
    mark = f"mark{os.getpid()}"
    with subprocess.Popen([sys.executable, script, mark], stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None and popen.stdout.readline() == b"here\n"
        children = []
        while not children:
            children = subprocess.run(["pgrep", "-P", str(popen.pid)], capture_output=True, text=True).stdout.split()
        popen.kill()
    for _ in range(100):
        gone = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(children)], capture_output=True, text=True).stdout
        if not [state for state in gone.split() if not state.startswith("Z")]:
            return
        subprocess.run(["sleep", "0.05"], check=True)
    pytest.fail(f"still running: {gone}")


# ---- faults of ours are no zeros --------------------------------------------------------------------------


def test_a_sandbox_that_cannot_start_raises_or_abstains(code, monkeypatch):
    abstaining = reward(**SETTINGS, on_error="abstain")
    monkeypatch.setattr(kinds, "python", lambda kind: ["/bin/false"])
    with pytest.raises(RewardError, match="could not be started"):
        judged(code, "def add(a, b): return a + b", TESTS)
    found = judged(abstaining, "def add(a, b): return a + b", TESTS)
    assert found.value is None and "could not be started" in found.why


def test_without_the_minimum_nothing_runs_and_the_error_says_what_it_is(monkeypatch):
    monkeypatch.setattr(kinds, "python", lambda kind: ["/bin/false"])
    with pytest.raises(RewardError, match=r"bubblewrap: .* landlock: .*The minimum is a wall around files"):
        reward(**SETTINGS)


@pytest.mark.parametrize("kind", ["filter", "limits"])
def test_weaker_walls_stand_only_when_they_are_named(kind):
    built = reward(**SETTINGS, sandbox=kind)
    assert kinds.DESCRIPTIONS[kind] in built.note
    assert judged(built, "def add(a, b): return a + b", TESTS).value == 1.0
    for name in (
        "exits_hard_in_the_call",
        "prints_a_verdict",
        "equals_everything",
        "patches_the_judge_here",
        "eats_memory",
    ):
        fails(built, ASSERTION_ATTACKS[name], TESTS)


def test_limits_are_those_of_the_settings():
    assert Limits(3, 4.0, 512).kernel()["AS"] == 512 << 20 and Limits(3).kernel()["CPU"] == 3
