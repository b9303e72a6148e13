"""Two processes never work on one folder, and one that was killed does not keep it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from conftest import tiny_config

from gspo import locks
from gspo.cold_start import cold_start
from gspo.folder import leave_folder, open_folder
from gspo.recipe import RecipeError

HOLDER = """
import fcntl, os, subprocess, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[file], stdout=subprocess.DEVNULL)
print("locked", flush=True)
"""
"""Ends with the lock, of which its child keeps a copy, as a process does that is killed while it starts a program."""


def left_by_a_killed_process(path, seconds):
    subprocess.run([sys.executable, "-c", HOLDER, str(path), str(seconds)], check=True, stdout=subprocess.DEVNULL)
    return os.open(path, os.O_RDWR)


def test_what_a_killed_process_leaves_for_a_moment_is_waited_for(tmp_path):
    file = left_by_a_killed_process(tmp_path / "lock", 1)
    start = time.monotonic()
    assert locks.lock(file)
    assert time.monotonic() - start > 0.1
    os.close(file)


def test_a_lock_that_stays_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
    file = left_by_a_killed_process(tmp_path / "lock", 3)
    assert not locks.lock(file)
    os.close(file)


def test_a_run_in_the_folder_of_another_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
    config = tiny_config(tmp_path)
    folder = tmp_path / config.name
    folder.mkdir()
    os.close(left_by_a_killed_process(folder / ".lock", 3))
    with pytest.raises(RecipeError, match="another process is at work there: wait for it, or choose another --name"):
        open_folder(config, resume=False)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_folder_that_was_left_can_be_opened_again(tmp_path):
    config = tiny_config(tmp_path)
    for _ in range(2):
        leave_folder(open_folder(config, resume=False))


def test_a_cold_start_leaves_its_folder(tmp_path):
    config = tiny_config(tmp_path, cold_start={"steps": 1, "batch_size": 4, "warmup_updates": 0})
    cold_start(config)
    file = os.open(tmp_path / config.name / ".lock", os.O_RDWR)
    assert locks.lock(file)  # another file of this process is refused as another process is
    os.close(file)
