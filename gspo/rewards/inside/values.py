"""Values between program and judge, as JSON: plain ones travel, everything else stays where it is and has a number.

What arrives is built from exact builtin types only, so no method of the sender's is ever called by the receiver.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from typing import Any

LARGEST_MESSAGE = 1 << 24
"""Bytes of one message. 16 MiB: beyond the results of every test seen, and small beside the memory of the judge."""
JSON_INTEGER = 1 << 53
"""Integers from here on travel in hexadecimal: Python refuses to read very long decimal ones."""

Leave = Callable[[Any], Any]
"""Gives a value that is not plain a place, and returns what stands for it."""


class ChannelError(Exception):
    """The other side is gone, or what it sent cannot be read."""


class Channel:
    """Messages over two file descriptors: four bytes of length, then JSON."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing

    def send(self, message: Any) -> None:
        """Write a message. Raises ChannelError for one that is too large, or if nobody reads it."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST_MESSAGE:
            raise ChannelError(f"a message of {len(data)} bytes; {LARGEST_MESSAGE} are allowed")
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(self.outgoing, data) :]
        except OSError as error:
            raise ChannelError("the other side does not listen") from error

    def receive(self) -> Any:
        """Read a message. Raises ChannelError for one that is none."""
        size = int.from_bytes(self._exactly(4), "big")
        if size > LARGEST_MESSAGE:
            raise ChannelError(f"a message of {size} bytes; {LARGEST_MESSAGE} are allowed")
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise ChannelError("a message that cannot be read") from error

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.incoming, min(size, 1 << 20))
            if not part:
                raise ChannelError("ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode(value: Any, leave: Leave) -> Any:
    """A value as JSON. Subclasses of plain types travel as those; what is not plain becomes `{"handle": leave(value)}`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < JSON_INTEGER else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, leave) for item in list.__iter__(value)]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            plain: Any = kind  # its own `__iter__`, whatever a subclass says
            return {kind.__name__: [encode(item, leave) for item in plain.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, leave), encode(v, leave)] for k, v in dict.items(value)]}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [encode(n, leave) for n in (value.start, value.stop, value.step)]}
    if isinstance(value, type) and value in _TYPES.values():
        return {"type": value.__name__}
    return {"handle": leave(value)}


def decode(message: Any, find: Callable[[Any], Any]) -> Any:
    """The value of a message; `find` gives what stands for a handle. Raises ChannelError for what `encode` never makes."""
    try:
        return _decode(message, find)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ChannelError("a value that cannot be read") from error


def _decode(message: Any, find: Callable[[Any], Any]) -> Any:
    if isinstance(message, list):
        return [_decode(item, find) for item in message]
    if not isinstance(message, dict):
        return message
    ((kind, content),) = message.items()
    if kind == "handle":
        return find(content)
    if kind == "dict":
        return {_decode(k, find): _decode(v, find) for k, v in content}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_decode(item, find) for item in content)
    return _SCALARS[kind](content)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*(_decode(n, _none) for n in parts)),
}


_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
"""Classes that travel by name, for tests such as `f([1, "a"], int)`."""
_SCALARS["type"] = _TYPES.__getitem__


def _none(_: Any) -> Any:
    raise ValueError("no handle can stand here")
