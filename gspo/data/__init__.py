"""Prompts: rows of a source, made into tokens with their faults listed, and dealt out by a resumable cursor."""

from .cursor import Cursor, take
from .errors import DataError
from .overlap import overlap, separate
from .prepare import Encode, Fault, GoldCheck, prepare, require_batch, settle
from .sources import describe, load_rows

__all__ = [
    "Cursor",
    "DataError",
    "Encode",
    "Fault",
    "GoldCheck",
    "describe",
    "load_rows",
    "overlap",
    "prepare",
    "require_batch",
    "separate",
    "settle",
    "take",
]
