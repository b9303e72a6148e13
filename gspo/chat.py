"""Between text and tokens: prompts, what stands between two responses, end-of-sequence ids, the tokenizer of small models.

The prompt of an episode's next response is made by adding to the ids of the one before: those that the policy sampled,
then those of the text that the template writes between a response and the next. That text is cut out of a rendering of a
short chat in which the response is a mark, so nothing that was sampled is rendered or tokenised, and what the policy has
read stays as it was, also where the template would drop or rewrite earlier responses (their thinking) once a message
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .types import Conversation, Message

MARK = "response-5e1f9c"
"""Stands for a response in renderings; plain enough that templates keep it whole."""


class ChatError(Exception):
    """A tokenizer or model that cannot be used as the recipe asks; the message says what to do."""


class EncodeError(ValueError):
    """One text that the tokenizer cannot represent faithfully."""


def encode(tokenizer: Any, prompt: Conversation | str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Token ids of a prompt. [prompt tokens]

    tools: JSON schemas that the chat template tells the model of.

    A chat goes through the tokenizer's chat template, with the head of the assistant's turn at its end; plain text is
    tokenised as it stands, with the special tokens that the tokenizer itself adds (a beginning-of-sequence token).
    Raises ChatError if the tokenizer has no chat template, EncodeError for text that it or the template refuses.
    Not covered: special tokens spelled out in a prompt become those special tokens.
    """
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, add_special_tokens=True)
    if not tokenizer.chat_template:
        raise ChatError('the tokenizer has no chat template: set format = "text" in the prompt source')
    return _ids(tokenizer, _render(tokenizer, prompt, tools), add_special_tokens=False)  # the template has put them in


def continuation(tokenizer: Any, messages: Conversation, *, last: int, chat: bool) -> list[int]:
    """Token ids between a response and the next: the template's end of the turn, the messages, the head of the next turn.

    last: the id that the response ends with, an end-of-sequence token. Where the template closes a turn with it, it is not
    written twice; where the template closes a turn otherwise, its own text follows the sampled token. Of plain text
    (chat = False) only the contents of the messages follow. Control tokens spelled out in a message stay text: a space
    breaks them, `< |im_end|>`. [tokens between]

    Raises EncodeError for messages that tokenizer or template refuse. Tried before training by `require_continuation`.
    """
    messages = [Message(role=m["role"], content=_spelled_out(tokenizer, m["content"])) for m in messages]
    if not chat:
        return _ids(tokenizer, "".join(m["content"] for m in messages), add_special_tokens=False)
    ids = _ids(tokenizer, _after_mark(tokenizer, [], messages), add_special_tokens=False)
    if last in ids and not tokenizer.decode(ids[: ids.index(last)]).strip():
        return ids[ids.index(last) + 1 :]
    return ids


def require_continuation(tokenizer: Any, roles: Iterable[str]) -> None:
    """Raises ChatError, before work is done, where what the template writes after a response cannot be told: it leaves the
    response out or repeats it, drops a message of one of the roles, refuses it, or writes something else after two turns.
    """
    for role in roles:
        reply, other = Message(role=role, content="reply-77ab"), Message(role="assistant", content="<think>a</think>b")
        try:
            once = _after_mark(tokenizer, [], [reply])
            twice = _after_mark(tokenizer, [other, reply], [reply])
        except EncodeError as error:
            raise ChatError(
                f"the chat template cannot go on after a response with a message of the role {role}: {error}"
            ) from error
        if once.count(reply["content"]) != 1:
            raise ChatError(
                f"the chat template drops or repeats a message of the role {role}: episodes cannot go on; {OTHER}"
            )
        if once != twice:
            raise ChatError(
                "the chat template writes something else after a first response than after a second, so that what follows "
                f"a response cannot be told: {OTHER}"
            )


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, so that the pieces joined are the text. [tokens]

    A token that ends within a character adds nothing; the one that ends the character adds it whole. Each token is decoded
    beside the one before, since tokenizers write spaces by what stands before; special tokens are spelled out.
    """
    texts, start, before = [], 0, ""
    for at in range(len(ids)):
        text = decode(ids[start : at + 1])
        if text.endswith("\ufffd") and at + 1 < len(ids) and at - start < 8:  # a character has at most 4 bytes
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, before = at, decode(ids[at : at + 1])
    return texts


OTHER = "use another role or template, or leave [environment] out"


def require_tools(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ChatError where the chat template does not name one of the tools to the model."""
    chat = [Message(role="user", content="a question")]
    text = _render(tokenizer, chat, tools) if tools else ""
    if missing := [t["function"]["name"] for t in tools if t["function"]["name"] not in text]:
        raise ChatError(
            f"the chat template does not tell the model of the tool {missing[0]}: use a model whose template knows tools, "
            'or set environment.tell = "nothing" and say it in data.system'
        )


