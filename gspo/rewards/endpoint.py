"""Asking an OpenAI-compatible endpoint, and asking again where that can help."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from .verifier import RewardError, quoted, reason

LARGEST_REPLY = 2**20
"""Bytes read of a reply: a verdict needs a thousand, and a broken server must not fill the memory."""

_DICE = random.SystemRandom()
"""For waits: they must not move random numbers that a run is made of."""


class Unanswered(Exception):
    """No usable reply, after all attempts; the message says why."""


class Refused(Exception):
    """The server refuses this request (400 and the like), and would again; the message is the server's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one attempt brought."""

    status: int
    """HTTP status."""
    text: str
    """The body."""
    retry_after: str | None
    """The header Retry-After."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, and how patiently."""

    url: str
    """The address that requests are posted to."""
    key: str | None = field(repr=False)
    """Sent as the bearer, and shown nowhere."""
    timeout_s: float
    """Seconds of one attempt, from connecting to the last byte."""
    attempts: int
    """Attempts in all."""
    first_wait_s: float
    """Seconds before the second attempt, doubled before each further one."""
    longest_wait_s: float
    """Seconds of the longest wait."""

    def client(self) -> Any:
        """An httpx2.AsyncClient for one event loop; close it. It follows no redirects: the key goes to one place."""
        import httpx2

        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return httpx2.AsyncClient(
            headers=headers,
            timeout=None,  # `asyncio.timeout` bounds the whole attempt; httpx's bounds each read of it alone
            limits=httpx2.Limits(max_connections=None),  # the caller's gate: waiting here would count as the server's time
            trust_env=httpx2.URL(self.url).host not in ("localhost", "127.0.0.1", "::1"),  # no proxy to this machine
        )

    async def ask(self, client: Any, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers with.

        Asked again after a wait: 408, 429, 5xx, timeouts and broken connections. Raises Unanswered when attempts or
        patience end, or for a reply that is no JSON; Refused for 400, 413 and 422; RewardError for every other status:
        401, 403, 404 and redirects are faults of the recipe.
        """
        trouble = ""
        for attempt in range(1, self.attempts + 1):
            reply = await self._attempt(client, body)
            if isinstance(reply, Reply) and not _may_pass(reply.status):
                return self._read(reply)
            trouble = reply if isinstance(reply, str) else f"status {reply.status}, {self._shown(reply.text)}"
            asked = _seconds(reply.retry_after) if isinstance(reply, Reply) else 0.0
            if asked > self.longest_wait_s:
                raise Unanswered(f"{trouble}; it asks to wait {asked:.0f} s, longer than {self.longest_wait_s:g} s")
            if attempt < self.attempts:
                await asyncio.sleep(max(asked, self._pause(attempt)))
        raise Unanswered(f"{trouble}, at the last of {self.attempts} attempts")

    def _pause(self, attempt: int) -> float:
        """Seconds after a failed attempt, scattered so that requests that failed together do not come back together."""
        return min(self.first_wait_s * 2.0 ** min(attempt - 1, 60), self.longest_wait_s) * _DICE.uniform(0.5, 1)

    async def _attempt(self, client: Any, body: Mapping[str, Any]) -> Reply | str:
        """One reply, or what went wrong on the way."""
        import httpx2

        try:
            async with (
                asyncio.timeout(self.timeout_s),
                client.stream("POST", self.url, content=json.dumps(body).encode()) as response,
            ):
                data = bytearray()
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > LARGEST_REPLY:
                        raise Unanswered(f"the reply is longer than {LARGEST_REPLY} bytes")
                return Reply(response.status_code, data.decode("utf-8", "replace"), response.headers.get("retry-after"))
        except TimeoutError:
            return f"no whole reply within {self.timeout_s:g} s"
        except httpx2.RequestError as error:  # TransportError, and a body that is not encoded as its header says
            return self._without_key(reason(error))

    def _read(self, reply: Reply) -> Any:
        if reply.status == 200:
            try:
                return json.loads(reply.text)
            except (ValueError, RecursionError):
                raise Unanswered(f"the reply is no JSON: {self._shown(reply.text)}") from None
        shown = f"{self.url} answers {reply.status}, {self._shown(reply.text)}"
        if reply.status in (400, 413, 422):
            raise Refused(shown)
        raise RewardError(f"{shown}{_ADVICE.get(reply.status, ': look at url')}")

    def _shown(self, text: str) -> str:
        return quoted(self._without_key(text), 200)  # a server may repeat what it was sent

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


_ADVICE = {
    401: ": the key is missing or wrong: look at bearer_variable and the environment",
    403: ": the key may not do this: look at bearer_variable and the environment",
    404: ": look at url and model",
}


def _may_pass(status: int) -> bool:
    """Whether the same request can be answered later."""
    return status in (408, 429) or status >= 500


def _seconds(retry_after: str | None) -> float:
    """The seconds that a Retry-After asks for, written as a number or as a date; 0 where it says neither."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().replace(".", "", 1).isdecimal():
        return float(retry_after)
    try:
        moment = parsedate_to_datetime(retry_after)
        return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):  # no date, or a zone of more days than there are
        return 0.0
