"""Several processes as one run, started by torchrun: who is who, what they tell each other, and how all end when one does.

Without torchrun's environment, or with a world of one, there is no process group and nothing here communicates. What
ranks tell each other is Python's own objects in memory, among processes of one run; nothing of it is read from a file.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

TIMEOUT_S = 1800
"""Longest wait for another rank that is silent but still connected: a host that lost its power, say. One that ended is
noticed at once, by its closed connections. It is also how much longer than the others a rank may sample."""

WATCH_S, GRACE_S = 0.5, 3.0
"""How often a rank looks whether another failed, and how long it then has to end by itself."""

LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "failed to recv", "Connection was")
"""What torch says in the RuntimeError of a collective whose other side is gone."""

PLAIN = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
"""Of tensors that numpy has too."""

T = TypeVar("T")


class RankError(Exception):
    """Another rank failed or is gone, so this one cannot go on; the message says which and why."""


class SharedError(RankError):
    """Another rank failed in work of its own, and all ranks know it at the same place: they can still save together."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run. By default one, which talks to nobody. Every method with a result is a collective: all ranks
    call it, in the same order."""

    rank: int = 0
    """Number of this process, from 0."""
    size: int = 1
    """Number of processes."""
    group: Any = None
    """A gloo group of all ranks, or None where there is one."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes records and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of what all ranks have: every size-th item. No collective."""
        return items[self.rank :: self.size]

    def merge(self, mine: Sequence[T]) -> list[T]:
        """The whole, in its order, of what `share` dealt out."""
        parts = self.gather(list(mine))
        return [parts[i % self.size][i // self.size] for i in range(sum(len(part) for part in parts))]

    def gather(self, mine: T) -> list[T]:
        """What each rank has, by rank."""
        if self.size == 1:
            return [mine]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, packed(mine), group=self.group)
        return [pickle.loads(told) for told in out]

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        return [max(column) for column in zip(*self.gather(list(numbers)), strict=True)]

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all ranks, in the ranks' order."""
        return [sum(column) for column in zip(*self.gather(list(numbers)), strict=True)]

    def agree(self, error: Exception | None, kind: type[RankError] = RankError) -> None:
        """End alike on all ranks: raises error where there is one, and `kind`, naming it, on the other ranks."""
        said = self.gather(None if error is None else sentence(error))
        if error is not None:
            raise error
        for rank, what in enumerate(said):
            if what is not None:
                raise kind(f"rank {self.rank} stops, because rank {rank} failed: {what}")

    def first(self, work: Callable[[], T]) -> T:
        """What the first rank's work returns, on all ranks; the others do none of it, and hear of its failure."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except Exception as failed:
                error = failed
        self.agree(error)
        return self.gather(result)[0]  # type: ignore[return-value]

    def require_same(self, what: str, value: Callable[[], Any]) -> None:
        """Raises RankError unless all ranks have a value of the same repr. One rank does not ask for it."""
        if self.size == 1:
            return
        values = self.gather(hashlib.blake2b(repr(value()).encode()).digest())
        if different := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise RankError(
                f"{what}: rank {different[0]} has something else than rank 0: all ranks must read the same files and draw "
                "the same rows"
            )


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays; by torch's own way, a zip file each, a batch's ratios take five times as long."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.requires_grad or obj.device.type != "cpu" or obj.dtype not in PLAIN:
            return NotImplemented
        return torch.from_numpy, (obj.numpy(),)


def packed(what: Any) -> bytes:
    """What `pickle.loads` makes the same of."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(what)
    return file.getvalue()


ALONE = World()
"""The world of a process without others."""


@contextmanager
def open_world(device: str) -> Iterator[World]:
    """The ranks of this run, out of torchrun's environment; one rank, and no process group, where there is none.

    device: the recipe's `model.device`. On GPUs each rank takes that of its local number. However the body ends, no rank
    is left waiting: the others are told this rank's sentence, and end too. Raises RankError where another rank fails, is
    gone, or cannot be reached.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    watch, failed = _Watch(int(os.environ["RANK"])), False
    try:
        world = _join(watch.rank, size, on_gpu=on_gpu)
        watch.start()
        yield world
        dist.barrier(world.group)
    except BaseException as error:
        failed = True
        watch.leave(error)
        if reason := _lost_peer(error):
            _finish_in_peace()
            raise RankError(watch.why(reason)) from error
        raise
    finally:
        watch.stop()
        if dist.is_initialized() and not (failed and on_gpu):  # NCCL may wait for those that are gone
            dist.destroy_process_group()


def sentence(error: BaseException) -> str:
    """What an error says, or what it is."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once"
    return str(error).strip() or type(error).__name__


def _join(rank: int, size: int, *, on_gpu: bool) -> World:
    """Meet the other ranks."""
    timeout = timedelta(seconds=TIMEOUT_S)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu and local >= torch.cuda.device_count():
        raise RankError(
            f"rank {rank} is number {local} on its host, which has {torch.cuda.device_count()} GPUs: lower "
            "--nproc_per_node to that"
        )
    if on_gpu:
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        return World(rank, size, dist.new_group(backend="gloo", timeout=timeout))
    dist.init_process_group("gloo", timeout=timeout)
    return World(rank, size, dist.group.WORLD)


def _finish_in_peace() -> None:
    """Ignore SIGTERM from now on: the launch agent hears of a lost rank too, and would end this one before it has said why.
    It ends by itself in seconds, and the agent kills it otherwise."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _lost_peer(error: BaseException | None) -> str | None:
    """The first sentence of an error that says that another rank is gone, wherever in the chain of causes it is."""
    while error is not None:
        text = sentence(error)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in LOST)):
            first = text.splitlines()[0].partition(". ")[0]
            return re.sub(r"^\[[^]]*\] ", "", first)  # without the place in torch's own source
        error = error.__cause__
    return None


class _Watch(threading.Thread):
    """Tells the others why this rank fails, and ends this rank when another did, even inside a collective that waits."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="gspo-watch", daemon=True)
        self.rank = rank
        self._over = threading.Event()
        self._store: Any = None

    def start(self) -> None:
        """Watch from now on; a connection of its own, as torch's may be busy waiting."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        self._store = dist.PrefixStore(f"gspo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        super().start()

    def run(self) -> None:
        """Look every WATCH_S."""
        while not self._over.wait(WATCH_S):
            why = self._failure()
            if why is not None and not self._over.wait(GRACE_S):
                sys.stderr.write(f"gspo: {self._because(why)}\n")
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(1)

    def leave(self, error: BaseException) -> None:
        """Tell the others, unless all end alike or another was first. No more is watched."""
        self.stop()
        if (
            self._store is not None
            and isinstance(error, Exception | KeyboardInterrupt)
            and not isinstance(error, RankError)
        ):
            if _lost_peer(error):
                return
            try:
                self._store.compare_set("failed", "", f"rank {self.rank} failed: {sentence(error)}")
            except RuntimeError:  # the host of the store is gone, and the others will notice that
                return

    def stop(self) -> None:
        """Watch no more."""
        self._over.set()

    def why(self, reason: str) -> str:
        """In a sentence why this rank cannot go on, when a collective said `reason`."""
        until = time.monotonic() + 2 * WATCH_S
        known = self._failure()
        while known is None and time.monotonic() < until:
            time.sleep(0.1)
            known = self._failure()
        return self._because(known or f"another rank ended without a word, or its host is gone ({reason})")

    def _because(self, why: str) -> str:
        return f"rank {self.rank} stops, because {why}; go on with --resume"

    def _failure(self) -> str | None:
        """What another rank said, or that the store is gone with its host; None while all is well."""
        if self._store is None:
            return None
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else None
        except RuntimeError:
            return "the launch agent where all ranks met is gone, or its host"
