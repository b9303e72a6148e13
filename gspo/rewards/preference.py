"""A reward model: any sequence-classification model of transformers.

B rows of a batch, L tokens of its longest row, C columns of the model's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ..config import ModelReward, reward_name
from ..types import Message, Sample, Score
from .verifier import RewardError, Verifier, quoted

Encoded = Mapping[str, list[int]]
"""What a tokenizer makes of one input: `input_ids`, and `token_type_ids` where the model has segments. [tokens] each"""

UNLIMITED = 10**9
"""Tokenizers without a limit say 10^30."""

PADDING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between a padded and a lone row's logits, over 1 + the logit: rounding stays far below it, a padded
token that is read does not."""


def preference(config: ModelReward) -> Verifier:
    """The output of a sequence-classification model for prompt and response, loaded here and now.

    No value of it means that a response is right, so it has no top. Raises RewardError for a model that cannot be
    loaded, lacks weights, has no chat template, or none or several columns to choose from; and when it runs, for an input
    that is too long (where `too_long` is "refuse") and for logits that are no finite numbers, with the sample's name.
    Not covered: memory; what the chat template leaves out or changes; a policy that learns the model's weak sides.
    """
    return Verifier(load(config), top=None)


def load(config: ModelReward) -> RewardModel:
    """The reward model of a recipe. Raises RewardError, see `preference`."""
    where = f"reward {reward_name(config)}: {config.path}"
    network, tokenizer = _from_pretrained(config, where)
    if config.template == "chat" and not tokenizer.chat_template:
        raise RewardError(f'{where}: its tokenizer has no chat template: set template = "pair" or "text"')
    model = RewardModel(
        config,
        network,
        tokenizer,
        column=_column(config, network, where),
        limit=_limit(config, network, tokenizer, where),
        padding=network.config.get_text_config().pad_token_id,
        special=_special(tokenizer),
    )
    _prove_padding(model, where)
    return model


@dataclass(frozen=True)
class RewardModel:
    """A loaded model as a reward function. Make it with `load`."""

    config: ModelReward
    """Its settings."""
    network: Any
    """The transformers model, on its device, without dropout."""
    tokenizer: Any
    """Its own tokenizer, not the policy's."""
    column: int
    """The output that is the reward, from 0."""
    limit: int | None
    """Longest input in tokens, or None where neither recipe nor model names one."""
    padding: int | None
    """The id that the model's configuration pads with, if it names one."""
    special: Sequence[str]
    """Spellings of its tokenizer's special tokens."""

    def __call__(self, samples: Sequence[Sample]) -> list[Score]:
        """Samples [samples] -> scores [samples], in batches of like length; rounding apart, no sample feels another."""
        inputs = [self._input(sample) for sample in samples]
        scores = [given if isinstance(given, Score) else Score(None) for given in inputs]
        wanted = {i: given for i, given in enumerate(inputs) if not isinstance(given, Score)}
        for batch in batches({i: len(given["input_ids"]) for i, given in wanted.items()}, self.config.batch_tokens):
            logits = self.logits([wanted[i] for i in batch])
            for i, row, value in zip(batch, logits.tolist(), self._values(logits).tolist(), strict=True):
                scores[i] = self._score(samples[i], row, value)
        return scores

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """The tokens of one input, as `template` says. messages: the prompt as a chat."""
        if self.config.template == "chat":
            chat = [*messages, {"role": "assistant", "content": response}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)  # the template has put them in
        else:
            prompt = "\n\n".join(message["content"] for message in messages)
            texts = [prompt, response] if self.config.template == "pair" else [f"{prompt}\n\n{response}"]
            encoded = self.tokenizer(*texts, verbose=False)  # quiet about its length: that is looked at here
        known = inspect.signature(self.network.forward).parameters
        return {key: list(encoded[key]) for key in ("input_ids", "token_type_ids") if key in encoded and key in known}

    @torch.inference_mode()
    def logits(self, rows: Sequence[Encoded]) -> Tensor:
        """Encoded rows [B] -> float32 logits [B, C] on the CPU. Rows are padded on the right, behind a mask."""
        fill = {"input_ids": self._padding(rows), "token_type_ids": 0}
        longest = max(len(row["input_ids"]) for row in rows)
        tensors = {
            key: torch.tensor([[*row[key], *[fill[key]] * (longest - len(row[key]))] for row in rows]) for key in rows[0]
        }
        lengths_B = torch.tensor([len(row["input_ids"]) for row in rows])
        mask_BL = (torch.arange(longest) < lengths_B[:, None]).long()
        device = self.network.device
        inputs = {key: tensor.to(device) for key, tensor in tensors.items()} | {"attention_mask": mask_BL.to(device)}
        return self.network(**inputs).logits.float().cpu()

    def _padding(self, rows: Sequence[Encoded]) -> int:
        """The id to pad with. Decoders read their logits at the last token that is not it, so where the model names none,
        it is one that no row holds: then that is each row's last token, as for a row alone."""
        if self.padding is not None:
            return self.padding
        used = {i for row in rows for i in row["input_ids"]}
        unused = next(i for i in range(len(used) + 1) if i not in used)
        self.network.config.get_text_config().pad_token_id = unused
        return unused

    def _input(self, sample: Sample) -> Encoded | Score:
        """The sample's tokens, or the abstention that it gets instead."""
        if special := next((t for t in self.special if t in sample.text), None):
            return Score(None, f"the response spells out {quoted(special)}, a special token of the reward model")
        prompt = sample.prompt
        messages: Sequence[Message] = prompt.messages or ({"role": "user", "content": prompt.text},)
        try:
            encoded = self.encode(messages, sample.text)
        except Exception as error:  # a template is a program from the model's maker; on_error says what follows
            error.add_note(f"at sample {sample.id}")
            raise
        length = len(encoded["input_ids"])
        if length == 0:
            raise RewardError(f"sample {sample.id} has no tokens for the reward model: prompt and response are empty")
        if self.limit is None or length <= self.limit:
            return encoded
        what = f"{length} tokens of prompt and response are more than the reward model's {self.limit}"
        if self.config.too_long == "abstain":
            return Score(None, what)
        raise RewardError(f'sample {sample.id}: {what}: shorten responses, or set too_long = "abstain" to leave such out')

    def _values(self, logits_BC: Tensor) -> Tensor:
        """Logits [B, C] to the reward [B]."""
        scaled_BC = (logits_BC.double() - self.config.mean) / self.config.deviation
        if self.config.output == "softmax":
            return scaled_BC.softmax(-1)[:, self.column]
        chosen_B = scaled_BC[:, self.column]
        return chosen_B.sigmoid() if self.config.output == "sigmoid" else chosen_B

    def _score(self, sample: Sample, row: list[float], value: float) -> Score:
        if not torch.tensor(row).isfinite().all():  # a sigmoid would make an infinite logit look like a good response
            raise RewardError(
                f"sample {sample.id} got logits that are no finite numbers, {row[:8]}: a dtype that overflows "
                f"({self.config.dtype}), or broken weights"
            )
        label = self.network.config.id2label.get(self.column, self.column)
        return Score(value, f"logit {row[self.column]:.6g} of {quoted(label)}")


