"""What goes on after a response: environments of one turn and of several, and tools."""

from .protocol import SINGLE_TURN, Environment, Episode, EpisodeError
from .registry import open_environment, reply_roles, tool_schemas

__all__ = ["SINGLE_TURN", "Environment", "Episode", "EpisodeError", "open_environment", "reply_roles", "tool_schemas"]
