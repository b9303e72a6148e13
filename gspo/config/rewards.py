"""What a response is worth."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .section import Section


class RewardConfig(Section):
    """What every reward has."""

    RANGE: ClassVar[tuple[float, float] | None] = None
    """Lowest and highest value, where the kind has them."""

    weight: float = 1.0
    """Factor of this reward in the sum. 1: a single reward needs no thought."""
    name: str | None = None
    """Name in records. The type (or the function's name) by default; needed where two would be alike."""
    on_error: Literal["raise", "abstain"] = "raise"
    """What an exception in the reward does: stop training, or leave the sample out and count it. It is never a 0."""


class ExactReward(RewardConfig):
    """1 if the response, stripped of white space, equals the gold answer as a string, else 0."""

    RANGE = (0.0, 1.0)
    type: Literal["exact"] = "exact"
    """Kind of reward."""


class NumericReward(RewardConfig):
    """1 if the whole response is a number that equals the gold answer, else 0."""

    RANGE = (0.0, 1.0)
    type: Literal["numeric"] = "numeric"
    """Kind of reward."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest absolute difference that counts as equal. 0: exact."""


class LastNumberReward(RewardConfig):
    """1 if the last number in the response equals the gold answer, else 0."""

    RANGE = (0.0, 1.0)
    type: Literal["last_number"] = "last_number"
    """Kind of reward."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest absolute difference that counts as equal. 0: exact."""


class MathReward(RewardConfig):
    """1 if the response's last `\\boxed{}` equals the gold answer by the rules of docs/mathematics.md, else 0."""

    RANGE = (0.0, 1.0)
    type: Literal["math"] = "math"
    """Kind of reward."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Seconds on the wall clock for one answer; one that needs more scores 0. 5: a thousand times what a short one needs,
    so that a busy machine is no reason."""
    memory_mib: int = Field(default=1024, ge=256)
    """MiB of address space of a worker process; an answer that needs more scores 0. A worker alone takes 100."""
    num_workers: int = Field(default=2, ge=1)
    """Worker processes for each process that trains. 2: one hanging answer does not stop the others."""
    max_characters: int = Field(default=2000, ge=1)
    """Characters of a box beyond which an answer scores 0 unread. 2,000: the longest of the MATH answers has 160."""


class FormatReward(RewardConfig):
    """1 if a regular expression matches the whole response, else 0."""

    RANGE = (0.0, 1.0)
    type: Literal["format"] = "format"
    """Kind of reward."""
    pattern: str
    """Python regular expression; `.` matches newlines too."""


class ReasoningGymReward(RewardConfig):
    """The score of the reasoning-gym task that the prompt came from. A wrong answer is not 0 in every task."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Kind of reward."""


class VerifiersReward(RewardConfig):
    """The weighted sum of the reward functions of the single-turn `verifiers` environment that the prompt came from."""

    type: Literal["verifiers"] = "verifiers"
    """Kind of reward."""


class LengthPenalty(RewardConfig):
    """0 up to `free_tokens` response tokens, then falling linearly to -1 at `max_tokens` (DAPO, arXiv:2503.14476,
    equation 13)."""

    RANGE = (-1.0, 0.0)
    type: Literal["length_penalty"] = "length_penalty"
    """Kind of reward."""
    free_tokens: int = Field(ge=0)
    """Response tokens that cost nothing."""
    max_tokens: int = Field(gt=0)
    """Response tokens from which the penalty is -1."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max_tokens <= self.free_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) must be larger than free_tokens ({self.free_tokens})")
        return self


class CodeReward(RewardConfig):
    """1 if the program in the response passes all tests of its row in a sandbox, else 0.

    The program is the last closed fenced block. Tests are input/output pairs (`{"inputs": [...], "outputs": [...]}`, with
    `"fn_name"` for calls instead of standard input; a list of `{"input": ..., "output": ...}`), or Python with assertions,
    as text or a list of texts. docs/sandbox.md has the walls and their gaps.
    """

    RANGE = (0.0, 1.0)
    type: Literal["code"] = "code"
    """Kind of reward."""
    tests: str | None = None
    """Column with the tests. None: the gold answer."""
    entry_point: str = "entry_point"
    """Column with the name of the function that the tests call; rows without it have none, and names that only the
    program can define are looked for."""
    setup: str = "test_setup_code"
    """Column with Python that runs before the assertions; rows without it have none."""
    given: str | None = None
    """Column with Python that stands before the program, HumanEval's `prompt`: its imports and helpers are there for the
    program and, out of its reach, for the tests. A response without the entry point continues it."""
    solution: str | None = None
    """Column with a program that is right, MBPP's `code` or HumanEval's `canonical_solution`. Only `gspo check` runs it,
    and says that gold answers are unproven where it is unset: tests alone are no answer."""
    fence: Literal["optional", "required"] = "optional"
    """Whether a response without a fenced block is a program as a whole, or scores 0. Optional: base models write none."""
    compare: Literal["tokens", "lines", "exact"] = "tokens"
    """When outputs are equal: same words whatever the white space, same lines up to white space at their ends, or same
    bytes. Tokens: what most judges of contests do."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Error, absolute or relative, of words that the expected output writes with a point or exponent, by `tokens`.
    1e-6: what contests ask for."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "landlock", "filter", "limits"] = "auto"
    """The walls. Auto: the first of bubblewrap, namespaces and landlock that stands here, or no training. `filter` lets
    programs read this machine's files; `limits` lets them do anything but hang, so only where nothing is of worth."""
    cpu_s: int = Field(default=10, gt=0)
    """Seconds of computing, of each program and pair. 10: reference solutions of HumanEval and MBPP need less than 3."""
    wall_s: float = Field(default=20.0, gt=0)
    """Seconds by the clock. Twice cpu_s, since others use the machine too."""
    memory_mib: int = Field(default=1024, ge=64)
    """Address space. 1024: room for a thread with a stack of 512 MiB, a habit of contest programs."""
    output_kib: int = Field(default=1024, gt=0)
    """Most that a program may write to its standard output or error. 1024: expected outputs of contests stay below."""
    workers: int | None = Field(default=None, gt=0)
    """Programs that run beside each other. None: as many as this process has CPU cores."""


class EnvironmentReward(RewardConfig):
    """The sum of what the environment gave to the turns of an episode; turns that it did not score count as 0."""

    type: Literal["environment"] = "environment"
    """Kind of reward."""


class FunctionReward(RewardConfig):
    """Your own function: takes a list of samples, returns a number, a Score or None (abstain) for each."""

    type: Literal["function"] = "function"
    """Kind of reward."""
    function: str
    """`path/to/file.py:name`, sync or async."""
    parameters: dict[str, Any] = {}
    """Keyword arguments passed to it after the samples."""
    gold_response: str | None = None
    """`path/to/file.py:name` of a function `(answer, columns) -> text` that writes a row's gold answer as a response that
    deserves a 1. Only `gspo check` uses it, and says that gold answers are unproven where it is unset."""


class ModelReward(RewardConfig):
    """What a sequence-classification model of transformers, a reward model say, gives to prompt and response as one chat.

    It is loaded at the start, once in each process, from safetensors files. What its chat template leaves out of a
    response it does not see. A response that spells out a special token of its tokenizer is left out (an abstention).
    """

    type: Literal["model"] = "model"
    """Kind of reward."""
    path: str
    """Folder or hub name of the model with its tokenizer."""
    revision: str | None = None
    """Commit or tag on the hub. None takes the newest, which may change under you."""
    column: int | str | None = None
    """Which output is the reward, by number from 0 or by its label. None: the only one; with several it must be named."""
    output: Literal["logit", "sigmoid", "softmax"] = "logit"
    """`logit`: (logit - mean) / deviation. `sigmoid` of that, between 0 and 1; `softmax` of it over all columns. `logit`
    is what reward models are trained to compare responses by, and advantages do not feel its offset."""
    mean: float = 0.0
    """Taken off every logit. 0: logits as they are."""
    deviation: float = Field(default=1.0, gt=0)
    """Every logit is divided by it after that. 1: logits as they are."""
    template: Literal["chat", "pair", "text"] = "chat"
    """How the model reads. `chat`: messages in its own chat template, refused if it has none. `pair`: prompt and response
    as the two texts of its tokenizer. `text`: prompt, an empty line, response. `chat` is what most are made for."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest input, prompt and response in the model's own tokens. None: as many as the model takes."""
    too_long: Literal["refuse", "abstain"] = "refuse"
    """What a longer input does: stop with the sample's name, or leave the sample out. It is never cut. Refuse, so that
    training does not turn to short responses unseen."""
    batch_tokens: int = Field(default=16384, gt=0)
    """Tokens of one forward pass, rows x longest row, padding counted; a longer row is a batch of its own. 16384: a
    gigabyte or two of activations for a model of 8 billion weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights. float32: bfloat16 has three digits, too few to tell good responses of a group apart; use
    it where memory asks for it."""
    device: str = "auto"
    """`auto` (the GPU where there is one), `cpu`, `cuda`, or one GPU by number, `cuda:1`; it stays there."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: code from strangers is run only when asked for."""

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
            raise ValueError(f'{device!r} is no device: use "auto", "cpu", "cuda" or "cuda:1"')
        return device

    @model_validator(mode="after")
    def _mean_counts(self) -> Self:
        if self.output == "softmax" and self.mean != 0:
            raise ValueError('mean changes nothing with output = "softmax": leave it out')
        return self


class JudgeReward(RewardConfig):
    """The score that a language model behind an OpenAI-compatible endpoint gives by a rubric: 0 for its lowest, 1 for its
    highest, in proportion between. Where no usable verdict comes it abstains with the reason.
    """

    RANGE = (0.0, 1.0)
    type: Literal["judge"] = "judge"
    """Kind of reward."""
    url: str
    """Base address, `http://localhost:8000/v1`; requests go to `/chat/completions` below it."""
    model: str
    """Name of the model there."""
    bearer_variable: str | None = None
    """Name of the environment variable that holds the server's key, e.g. `JUDGE_KEY`, sent as the bearer; the key itself
    is written nowhere. None: no key is sent, as local servers need none."""
    rubric: str | None = None
    """What to judge and how. `{{response}}` is where the response goes, and must be there; `{{prompt}}` and `{{gold}}` may
    be. One of `rubric` and `rubric_file` is needed."""
    rubric_file: str | None = None
    """A file with the rubric instead; relative to the current folder."""
    lowest: float = 0.0
    """Lowest score of the verdict; worth 0."""
    highest: float = 10.0
    """Highest score of the verdict; worth 1. 10: models grade more evenly in whole numbers than in fractions."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the server is asked for JSON: by a schema, as any object, or only in words. What comes back is read strictly in
    all three. A schema, because then nothing else can come; a server that does not know it says so at the first request."""
    parameters: dict[str, Any] = {"temperature": 0, "max_tokens": 1024}
    """Sent with each request as they stand. Temperature 0: the same response gets the same verdict as far as the server
    can; 1024 tokens hold the sentence before the score."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one attempt, from connecting to the last byte. A minute: queues of a busy server."""
    attempts: int = Field(default=5, gt=0)
    """Attempts in all, where the server is busy (429), fails (5xx), is too slow or cannot be reached."""
    first_wait_s: float = Field(default=1.0, ge=0)
    """Seconds before the second attempt; doubled before each further one, times a random number from 0.5 to 1. What the
    server's Retry-After asks for is waited at least."""
    longest_wait_s: float = Field(default=60.0, gt=0)
    """Longest wait; a server that asks for more gets no further attempt. A minute: a step should not sleep longer."""
    concurrency: int = Field(default=16, gt=0)
    """Requests at a time, in each process. 16 keeps a small server busy."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            fits, parts = False, urlsplit("")
        if parts.username or parts.password or parts.query or parts.fragment:  # not shown: a secret may stand there
            raise ValueError("url must be a plain address, without a user, ? or #; a key goes by bearer_variable")
        if not fits:
            raise ValueError("url must be an address such as http://localhost:8000/v1")
        return url.rstrip("/")

    @field_validator("bearer_variable")
    @classmethod
    def _is_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):  # not shown: it may be the key itself
            raise ValueError("must be the name of an environment variable, in capitals; never the key itself")
        return name

    @field_validator("parameters")
    @classmethod
    def _ours_stay(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted({"model", "messages", "response_format", "stream", "n", "tools"} & parameters.keys()):
            raise ValueError(f"{', '.join(ours)} cannot be set here: the judge sends its own")
        return parameters

    @model_validator(mode="after")
    def _one_rubric(self) -> Self:
        if (self.rubric is None) == (self.rubric_file is None):
            raise ValueError("set exactly one of rubric (text) and rubric_file (a path)")
        if self.highest <= self.lowest:
            raise ValueError(f"highest ({self.highest:g}) must be larger than lowest ({self.lowest:g})")
        return self


Reward = Annotated[
    ExactReward
    | NumericReward
    | LastNumberReward
    | MathReward
    | FormatReward
    | ReasoningGymReward
    | VerifiersReward
    | LengthPenalty
    | CodeReward
    | ModelReward
    | JudgeReward
    | EnvironmentReward
    | FunctionReward,
    Field(discriminator="type"),
]


def reward_name(reward: RewardConfig) -> str:
    """The name of a reward in records: its own, or the function's, or the type."""
    if reward.name:
        return reward.name
    return reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type  # type: ignore[attr-defined]