def batches(lengths: Mapping[int, int], budget: int) -> Iterator[list[int]]:
    """Keys of lengths in batches whose rows x longest row stay within the budget, longest first; a longer row is alone."""
    batch: list[int] = []
    for key in sorted(lengths, key=lambda k: -lengths[k]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _from_pretrained(config: ModelReward, where: str) -> tuple[Any, Any]:
    device = _device(config.device, where)
    common = {"trust_remote_code": config.trust_remote_code, "revision": config.revision or "main"}
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), use_safetensors=True, output_loading_info=True, **common
        )
        network, info = loaded
        tokenizer = AutoTokenizer.from_pretrained(config.path, **common)
    except Exception as error:  # whatever a broken or foreign folder makes the libraries raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RewardError(
            f"{where}: cannot be loaded as a sequence-classification model with its tokenizer: {first}"
        ) from error
    if missing := sorted(info["missing_keys"]):  # a causal language model, say: its reward would be noise
        raise RewardError(f"{where}: lacks weights that would start at random, e.g. {missing[0]}: is it a reward model?")
    network.config.get_text_config().use_cache = False  # nothing is generated
    return network.to(device).eval().requires_grad_(False), tokenizer


def _device(name: str, where: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RewardError(
            f'{where}: device = "{name}", but torch sees {torch.cuda.device_count()} GPUs: use "auto" or "cpu"'
        )
    return device


def _column(config: ModelReward, network: Any, where: str) -> int:
    labels = {int(i): str(label) for i, label in network.config.id2label.items()}
    listed = ", ".join(f"{i} ({label})" for i, label in sorted(labels.items())[:20])
    if config.output == "softmax" and len(labels) == 1:
        raise RewardError(f'{where}: a softmax over its single column is always 1: use output = "logit" or "sigmoid"')
    if config.column is None and len(labels) > 1:
        raise RewardError(f"{where}: has {len(labels)} columns: set column to one of {listed}")
    found = [i for i, label in labels.items() if config.column in (i, label)] if config.column is not None else [0]
    if len(found) != 1:
        raise RewardError(f"{where}: column = {config.column!r} names {len(found)} of its columns: use one of {listed}")
    return found[0]


def _limit(config: ModelReward, network: Any, tokenizer: Any, where: str) -> int | None:
    named = (getattr(network.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
    own = min((n for n in named if n and n < UNLIMITED), default=None)
    if config.max_tokens and own and config.max_tokens > own:
        raise RewardError(f"{where}: max_tokens = {config.max_tokens} is more than the {own} that the model takes")
    return config.max_tokens or own


def _special(tokenizer: Any) -> list[str]:
    """Every text that the tokenizer turns into a token of the template's or its own."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)


def _prove_padding(model: RewardModel, where: str) -> None:
    """A short row beside a long one must get what it gets alone. Raises RewardError where it does not."""
    short, long = (model.encode([{"role": "user", "content": "1 + 1"}], "2" + " = 2" * n) for n in (0, 8))
    lone, padded = model.logits([short])[0], model.logits([long, short])[1]
    largest = float(((lone - padded).abs() / (1 + lone.abs())).max())
    if not largest <= PADDING_TOLERANCE[model.network.dtype]:
        raise RewardError(f"{where}: a padded row differs from the same row alone by {largest:.2g}: it cannot be batched")
