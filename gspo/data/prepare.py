"""Rows become prompts: template, system message, tokens; and every fault of a row is found before training starts."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import JsonlSource, SourceConfig
from ..types import Conversation, Message, Prompt
from .errors import DataError

Encode = Callable[[Conversation | str], list[int]]
"""Token ids of a chat (through the chat template) or of plain text; ValueError for what it cannot represent."""

GoldCheck = Callable[[Any, Mapping[str, Any]], str | None]
"""(gold answer or None, columns) -> what is wrong with the answer, as a sentence, or None."""

NUM_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row."""

    row: int
    """Row number in the source, counted from 0."""
    what: str
    """One sentence."""


class _Faulty(Exception):
    """Ends the preparation of one row; never leaves this file."""


def prepare(
    rows: Sequence[Mapping[str, Any]],
    source: SourceConfig,
    *,
    encode: Encode,
    max_prompt_tokens: int,
    gold_checks: Sequence[GoldCheck] = (),
    where: str = "data",
) -> tuple[list[Prompt], list[Fault]]:
    """The rows without a fault as prompts, and the first fault of each of the others; both in the order of the rows.

    rows [rows] of columns · max_prompt_tokens: tokens, after the chat template · where: the recipe's table, for
    messages. Faults: missing or null columns (also those of the template), empty prompts, chats of a wrong shape, empty
    gold answers, gold answers that a reward cannot use, prompts that the tokenizer cannot represent, or longer than the
    limit. Raises DataError for what is wrong with the recipe and not with a row. Not covered: duplicate rows.
    """
    if source.system is not None and source.format == "text":
        raise DataError(f'{where}.system needs a chat: set {where}.format = "chat", or leave the system message out')
    fields = _template_fields(source.template, where)
    prompts, faults = [], []
    for row, columns in enumerate(rows):
        try:
            messages = _messages(_content(columns, source, fields), source)
            token_ids = _token_ids(messages, source, encode, max_prompt_tokens)
            answer = _answer(columns, source, gold_checks)
        except _Faulty as fault:
            faults.append(Fault(row, str(fault)))
        else:
            text = "\n\n".join(message["content"] for message in messages)
            chat = messages if source.format == "chat" else None
            prompts.append(Prompt(row, chat, text, token_ids, answer, columns))
    return prompts, faults


def settle(
    prompts: Sequence[Prompt], faults: Sequence[Fault], source: SourceConfig, where: str = "data"
) -> tuple[list[Prompt], int]:
    """The prompts to use, and how many rows were dropped, as `source.faults` says.

    Raises DataError under `refuse` if there is a fault (it lists them, with row numbers, and with line numbers for
    JSONL), and under `drop` if no row is left.
    """
    if faults and (source.faults == "refuse" or not prompts):
        total = len(prompts) + len(faults)
        head = f"{where}: {len(faults)} of {total} rows {'is' if len(faults) == 1 else 'are'} faulty"
        advice = f'mend them, or set {where}.faults = "drop" to leave them out' if prompts else "no row is left"
        raise DataError("\n".join([f"{head}: {advice}", *_listed(faults, source)]))
    return list(prompts), len(faults)


def require_batch(prompts: Sequence[Prompt], prompts_per_step: int) -> None:
    """Raises DataError if the training set is too small for one rollout batch of so many prompts."""
    if len(prompts) < prompts_per_step:
        raise DataError(
            f"the training set has {len(prompts)} prompts, fewer than the rollout.prompts_per_step = "
            f"{prompts_per_step} of one batch: add prompts, or set it to {len(prompts)} or less"
        )


def _listed(faults: Sequence[Fault], source: SourceConfig) -> list[str]:
    lines = isinstance(source, JsonlSource)  # one object a line: row k stands on line k + 1
    shown = [f"  row {f.row}{f' (line {f.row + 1})' if lines else ''}: {f.what}" for f in faults[:NUM_SHOWN]]
    return shown + ([f"  and {len(faults) - NUM_SHOWN} more"] if len(faults) > NUM_SHOWN else [])


