"""The embedded engine's laws: what a sample draws, from which distribution, and what its neighbours cannot change."""

import itertools

import numpy as np
import pytest
import torch
from conftest import ALPHABET, tiny_policy

from gspo.config import ModelConfig, SamplingConfig
from gspo.rollout import transformers as engine_module
from gspo.rollout.engine import EngineError, Request, sample_seed
from gspo.rollout.sampling import draw, uniform
from gspo.rollout.transformers import TransformersEngine
from gspo.training.policy import load_policy

LIMIT = 20
NUM_IDS = len(ALPHABET) + 2


def requests(num=12, num_prompts=5):
    """Requests of prompts of different lengths, several to a prompt."""
    rng = np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(2, NUM_IDS, 2 + 3 * p))) for p in range(num_prompts)]
    return [Request(f"s1/p{i % num_prompts}/{i}", prompts[i % num_prompts], sample_seed(0, 1, "p", i)) for i in range(num)]


def generate(policy, some, max_rows=64, progress=lambda n: None, **sampling):
    config = SamplingConfig(**{"max_response_tokens": LIMIT, "temperature": policy.temperature} | sampling)
    return TransformersEngine(policy, max_rows=max_rows).generate(some, config, progress)


def plain_logits(policy, request, completion):
    """Logits [response, V] of the model's own forward pass on prompt and response, alone."""
    ids = torch.tensor([*request.prompt, *map(int, completion.token_ids)])
    with torch.no_grad():
        return policy.model(input_ids=ids[None], use_cache=False).logits[0, len(request.prompt) - 1 : -1]


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert (a.seed, a.finish_reason) == (b.seed, b.finish_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_rows", [3, 64])
def test_logprobs_are_the_plain_forward_pass_at_the_temperature(temperature, max_rows):
    policy, some = tiny_policy(temperature=temperature), requests()
    for request, completion in zip(some, generate(policy, some, max_rows), strict=True):
        logp = (plain_logits(policy, request, completion) / temperature).log_softmax(-1)
        wanted = logp.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5)


def test_a_sample_is_the_same_alone_and_among_others():
    policy, some = tiny_policy(), requests()
    together = generate(policy, some)
    assert len({len(c.token_ids) for c in together}) > 3  # rows end at different times
    assert_same([generate(policy, [r])[0] for r in some], together)


@pytest.mark.parametrize("max_rows", [1, 3, 5])
def test_refilling_finished_rows_changes_nothing(max_rows):
    policy, some = tiny_policy(), requests()
    assert_same(generate(policy, some, max_rows), generate(policy, some))


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_when_rows_are_squeezed_out_changes_nothing(monkeypatch, share):
    policy, some = tiny_policy(), requests()
    wanted = generate(policy, some, 5)
    monkeypatch.setattr(engine_module, "REFILL_SHARE", share)
    assert_same(generate(policy, some, 5), wanted)


def test_the_order_of_requests_changes_nothing():
    policy, some = tiny_policy(), requests()
    order = np.random.default_rng(1).permutation(len(some))
    wanted = generate(policy, some, 4)
    assert_same(generate(policy, [some[i] for i in order], 4), [wanted[i] for i in order])


def test_samples_of_one_prompt_differ_by_their_seeds():
    policy, prompt = tiny_policy(), (3, 4, 5)
    some = [Request(f"s{i}", prompt, seed) for i, seed in enumerate([1, 2, 3, 2])]
    texts = [tuple(c.token_ids) for c in generate(policy, some)]
    assert texts[1] == texts[3]
    assert len(set(texts)) == 3


def test_a_prompt_goes_through_the_model_once_for_all_its_samples():
    policy, some = tiny_policy(), requests(num=20, num_prompts=4)
    shapes = []
    policy.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    generate(policy, some)
    assert sum(rows for rows, length in shapes if length > 1) == 4


def test_any_id_of_the_union_of_ends_stops_and_is_included():
    policy, some = tiny_policy(), requests(40)
    policy.eos_ids = frozenset({1, 7, 9})
    last = set()
    for completion in generate(policy, some):
        ends = np.isin(completion.token_ids, [1, 7, 9])
        assert not ends[:-1].any()
        assert completion.finish_reason == ("stop" if ends[-1] else "length")
        last.add(int(completion.token_ids[-1]))
    assert {1, 7, 9} <= last


def test_without_an_end_a_response_is_as_long_as_the_limit():
    policy = tiny_policy()
    policy.eos_ids = frozenset({10_000})
    for completion in generate(policy, requests(), 5, max_response_tokens=7):
        assert (len(completion.token_ids), completion.finish_reason) == (7, "length")


def test_temperature_zero_is_greedy():
    policy, some = tiny_policy(), requests()
    for request, completion in zip(some, generate(policy, some, temperature=0.0), strict=True):
        assert (plain_logits(policy, request, completion).argmax(-1).numpy() == completion.token_ids).all()
        assert (completion.logprobs == 0).all()


def test_broken_weights_are_an_error_that_names_the_sample():
    policy = tiny_policy()
    with torch.no_grad():  # one token's embedding is broken; only the second prompt holds it
        policy.model.get_input_embeddings().weight[2] = torch.nan
    healthy, sick = Request("s1/healthy/0", (4, 5), 1), Request("s1/sick/0", (4, 2), 2)
    policy.model.lm_head.weight = torch.nn.Parameter(torch.randn_like(policy.head))
    with pytest.raises(EngineError, match=r"sample s1/sick/0: the policy's logits are NaN or infinite"):
        generate(policy, [healthy, sick])
    with pytest.raises(EngineError, match=r"sample s1/sick/0"):
        generate(policy, [healthy, sick], temperature=0.0)
    assert len(generate(policy, [healthy], max_response_tokens=1)) == 1


