"""Tools that tests name in recipes: every way to fail."""

import os
import time


def misbehave(how: str, times: int = 1) -> str:
    """Do as told.

    Args:
        how: What to do.
        times: How often.
    """
    if how == "hang":
        time.sleep(60)
    if how == "child":  # hangs in a process of its own, which must be killed too
        os.system(f"sleep 61.{os.getpid()}")
    if how == "exit":
        os._exit(3)
    if how == "leave":
        raise SystemExit(0)
    if how == "raise":
        raise KeyError("no such thing")
    if how == "print":
        print('[true, "PASSED"]', flush=True)
    if how == "half":
        return "a\ud800b"
    return how * times


def untyped(how):
    """Has no annotation.

    Args:
        how: Anything.
    """


async def later(text: str) -> str:
    """Gives a coroutine.

    Args:
        text: Anything.
    """
    return text


def piecewise(text: str):
    """Gives a generator.

    Args:
        text: Anything.
    """
    yield text


def many(*texts: str) -> str:
    """Takes arguments without names.

    Args:
        texts: Anything.
    """
    return "".join(texts)


def placed(text: str, /) -> str:
    """Takes its argument by place alone.

    Args:
        text: Anything.
    """
    return text


def misnamed(text: "Nowhere") -> str:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    """Has an annotation that does not exist.

    Args:
        text: Anything.
    """
    return text


class Kind:
    """Is no function."""

    def __init__(self, text: str) -> None:
        self.text = text
