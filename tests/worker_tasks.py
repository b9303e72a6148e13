"""What the tests let workers do. Imported by workers alone, so without the package."""

import os
import signal
import sys
import time


def act(question):
    """Does what the question says, and answers with its argument."""
    return globals()["do_" + question["do"]](question.get("with"))


def do_echo(value):
    return {"echo": value}


def do_sleep(seconds):
    time.sleep(seconds)
    return {}


def do_spin(_):
    return {"never": 9 ** (9**9)}  # one operation in C: no signal handler of Python's could run


def do_eat(mib):
    return {"size": len(bytearray(mib << 20))}


def do_keep(mib):
    sys.modules[__name__].kept = bytearray(mib << 20)
    return {}


def do_kill(name):
    os.kill(os.getpid(), getattr(signal, name))


def do_leave(code):
    os._exit(code)


def do_recurse(_):
    return do_recurse(_)


def do_raise(words):
    raise ValueError(words)


def do_print(words):
    print(words)
    os.system("echo from outside")
    return {"printed": words}


def do_look(_):
    return {"modules": sorted(sys.modules), "environment": dict(os.environ), "pid": os.getpid()}
