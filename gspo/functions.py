"""Functions of the user's own, named in a recipe as `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any


class FunctionError(Exception):
    """A function that cannot be found or called; the message says what, where and what to do."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names; the path is relative to the current folder.

    A file is run once a process, however many functions are taken from it. Raises FunctionError for a wrong form, a
    missing file or name, and a file that fails when run. Not covered: imports of files that lie beside it, unless
    their folder is on Python's path.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise FunctionError(f"{spec!r} does not name a function: write path/to/file.py:name")
    if not Path(path).is_file():
        raise FunctionError(f"{spec}: there is no file {path} in {Path.cwd()}")
    module = _module(Path(path).resolve(), spec)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        raise FunctionError(f"{spec}: {path} has no function {name}" + (f"; it has {near[0]}" if near else ""))
    return function


def check_arguments(function: Callable[..., Any], spec: str, *args: Any, parameters: Mapping[str, Any]) -> None:
    """Raises FunctionError if the function cannot be called with these arguments. Builtins without a signature pass."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*args, **parameters)
    except TypeError as error:
        raise FunctionError(f"{spec}{signature} does not take the recipe's parameters: {error}") from None


def _module(path: Path, spec: str) -> ModuleType:
    key = f"gspo_user_{path.stem}_{sha256(str(path).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    found = importlib.util.spec_from_file_location(key, path)
    assert found is not None and found.loader is not None, path  # a .py file always has a loader
    module = sys.modules[key] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise FunctionError(f"{spec}: {path} fails when run: {type(error).__name__}: {error}") from error
    return module