def test_a_models_generation_settings_change_nothing(tmp_path):
    policy, some = tiny_policy(), requests()
    wanted = generate(policy, some)
    generation = policy.model.generation_config
    generation.do_sample, generation.repetition_penalty, generation.top_k, generation.temperature = True, 1.5, 1, 0.1
    assert_same(generate(policy, some), wanted)
    policy.save(tmp_path)
    assert_same(generate(load_policy(ModelConfig(path=str(tmp_path)), temperature=1.0, seed=0), some), wanted)


def test_progress_counts_every_response_once():
    for max_rows in (3, 64):
        counted = []
        generate(tiny_policy(), requests(), max_rows, counted.append)
        assert sum(counted) == 12


def test_no_requests_no_completions():
    assert generate(tiny_policy(), []) == []


# ---- draw -------------------------------------------------------------------------------------------------


def drawn(logits_V, num, **sampling):
    """num tokens drawn from one distribution by uniform numbers of one fixed seed, with their log-probabilities."""
    config = SamplingConfig(max_response_tokens=1, **sampling)
    u_R = torch.from_numpy(uniform(np.full(num, 42, np.uint64), np.arange(num)))
    tokens, logps = [], []
    for part_R in u_R.split(max(1, 2**24 // len(logits_V))):
        token_R, logp_R = draw(logits_V.expand(len(part_R), -1), config, part_R)
        tokens.append(token_R)
        logps.append(logp_R)
    return torch.cat(tokens), torch.cat(logps)


def wanted_probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution after truncation, token by token, from its definition."""
    p_V = (logits_V.double() / temperature).softmax(-1).numpy()
    order = np.argsort(-p_V)
    kept = order[: top_k or None]
    p_V = np.where(np.isin(np.arange(len(p_V)), kept), p_V, 0)
    p_V /= p_V.sum()
    before, nucleus = 0.0, []
    for i in kept:
        if before < top_p:
            nucleus.append(i)
        before += p_V[i]
    p_V = np.where(np.isin(np.arange(len(p_V)), nucleus), p_V, 0)
    p_V = np.where(p_V >= min_p * p_V.max(), p_V, 0)
    return p_V / p_V.sum()


def chi_square_p(counts, expected):
    """Probability of counts that fit no better, if the expected ones are right (Pearson)."""
    statistic = torch.tensor(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_are_the_probabilities(case):
    logits_V = torch.randn(12, generator=torch.Generator().manual_seed(3))
    p_V, num = wanted_probabilities(logits_V, **case), 40_000
    token_R, logp_R = drawn(logits_V, num, **case)
    counts_V = np.bincount(token_R.numpy(), minlength=12)
    assert (counts_V[p_V == 0] == 0).all()
    assert chi_square_p(counts_V[p_V > 0], num * p_V[p_V > 0]) > 1e-3
    np.testing.assert_allclose(logp_R.exp(), p_V[token_R.numpy()], rtol=1e-5)  # truncated and renormalised


def test_the_tail_of_a_large_vocabulary_keeps_its_share():
    logits_V = torch.zeros(150_000)
    logits_V[0] = np.log(150_000.0)  # half of the probability; the other half in 149,999 tokens of 3.3e-6 each
    token_R, _ = drawn(logits_V, 2_000)
    p_V = wanted_probabilities(logits_V)
    bins = np.r_[0, 1, np.linspace(30_000, 150_000, 5).astype(int)]
    counts = np.histogram(token_R.numpy(), bins)[0]
    shares = np.array([p_V[a:b].sum() for a, b in itertools.pairwise(bins)])
    assert chi_square_p(counts, 2_000 * shares) > 1e-3


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    logits_RV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    token_R, _ = draw(
        logits_RV, SamplingConfig(max_response_tokens=1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    )
    assert token_R.tolist() == [1, 2]


# ---- uniform ----------------------------------------------------------------------------------------------


def test_uniform_looks_uniform_along_a_stream_and_across_seeds():
    along = uniform(np.full(50_000, 7, np.uint64), np.arange(50_000))
    across = uniform(np.arange(50_000, dtype=np.uint64), np.zeros(50_000, np.int64))
    for numbers in (along, across):
        assert ((numbers >= 0) & (numbers < 1)).all()
        largest_gap = np.abs(np.sort(numbers) - (np.arange(50_000) + 0.5) / 50_000).max()
        assert largest_gap < 1.95 / np.sqrt(50_000)  # the Kolmogorov-Smirnov bound at p = 0.001
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(50_000)


@pytest.mark.parametrize("seed", [0, 41, 2**63])
def test_streams_of_neighbouring_seeds_do_not_correlate(seed):
    index = np.arange(50_000)
    a, b = (uniform(np.full(50_000, s, np.uint64), index) for s in (seed, seed + 1))
    for lag in (0, 1, 2):
        assert abs(np.corrcoef(a[: 50_000 - lag], b[lag:])[0, 1]) < 4 / np.sqrt(50_000)


def test_numbers_depend_on_seed_and_index_alone():
    seeds, index = np.array([5, 9, 5], np.uint64), np.array([3, 3, 8])
    together = uniform(seeds, index)
    assert [uniform(seeds[i : i + 1], index[i : i + 1])[0] for i in range(3)] == together.tolist()
