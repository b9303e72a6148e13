"""The one exception of this room."""


class DataError(Exception):
    """Prompts that cannot be used; the message says what, where and what to do."""
