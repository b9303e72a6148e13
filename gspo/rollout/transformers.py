"""The embedded engine: transformers in this process, with the very weights that are trained.

A row of the batch is a slot with its own length: each row's keys and values stand at its own positions, so rows start
and stop independently. Finished rows are refilled from the queue, or squeezed out when it is empty. Prompts that start
together and are equal (a group's) go through the model once.

R rows, P prompts, L places of the cache, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from ..config import SamplingConfig
from ..training.logprobs import chunk_rows, head_weight
from ..training.policy import Policy
from ..training.scoring import score_ends
from ..types import Completion
from .engine import EngineError, Progress, Request, most_tokens
from .sampling import draw, uniform

REFILL_SHARE = 0.25
"""Finished rows are refilled, or squeezed out, once they are this share of the batch: a prefill (or a copy of the cache)
for a few rows costs more than computing them in vain for a while."""

PREFILL_TOKENS = 16384
"""Prompt tokens, padding included, that go through the model at once: bounds the memory of starting many rows."""

GROW = 64
"""Places that the cache grows by at least; then by half its size, so that copies stay few."""


class TransformersEngine:
    """Batched sampling with a key-value cache."""

    copies_weights = False

    def __init__(self, policy: Policy, *, max_rows: int, routed_experts: bool = False) -> None:
        """routed_experts: whether completions tell which experts computed their tokens; for models with routers alone."""
        self.policy, self.max_rows, self.version = policy, max_rows, policy.version
        self.routed_experts = routed_experts

    def load(self, policy: Policy) -> None:
        """Take up the policy's weights: they are shared, so only the version moves."""
        if policy is not self.policy:
            raise ValueError("the embedded engine shares its policy's weights and cannot take up another's")
        self.version = policy.version

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingConfig, progress: Progress = lambda n: None
    ) -> list[Completion]:
        """See Engine. Raises EngineError naming the sample whose logits are NaN, and where memory runs out."""
        if not requests:
            return []
        batch = _Batch(self.policy, requests, sampling, self.max_rows, routed_experts=self.routed_experts)
        try:
            while batch.has_work():
                progress(batch.step())
        except torch.OutOfMemoryError as error:
            raise EngineError("out of memory while sampling: lower rollout.max_rows or max_response_tokens") from error
        return batch.completions(self.version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See Engine."""
        return score_ends(self.policy, sequences, [len(tokens) - 1 for tokens in sequences], temperature=1.0)

    def rest(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Nothing is held between calls."""


class _Batch:
    """The state of one generate call: the queue, the running rows and what they have sampled."""

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        max_rows: int,
        *,
        routed_experts: bool = False,
    ) -> None:
        self.policy, self.requests, self.sampling = policy, requests, sampling
        self.queue = deque(range(len(requests)))
        shape = (len(requests), sampling.max_response_tokens)
        self.tokens, self.logps = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self.sampled = np.zeros(len(requests), np.int64)
        self.limits = np.array([most_tokens(r, sampling) for r in requests])
        self.seeds = np.array([r.seed for r in requests], np.uint64)
        self.drawn = np.array([r.drawn for r in requests])
        self.eos = np.array(sorted(policy.eos_ids))
        # Once a call, not once a token: a float32 copy takes longer than the product of a few rows.
        self.head_VH = head_weight(policy.head, float32_head=policy.float32_head)
        self.max_rows = min(max_rows, len(requests))
        self.row_request = np.zeros(0, np.int64)  # [R] the request that each row works on
        self.row_running = np.zeros(0, bool)
        self.row_length = np.zeros(0, np.int64)  # places of the cache in use
        self.row_token = np.zeros(0, np.int64)  # sampled last, not yet in the cache
        self.cache = _SlotCache(policy)
        self.experts: np.ndarray | None = None  # [requests, places, layers with experts, experts a token]
        if routed_experts and (routing := policy.routing):
            places = max(len(r.prompt) for r in requests) + sampling.max_response_tokens
            per_token = len(routing.layers), routing.top_k
            self.experts = np.empty((len(requests), places, *per_token), routing.dtype)

    def has_work(self) -> bool:
        """Whether anything is still to be sampled."""
        return bool(self.queue) or bool(self.row_running.any())

    def step(self) -> int:
        """Start, squeeze, or sample one token in every running row; returns how many responses finished."""
        idle = len(self.row_running) - int(self.row_running.sum())
        room = self.max_rows - len(self.row_running) + idle
        if self.queue and room >= min(len(self.queue), max(1, REFILL_SHARE * self.max_rows)):
            return self._start(min(room, len(self.queue)))
        if not self.queue and idle >= max(1, REFILL_SHARE * len(self.row_running)):
            self._keep(self.row_running.nonzero()[0])
        return self._decode()

    def completions(self, version: int) -> list[Completion]:
        """What was sampled, in the order of the requests."""
        out = []
        for i, request in enumerate(self.requests):
            n = int(self.sampled[i])
            stopped = bool(np.isin(self.tokens[i, n - 1], self.eos))
            rows = len(request.prompt) + n - 1  # the token sampled last never went through the model
            out.append(
                Completion(
                    token_ids=self.tokens[i, :n].copy(),
                    logprobs=self.logps[i, :n].copy(),
                    finish_reason="stop" if stopped else "length",
                    weight_version=version,
                    seed=request.seed,
                    routed_experts=None if self.experts is None else self.experts[i, :rows].copy(),
                )
            )
        return out

    def _start(self, count: int) -> int:
        """Prefill the next requests of the queue, each different prompt once, into free rows."""
        running = self.row_running.nonzero()[0]
        if len(running) < len(self.row_running):
            self._keep(running)
        started = np.array([self.queue.popleft() for _ in range(count)])
        prompts = [self.requests[i].prompt for i in started]
        index = {prompt: p for p, prompt in enumerate(dict.fromkeys(prompts))}
        which = np.array([index[prompt] for prompt in prompts])
        lengths = np.array([len(p) for p in prompts])
        rows = np.arange(len(running), len(running) + count)
        hidden_PH = self._prefill(list(index), rows, which, started)
        self.row_request = np.concatenate([self.row_request, started])
        self.row_running = np.concatenate([self.row_running, np.ones(count, bool)])
        self.row_length = np.concatenate([self.row_length, lengths])
        self.row_token = np.concatenate([self.row_token, np.zeros(count, np.int64)])
        return self._sample(hidden_PH[torch.from_numpy(which).to(hidden_PH.device)], rows)

    def _prefill(self, prompts: list[tuple[int, ...]], rows: np.ndarray, which: np.ndarray, started: np.ndarray) -> Tensor:
        """Last hidden states [P, H] of the prompts; their keys and values go to rows[r] from prompt which[r], for the
        request started[r]."""
        device, hidden = self.policy.device, []
        longest = max(len(p) for p in prompts)
        at_once = max(1, PREFILL_TOKENS // longest)
        for first in range(0, len(prompts), at_once):
            part = prompts[first : first + at_once]
            ids = np.zeros((len(part), longest), np.int64)
            for p, prompt in enumerate(part):  # padded on the right: a causal model's real places never see it
                ids[p, : len(prompt)] = prompt
            mine = (which >= first) & (which < first + at_once)
            self.cache.prefill(rows[mine], which[mine] - first)
            positions = torch.arange(longest, device=device).expand(len(part), -1)
            hidden_PNH = self.policy.hidden(torch.from_numpy(ids).to(device), positions, cache=self.cache)
            if self.experts is not None:  # those of padding are among them, and overwritten or left out
                self.experts[started[mine], :longest] = self._chosen(len(part), longest)[which[mine] - first]
            last = torch.tensor([len(p) - 1 for p in part], device=device)
            hidden.append(hidden_PNH[torch.arange(len(part), device=device), last])
        return torch.cat(hidden)

    def _decode(self) -> int:
        """One token more in every running row."""
        device = self.policy.device
        at_R = torch.from_numpy(self.row_length).to(device)
        mask = self.cache.decode(at_R, int(self.row_length.max()) + 1)
        ids = torch.from_numpy(self.row_token)[:, None].to(device)
        hidden_R1H = self.policy.hidden(ids, at_R[:, None], cache=self.cache, attention_mask=mask)
        if self.experts is not None:
            on = self.row_running
            self.experts[self.row_request[on], self.row_length[on]] = self._chosen(len(on), 1)[on, 0]
        self.row_length += self.row_running
        rows = self.row_running.nonzero()[0]
        hidden_RH = hidden_R1H[:, 0]
        if len(rows) < len(hidden_RH):
            hidden_RH = hidden_RH[torch.from_numpy(rows).to(device)]
        return self._sample(hidden_RH, rows)

    def _chosen(self, num_rows: int, num_tokens: int) -> np.ndarray:
        """The experts of the last forward pass, [rows, tokens, layers, experts a token]."""
        assert self.policy.routing is not None
        return self.policy.routing.chosen().unflatten(0, (num_rows, num_tokens)).cpu().numpy()

    def _sample(self, hidden_RH: Tensor, rows: np.ndarray) -> int:
        """Draw a token for each of these rows; returns how many of them finished.

        Logits exist for a few rows at a time, whatever the vocabulary.
        """
        request = self.row_request[rows]
        number = self.sampled[request]
        u_R = torch.from_numpy(uniform(self.seeds[request], self.drawn[request] + number)).to(hidden_RH.device)
        at_once = chunk_rows(self.head_VH)
        drawn = [
            draw(hidden.to(self.head_VH.dtype) @ self.head_VH.T, self.sampling, u)
            for hidden, u in zip(hidden_RH.split(at_once), u_R.split(at_once), strict=True)
        ]
        token, logp = (torch.cat(parts).cpu().numpy() for parts in zip(*drawn, strict=True))
        if not np.isfinite(logp).all():
            bad = self.requests[request[~np.isfinite(logp)][0]].id
            raise EngineError(f"sample {bad}: the policy's logits are NaN or infinite: its weights are broken")
        self.tokens[request, number], self.logps[request, number] = token, logp
        self.sampled[request] += 1
        self.row_token[rows] = token
        done = np.isin(token, self.eos) | (number + 1 >= self.limits[request])
        self.row_running[rows] = ~done
        return int(done.sum())

    def _keep(self, rows: np.ndarray) -> None:
        """Squeeze the batch down to these rows."""
        self.cache.keep(rows)
        for name in ("row_request", "row_running", "row_length", "row_token"):
            setattr(self, name, getattr(self, name)[rows])


class _SlotCache(Cache):
    """Keys and values [R, heads, L, D] of each layer; a row's places are its own positions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(layers=[])
        self.slots: list[list[Tensor]] = []
        self.num_rows, self.device = 0, policy.device
        self._write: Any = None

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """0: positions are always passed in full."""
        return 0

    def prefill(self, rows: np.ndarray, which: np.ndarray) -> None:
        """The next forward pass computes prompts; rows[r] takes over prompt which[r]."""
        at, source = torch.from_numpy(rows).to(self.device), torch.from_numpy(which).to(self.device)
        self.num_rows = max(self.num_rows, int(rows.max()) + 1)

        def write(layer: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            slots = self._room(layer, new, new[0].shape[2])
            for slot, x in zip(slots, new, strict=True):
                slot[at, :, : x.shape[2]] = x[source]
            return new

        self._write = write

    def decode(self, at_R: Tensor, longest: int) -> Tensor:
        """The next forward pass adds one place to each row; returns its mask, bool [R, 1, 1, longest]."""
        rows_R = torch.arange(len(at_R), device=self.device)

        def write(layer: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            slots = self._room(layer, new, longest)
            for slot, x in zip(slots, new, strict=True):
                slot[rows_R, :, at_R] = x[:, :, 0]
            return tuple(slot[: len(at_R), :, :longest] for slot in slots)

        self._write = write
        return (torch.arange(longest, device=self.device) <= at_R[:, None])[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Called by each attention layer with its new keys and values."""
        return self._write(layer_idx, (key_states, value_states))

    def keep(self, rows: np.ndarray) -> None:
        """Squeeze every layer down to these rows."""
        index = torch.from_numpy(rows).to(self.device)
        self.num_rows = len(rows)
        for slots in self.slots:
            for i, slot in enumerate(slots):
                slots[i] = slot[index]

    def _room(self, layer: int, new: tuple[Tensor, Tensor], places: int) -> list[Tensor]:
        """The slots of a layer, grown to num_rows rows and at least this many places."""
        if layer == len(self.slots):
            self.slots.append([x.new_zeros((0, x.shape[1], 0, x.shape[3])) for x in new])
        slots = self.slots[layer]
        have_rows, have = slots[0].shape[0], slots[0].shape[2]
        if have_rows < self.num_rows or have < places:
            size = have if have >= places else max(places + GROW, have + have // 2)
            for i, slot in enumerate(slots):
                grown = slot.new_zeros((self.num_rows, slot.shape[1], size, slot.shape[3]))
                grown[:have_rows, :, :have] = slot
                slots[i] = grown
        return slots
