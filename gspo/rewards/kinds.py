"""The kinds of sandbox: which walls each has, how it is started, and what a program sees of the file system."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["bubblewrap", "namespaces", "landlock", "filter", "limits"]

KINDS: tuple[Kind, ...] = ("bubblewrap", "namespaces", "landlock")
"""What is tried, best kept first: each hides files, and each comes with the system call filter and the limits."""

WALLS: dict[Kind, tuple[str, ...]] = {
    "bubblewrap": ("scratch", "seccomp"),
    "namespaces": ("namespaces", "seccomp"),
    "landlock": ("landlock", "seccomp"),
    "filter": ("seccomp",),
    "limits": (),
}
"""What a process puts up itself, in each kind."""

DESCRIPTIONS: dict[Kind, str] = {
    "bubblewrap": "namespaces by bubblewrap (processes, network, files, IPC), system call filter, limits",
    "namespaces": "namespaces (processes, network, files, IPC), system call filter, limits",
    "landlock": "files by Landlock (none can be written, no scratch folder), system call filter (no network), limits",
    "filter": "system call filter (no network, no file written), limits; files of this user can be read",
    "limits": "limits and a process group only: files, network and other processes are within reach",
}

MINIMUM = (
    "The minimum is a wall around files (namespaces by bubblewrap or by this process, or Landlock) and the system call "
    "filter: without them a program can read the tests, overwrite this run and reach the network"
)

_INSIDE = Path(__file__).parent / "inside"
_SCRATCH = "/scratch"
_START = "import sys; sys.path.append(sys.argv[1]); from inside.entry import main; sys.path.pop(); main(int(sys.argv[2]))"
"""The path is gone before a program runs: beside `inside` stand `numbers` and `code`, as in Python."""


def files(kind: Kind, scratch_options: str) -> dict[str, Any]:
    """What a program sees of the file system. Python's installed packages are no part of it."""
    readable = _outermost([sys.base_prefix, "/lib", "/lib64", "/usr/lib", "/usr/lib64"])
    packages = {sysconfig.get_path(name, vars={"base": sys.base_prefix}) for name in ("purelib", "platlib")}
    places = [place for place in ("/mnt", "/media", "/srv", "/opt", "/tmp") if os.path.isdir(place)]
    free = [place for place in places if not any(path.startswith(place) for path in readable)]
    return {
        "readable": readable,
        "hidden": sorted(path for path in packages if os.path.isdir(path) and path.startswith(sys.base_prefix)),
        "mount_point": free[0] if free else "/mnt",
        "scratch": _SCRATCH if kind in ("bubblewrap", "namespaces") else None,
        "scratch_options": scratch_options,
    }


def _outermost(paths: Sequence[str]) -> list[str]:
    there = [path for path in dict.fromkeys(paths) if os.path.exists(path)]
    return [p for p in there if not any(p != other and Path(p).is_relative_to(other) for other in there)]


def python(kind: Kind) -> list[str]:
    """The command that starts a sandboxed process, but for its last word, where to say that it stands."""
    inside = "/sandbox" if kind == "bubblewrap" else str(_INSIDE.parent)
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", _START, inside]


def before(kind: Kind, files: dict[str, Any]) -> list[str]:
    """The command that goes before Python's: bubblewrap's, or nothing."""
    if kind != "bubblewrap":
        return []
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"]
    command += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]  # for the scratch folder; given back after that
    for path in files["readable"]:
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for path in files["hidden"]:
        command += ["--tmpfs", path, "--remount-ro", path]
    for device in ("/dev/null", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    command += ["--ro-bind", str(_INSIDE), "/sandbox/inside", "--dir", _SCRATCH, "--remount-ro", "/"]
    return [*command, "--"]
