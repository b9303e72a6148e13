"""The whole suite runs in several processes side by side (pytest-xdist); tests named on a command line run in one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TOGETHER = (
    "test_distributed.py",
    "test_vllm",
    "test_draw_kernel.py",
    "test_logprob_kernels.py",
    "test_workers.py",  # one of them kills what those before it left idle
    "test_against_trl.py",
    "test_report_",
    "test_resuming.py::test_a_signal",
    "test_moe_training.py::test_two_ranks",
)
"""What is costly to make and shared by tests: one process runs all tests whose ids have such a piece in common."""

ALONE = {
    "test_nothing_stays_behind_after_success_and_failure",  # it lists the machine's temporary files and shared memory
    "test_a_start_that_fails_says_why_and_leaves_nothing",  # the same
    "test_nothing_is_left_running_mounted_or_open",  # it lists the machine's temporary files
    "test_help_answers_within_half_a_second",
    "test_a_report_of_500_steps_is_small_and_quickly_written",
    "test_a_report_of_500_steps_opens_in_under_2_seconds",
    "test_where_the_table_says_so_math_verify_alone_is_wrong",  # after five seconds it would give up, which is wrong too
    "test_the_update_is_linear_and_whole_pack_attention_is_found",  # it holds durations against each other
}
"""While one of these runs, no other test does."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For the whole suite a process a core, up to four; 0 is this process alone."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start: every core has a test already
    return min(os.cpu_count() or 1, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Test by test, those first that stay together. The marks of --dist loadgroup do nothing in pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((piece for piece in TOGETHER if piece in nodeid), nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turn(Path(item.config.option.basetemp).parent, alone=getattr(item, "originalname", "") in ALONE):
        return (yield)


@contextmanager
def turn(shared: Path, *, alone: bool) -> Iterator[None]:
    """A test's time. Who waits to be alone stands at a door that all come through, so that it is not passed for ever."""
    with (shared / "door").open("w") as door, (shared / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing is not enough while a child of the test has the file open too