def _template_fields(template: str | None, where: str) -> list[tuple[str, str | None, str, str]]:
    """The template's parts (text, column, format, conversion). Names are column names as they stand, nothing more:
    no attributes, no positions."""
    if template is None:
        return []
    try:
        parts = [(text, name, spec or "", how or "") for text, name, spec, how in string.Formatter().parse(template)]
    except ValueError as error:
        raise DataError(f"{where}.template cannot be read ({error}): write {{{{ and }}}} for braces") from None
    if any(name == "" for _, name, _, _ in parts):
        raise DataError(f"{where}.template has a field without a column name: write {{{{}}}} for braces")
    return parts


def _content(columns: Mapping[str, Any], source: SourceConfig, fields: Sequence[tuple]) -> Any:
    if source.template is None:
        return _column(columns, source.prompt_column)
    filled = []
    for text, name, spec, how in fields:
        filled.append(text if name is None else text + _formatted(_column(columns, name), name, spec, how))
    return "".join(filled)


def _formatted(value: Any, name: str, spec: str, how: str) -> str:
    try:
        return format(string.Formatter().convert_field(value, how or None), spec)
    except (ValueError, TypeError) as error:
        raise _Faulty(f"column {name} does not fit the template's format {spec!r}: {error}") from None


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        has = ", ".join(key for key in columns if not key.startswith("_"))
        raise _Faulty(f"column {name} is missing; the row has {has or 'no columns'}")
    if columns[name] is None:
        raise _Faulty(f"column {name} is null")
    return columns[name]


def _messages(content: Any, source: SourceConfig) -> tuple[Message, ...]:
    """The chat; a plain-text prompt is a chat of one message until it is tokenised."""
    if isinstance(content, str):
        chat: tuple[Message, ...] = ({"role": "user", "content": content},)
    elif source.format == "text":
        raise _Faulty(f'the prompt is a {type(content).__name__}, but format = "text" needs a string')
    else:
        chat = _chat(content)
    if not chat[-1]["content"].strip():
        raise _Faulty("the prompt is empty")
    if source.system is None:
        return chat
    if chat[0]["role"] == "system":
        raise _Faulty("the chat has a system message of its own beside the recipe's")
    return ({"role": "system", "content": source.system}, *chat)


def _chat(content: Any) -> tuple[Message, ...]:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _Faulty(f"the prompt is a {type(content).__name__}, neither a string nor a list of messages")
    if not content:
        raise _Faulty("the prompt is empty: a chat without messages")
    messages = tuple(_message(message, number) for number, message in enumerate(content))
    if messages[-1]["role"] == "assistant":
        raise _Faulty("the chat ends with the assistant's own message: nothing is asked")
    return messages


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise _Faulty(f"message {number} of the chat is a {type(message).__name__}, not an object")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise _Faulty(f"message {number} of the chat has no text as its {key}")
    if not message["role"].strip():
        raise _Faulty(f"message {number} of the chat has an empty role")
    if extra := [key for key, value in message.items() if key not in ("role", "content") and value is not None]:
        raise _Faulty(f"message {number} of the chat has {', '.join(extra)} beside role and content")
    return {"role": message["role"], "content": message["content"]}


def _token_ids(messages: tuple[Message, ...], source: SourceConfig, encode: Encode, limit: int) -> tuple[int, ...]:
    try:
        ids = tuple(encode(messages if source.format == "chat" else messages[0]["content"]))
    except ValueError as error:
        raise _Faulty(f"the prompt cannot be tokenised: {error}") from None
    if not ids:
        raise _Faulty("the prompt is empty: it has no tokens")
    if len(ids) > limit:
        raise _Faulty(f"the prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens = {limit}")
    return ids


def _answer(columns: Mapping[str, Any], source: SourceConfig, checks: Sequence[GoldCheck]) -> Any:
    answer = None
    if source.answer_column:
        if columns.get(source.answer_column, "") is None:
            raise _Faulty(f'the gold answer is null; set answer_column = "" if no reward needs it ({source.answer_column})')
        answer = _column(columns, source.answer_column)
        if (isinstance(answer, str) and not answer.strip()) or (isinstance(answer, Sequence) and not answer):
            raise _Faulty(f"the gold answer in column {source.answer_column} is empty")
    if wrong := [sentence for check in checks if (sentence := check(answer, columns))]:
        raise _Faulty("; ".join(wrong))
    return answer
