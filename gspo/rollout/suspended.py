"""Groups that go on in a later step, as JSON: every token, log-probability, weight version and reply, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..data import DataError
from ..types import Completion, Message, Prompt, Reply, Sample, ToolCall, Turn, Unfinished
from .collect import Group, joined

Json = dict[str, Any]


def saved(groups: Sequence[Group]) -> list[Json]:
    """The groups as JSON objects. float32 passes through decimal numbers unchanged."""
    return [
        {
            "prompt": {"id": group[0].prompt.id, "row": group[0].prompt.row, "token_ids": group[0].prompt.token_ids},
            "samples": [_sample(s) for s in group],
        }
        for group in groups
    ]


def restored(state: Sequence[Json], prompts: Sequence[Prompt]) -> list[Group]:
    """The groups of a `saved`. Raises DataError where the prompts are no longer those that they were begun with."""
    by_row, groups = {p.row: p for p in prompts}, []
    for group in state:
        was, now = group["prompt"], by_row.get(group["prompt"]["row"])
        if now is None or now.token_ids != tuple(was["token_ids"]):
            raise DataError(
                f"a suspended response belongs to row {was['row']} of the prompts, which is not what it was when the "
                "checkpoint was saved: restore the data, or start a new run"
            )
        prompt = replace(now, id=was["id"])
        groups.append([_sample_of(s, prompt) for s in group["samples"]])
    return groups


def _sample(s: Sample | Unfinished) -> Json:
    more: Json = {"cut": s.completion.finish_reason == "length"} if isinstance(s, Sample) else {"seed": s.seed}
    if isinstance(s, Unfinished) and s.response is not None:
        more["response"] = _completion(s.response)
    return {"id": s.id, "turns": [_turn(turn) for turn in s.turns], **more}


def _sample_of(state: Mapping[str, Any], prompt: Prompt) -> Sample | Unfinished:
    turns = [_turn_of(turn) for turn in state["turns"]]
    if "cut" in state:
        return joined(state["id"], prompt, turns, cut=state["cut"])
    response = _completion_of(state["response"]) if "response" in state else None
    return Unfinished(state["id"], prompt, state["seed"], tuple(turns), response)


def _completion(c: Completion) -> Json:
    experts = None if c.routed_experts is None else [str(c.routed_experts.dtype), c.routed_experts.tolist()]
    return asdict(c) | {"token_ids": c.token_ids.tolist(), "logprobs": c.logprobs.tolist(), "routed_experts": experts}


def _completion_of(state: Json) -> Completion:
    tokens, logprobs = np.array(state["token_ids"], np.int64), np.array(state["logprobs"], np.float32)
    later = tuple((version, count) for version, count in state["later"])
    experts = state["routed_experts"] and np.array(state["routed_experts"][1], state["routed_experts"][0])
    return Completion(**state | {"token_ids": tokens, "logprobs": logprobs, "later": later, "routed_experts": experts})


def _turn(turn: Turn) -> Json:
    reply = turn.reply
    return {
        "completion": _completion(turn.completion),
        "text": turn.text,
        "messages": [{"role": m["role"], "content": m["content"]} for m in reply.messages],
        "done": bool(reply.done),
        "reward": None if reply.reward is None else float(reply.reward),
        "calls": [asdict(call) for call in reply.calls],
        "reply_ids": turn.reply_ids.tolist(),
    }


def _turn_of(state: Mapping[str, Any]) -> Turn:
    messages = tuple(Message(**m) for m in state["messages"])
    calls = tuple(ToolCall(**call) for call in state["calls"])
    reply = Reply(messages, state["done"], state["reward"], calls)
    return Turn(_completion_of(state["completion"]), state["text"], reply, np.array(state["reply_ids"], np.int64))
