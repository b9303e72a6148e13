"""Between text and tokens: prompts, responses, end-of-sequence ids, and the small tokenizer of small models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .types import Conversation


class ChatError(Exception):
    """A tokenizer or model that cannot be used as the recipe asks; the message says what to do."""


class EncodeError(ValueError):
    """One text that the tokenizer cannot represent faithfully."""


def encode(tokenizer: Any, prompt: Conversation | str) -> list[int]:
    """Token ids of a prompt. [prompt tokens]

    A chat goes through the tokenizer's chat template, with the head of the assistant's turn at its end; plain text is
    tokenised as it stands, with the special tokens that the tokenizer itself adds (a beginning-of-sequence token).
    Raises ChatError if the tokenizer has no chat template, EncodeError for text that it or the template refuses.
    Not covered: special tokens spelled out in a prompt become those special tokens.
    """
    if isinstance(prompt, str):
        return _ids(tokenizer, prompt, add_special_tokens=True)
    if not tokenizer.chat_template:
        raise ChatError('the tokenizer has no chat template: set format = "text" in the prompt source')
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in prompt], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program from the model's maker: it can fail in any way
        raise EncodeError(f"the chat template refuses the chat: {error}") from error
    return _ids(tokenizer, text, add_special_tokens=False)  # the template has put them in


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a response to imitate, without special tokens: the caller appends the end-of-sequence id.

    [response tokens - 1]. Raises EncodeError for text that the tokenizer cannot represent.
    """
    return _ids(tokenizer, text, add_special_tokens=False)


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of response tokens, special tokens left out, spaces as they are. ids [response tokens]"""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def eos_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id that the model's configuration, its text part, its generation configuration and its
    tokenizer name; sampling any of them ends a response. generation_config may be None. Raises ChatError if none does.
    """
    owners = (model_config, model_config.get_text_config(), generation_config, tokenizer)
    found: set[int] = set()
    for owner in owners:  # some model classes have no such attribute: their configurations are not ours to fix
        value = getattr(owner, "eos_token_id", None)
        found.update(value if isinstance(value, Sequence) else () if value is None else (value,))
    if not found:
        raise ChatError("neither model nor tokenizer names an end-of-sequence token: set eos_token_id in config.json")
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
