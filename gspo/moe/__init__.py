"""Mixtures of experts: which experts a model chose, the same choice again, and how choices move. See docs/moe.md."""

from .flips import RoutingCounts, routing_metrics
from .records import Record, RecordError, checked_rows, packed_ids
from .routers import Routing, Weighing, find_routing

__all__ = [
    "Record",
    "RecordError",
    "Routing",
    "RoutingCounts",
    "Weighing",
    "checked_rows",
    "find_routing",
    "packed_ids",
    "routing_metrics",
]
