"""The walls that a process puts up around itself, by Linux system calls through ctypes. Each raises if it cannot stand.

Not covered here: what bubblewrap does before this process starts. The system call filter is for x86-64 alone.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import struct
import sys
from typing import Any

from .filter import ARCHITECTURE, program_of

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWPID | 0x40000000 | 0x08000000 | 0x04000000  # and network, IPC, host name
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SYS_CAPSET, _SYS_PIVOT_ROOT, _SYS_LANDLOCK = 126, 155, 444
_OTHER_USERS = range(1 << 20, 1 << 21)
"""User ids that nobody has: each process gets one of its own, so that limits by user are limits by process."""
_NOBODY = 65534


def put_up(spec: dict[str, Any]) -> None:
    """Put up the walls that `spec["walls"]` names, in the order that each needs. Raises OSError where one cannot stand.

    `namespaces` forks: this function returns in the child, which is the first process of its own process namespace.
    """
    walls, files = spec["walls"], spec["files"]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if "namespaces" in walls:
        _own_namespaces(files)
    if "scratch" in walls:
        _own_scratch(files["scratch"], files)
    if "landlock" in walls:
        _only_read(files["readable"])
    _silence(spec)
    _limit(spec["limits"])
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _no_capabilities()
    if "seccomp" in walls:
        _filter(writing=bool(files["scratch"]))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _syscall(number: int, *args: Any, what: str) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *args), what)


def _silence(spec: dict[str, Any]) -> None:
    """Whoever talks by messages has no other voice; everybody works in the scratch folder."""
    if spec["role"] != "run":
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
    if spec["files"]["scratch"]:
        os.chdir(spec["files"]["scratch"])
        os.environ["HOME"] = os.environ["TMPDIR"] = spec["files"]["scratch"]


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _no_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    _syscall(_SYS_CAPSET, header, bytes(24), what="capset")


# ---- namespaces -------------------------------------------------------------------------------------------


def _own_namespaces(files: dict[str, Any]) -> None:
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_NAMESPACES | (0 if root else _CLONE_NEWUSER)), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        _wait_for(child)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _own_files(files)
    if root:
        _become_nobody()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # another user: the kernel forgets it


def _wait_for(child: int) -> None:
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _become_nobody() -> None:
    os.setgroups([])
    for user in (random.choice(_OTHER_USERS), _NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError:  # a container that knows fewer users
            continue
    raise OSError("no other user to become")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, data)]
    _checked(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {source} at {target}")


def _own_files(files: dict[str, Any]) -> None:
    """A root of its own: what `readable` names, read only, an empty scratch folder in memory, and two devices."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = files["mount_point"]
    _mount("none", root, "tmpfs", _MS_NOSUID, "size=1m,nr_inodes=1024,mode=755")
    for path in files["readable"]:
        _bind(path, root + path)
    for path in files["hidden"]:
        _mount("none", root + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path in ("/dev/null", "/dev/urandom"):
        os.makedirs(f"{root}/dev", exist_ok=True)
        os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(path, root + path, None, _MS_BIND)
    os.makedirs(root + files["scratch"])
    _own_scratch(root + files["scratch"], files)
    _mount("none", root, None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)
    os.chdir(root)
    _syscall(_SYS_PIVOT_ROOT, b".", b".", what="pivot_root")
    _checked(_libc.umount2(b".", 2), "umount of the old root")
    os.chdir("/")


def _own_scratch(target: str, files: dict[str, Any]) -> None:
    _mount("none", target, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"{files['scratch_options']},mode=777")


def _bind(path: str, target: str) -> None:
    if os.path.islink(path):  # /lib is usr/lib on most systems
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    os.makedirs(target, exist_ok=True)
    _mount(path, target, None, _MS_BIND | _MS_REC)
    _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


# ---- Landlock and seccomp ---------------------------------------------------------------------------------


def _only_read(readable: list[str]) -> None:
    """Landlock: no file may be opened but for reading, and only below these folders. Newer kernels: no TCP, no signals."""
    version = _syscall(_SYS_LANDLOCK, None, ctypes.c_size_t(0), ctypes.c_uint(1), what="landlock")
    every = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    handled = struct.pack("QQQ", every, 1 | 2, 1 | 2)[:size]  # files; bind and connect; abstract sockets and signals
    ruleset = _syscall(_SYS_LANDLOCK, handled, ctypes.c_size_t(size), ctypes.c_uint(0), what="landlock")
    for path in (*readable, "/dev/null", "/dev/urandom"):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = 4 | 8 if os.path.isdir(path) else 4 | 2 if path == "/dev/null" else 4  # read files, list folders, write
        rule = struct.pack("=Qi", allowed, folder)
        _syscall(_SYS_LANDLOCK + 1, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0), what=f"landlock, {path}")
        os.close(folder)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _syscall(_SYS_LANDLOCK + 2, ruleset, ctypes.c_uint(0), what="landlock")
    os.close(ruleset)


def _filter(*, writing: bool) -> None:
    if os.uname().machine != ARCHITECTURE or sys.maxsize < 1 << 32:
        raise OSError(f"the system call filter is for {ARCHITECTURE}, and this machine is {os.uname().machine}")
    code = program_of(writing=writing)
    instructions = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    _checked(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(filter_), 0, 0), "seccomp")
