"""The system calls that are refused, as a program for the kernel's own filter (seccomp, classic BPF). x86-64.

Refused with EPERM: other processes (fork, exec, signals to anybody, also as the owner of a file, tracing, priorities,
processors and memory of others), sockets of every kind, namespaces and mounts, memory that no limit counts and objects
that belong to a user (memfd, System V IPC, message queues), kernel interfaces with a history of holes (bpf, io_uring,
userfaultfd, perf, keyrings), leaving the session or the death signal. `fcntl` and `ioctl` have a list of what is allowed.
Where there is no scratch folder: opening a file for writing, locks, and everything that changes a folder. Threads are
allowed.
"""

from __future__ import annotations

import os
import struct

ARCHITECTURE = "x86_64"
_AUDIT_X86_64 = 0xC000003E
_LAST_KNOWN = 450
"""Calls from here on do not exist for the program: newer than this list, or of the x32 kind."""

_CLONE, _CLONE3, _OPEN, _OPENAT, _OPENAT2, _PRCTL, _IOCTL, _FCNTL, _PRLIMIT = 56, 435, 2, 257, 437, 157, 16, 72, 302
_CLONE_THREAD = 0x00010000
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_PRCTL_REFUSED = {"PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4, "PR_SET_SECCOMP": 22, "PR_SCHED_CORE": 62}
_IOCTL_ALLOWED = {
    "TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450, "FIOCLEX": 0x5451,
}  # fmt: skip
"""What Python asks of any file. All others are refused: FIOSETOWN, SIOCSPGRP and the terminal's send signals to others."""
_FCNTL_ALLOWED = {
    "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETOWN": 9, "F_DUPFD_CLOEXEC": 1030,
    "F_GETPIPE_SZ": 1032, "F_GET_SEALS": 1034,
}  # fmt: skip
"""All others are refused: F_SETOWN, F_SETOWN_EX and F_SETSIG send any signal to anybody; F_NOTIFY and leases send some."""
_FCNTL_LOCKS = {
    "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38,
}  # fmt: skip
"""Allowed in a scratch folder of its own; others wait for a lock on a file that all can read."""

_REFUSED = {
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200, "tgkill": 234,
    "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "process_madvise": 440,
    "process_mrelease": 448, "migrate_pages": 256, "move_pages": 279, "get_robust_list": 274, "sched_setaffinity": 203,
    "setsid": 112, "setpgid": 109, "personality": 135,
    "setpriority": 141, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251,
    "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288,
    "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31,
    "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220,
    "mq_open": 240, "mq_unlink": 241, "sync": 162, "syncfs": 306,
    "bpf": 321, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "userfaultfd": 323, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "mlock": 149,
    "mlock2": 325, "mlockall": 151, "io_setup": 206, "vmsplice": 278,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "settimeofday": 164, "adjtimex": 159,
    "clock_settime": 227, "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "quotactl": 179, "quotactl_fd": 443, "fanotify_init": 300, "inotify_init": 253, "inotify_init1": 294,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "mknod": 133, "mknodat": 259, "lookup_dcookie": 212,
    "modify_ldt": 154, "syslog": 103, "seccomp": 317, "landlock_create_ruleset": 444,
}  # fmt: skip

_WRITING = {
    "creat": 85, "truncate": 76, "ftruncate": 77, "fallocate": 285, "rename": 82, "renameat": 264, "renameat2": 316,
    "mkdir": 83, "mkdirat": 258, "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263, "symlink": 88,
    "symlinkat": 266, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "flock": 73,
}  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050000 | 38, 0x80000000
_NUMBER, _ARCH = 0, 4


def program_of(*, writing: bool) -> bytes:
    """The filter, 8 bytes an instruction. writing: whether files may be opened for writing (there is a scratch folder)."""
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    lines += _when((_AT_LEAST, _LAST_KNOWN), _ENOSYS)
    for number in (_CLONE3, _OPENAT2):  # structures in memory, which no filter can read; libraries fall back
        lines += _when((_EQUAL, number), _ENOSYS)
    for number in (*_REFUSED.values(), *(() if writing else _WRITING.values())):
        lines += _when((_EQUAL, number), _EPERM)
    lines += _argument(_CLONE, 0, [(_ANY_BIT, _CLONE_THREAD, _ALLOW)], _EPERM)
    lines += _argument(_PRCTL, 0, [(_EQUAL, option, _EPERM) for option in _PRCTL_REFUSED.values()], _ALLOW)
    lines += _argument(_PRLIMIT, 0, [(_EQUAL, 0, _ALLOW)], _EPERM)  # its own limits, not another's
    lines += _argument(_IOCTL, 1, [(_EQUAL, request, _ALLOW) for request in _IOCTL_ALLOWED.values()], _EPERM)
    commands = (*_FCNTL_ALLOWED.values(), *(_FCNTL_LOCKS.values() if writing else ()))
    lines += _argument(_FCNTL, 1, [(_EQUAL, command, _ALLOW) for command in commands], _EPERM)
    if not writing:
        for number, argument in ((_OPEN, 1), (_OPENAT, 2)):
            lines += _argument(number, argument, [(_ANY_BIT, _FOR_WRITING, _EPERM)], _ALLOW)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


Line = tuple[int, int, int, int]


def _when(test: tuple[int, int], answer: int) -> list[Line]:
    code, value = test
    return [(code, 0, 1, value), (_RETURN, 0, 0, answer)]


def _argument(number: int, argument: int, tests: list[tuple[int, int, int]], otherwise: int) -> list[Line]:
    """For one system call: the first test that holds for the low half of an argument decides."""
    inner: list[Line] = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for code, value, answer in tests:
        inner += _when((code, value), answer)
    inner.append((_RETURN, 0, 0, otherwise))
    return [(_EQUAL, 0, len(inner), number), *inner]