def _render(tokenizer: Any, chat: Conversation, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text of a chat with the head of the assistant's turn at its end."""
    given = {"tools": [dict(t) for t in tools]} if tools else {}
    try:
        return tokenizer.apply_chat_template([dict(m) for m in chat], add_generation_prompt=True, tokenize=False, **given)
    except Exception as error:  # a template is a program from the model's maker: it can fail in any way
        raise EncodeError(f"the chat template refuses the chat: {error}") from error


def _after_mark(tokenizer: Any, before: Conversation, messages: Conversation) -> str:
    """What the template writes after a response, the messages and the head of the next turn included."""
    mark = MARK
    while any(mark in m["content"] for m in messages):
        mark += "0"
    response = Message(role="assistant", content=mark)
    text = _render(tokenizer, [Message(role="user", content="a question"), *before, response, *messages])
    if text.count(mark) != 1:
        raise EncodeError(f"it writes an earlier response {text.count(mark)} times: {OTHER}")
    return text.partition(mark)[2]


def _spelled_out(tokenizer: Any, text: str) -> str:
    """The text with a space inside every spelled-out control token, so that it becomes no token of that kind."""
    for token in (added.content for added in tokenizer.added_tokens_decoder.values() if added.special):
        if token in text:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a response to imitate, without special tokens: the caller appends the end-of-sequence id.

    [response tokens - 1]. Raises EncodeError for text that the tokenizer cannot represent.
    """
    return _ids(tokenizer, text, add_special_tokens=False)


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of response tokens, special tokens left out, spaces as they are. ids [response tokens]"""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def eos_ids(model_config: Any, generation_config: Any, tokenizer: Any, vocabulary: int) -> frozenset[int]:
    """Every end-of-sequence id that the model's configuration, its text part, its generation configuration and its
    tokenizer name; sampling any of them ends a response. generation_config may be None.

    vocabulary: rows of the output matrix. Raises ChatError if there is no id, or none among its rows.
    """
    owners = (model_config, model_config.get_text_config(), generation_config, tokenizer)
    found: set[int] = set()
    for owner in owners:  # some model classes have no such attribute: their configurations are not ours to fix
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, Sequence) else () if value is None else (value,))
    if not found:
        raise ChatError("neither model nor tokenizer names an end-of-sequence token: set eos_token_id in config.json")
    if not any(0 <= i < vocabulary for i in found):
        named = ", ".join(map(str, sorted(found)))
        raise ChatError(
            f"the end-of-sequence ids are {named}, and the model's tokens 0 to {vocabulary - 1}, so that no response ends: "
            "set eos_token_id in config.json"
        )
    return frozenset(found)


def character_tokenizer(alphabet: str) -> Any:
    """A tokenizer with one token a character: `<pad>` is 0, `<eos>` 1, then the alphabet in its order.

    It has no chat template and adds no special tokens; `save_pretrained` and `AutoTokenizer.from_pretrained` round-trip.
    Raises ChatError for an empty alphabet or one that holds a character twice. A character outside the alphabet has no
    token: `encode` and `encode_response` raise EncodeError for it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise ChatError("model.create.alphabet is empty: it needs every character of prompts and responses")
    if twice := sorted({character for character in alphabet if alphabet.count(character) > 1}):
        raise ChatError(f"model.create.alphabet holds {', '.join(map(repr, twice))} more than once")
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    if any("\ud800" <= character <= "\udfff" for character in text):  # a JSON file can hold them
        raise EncodeError("the text holds half of a surrogate pair, which is no character")
    try:
        ids = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # the tokenizers library raises plain Exception, whatever the reason
        if "[UNK]" not in str(error):
            raise
        strange = sorted(set(text) - tokenizer.get_vocab().keys())
        raise EncodeError(f"the tokenizer has no token for {', '.join(map(repr, strange))}") from error
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return ids  # the unknown token doubles as another one only where every text can be represented
    if (times := ids.count(unknown) - text.count(tokenizer.unk_token)) > 0:
        raise EncodeError(f"the tokenizer has no token for {times} of the text's pieces and writes {tokenizer.unk_token}")
    return ids
