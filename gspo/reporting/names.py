"""The one table of what is measured: every key of metrics.jsonl, what it means, and its unit."""

from __future__ import annotations

import re

QUANTILES: tuple[float, ...] = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""Which quantiles a `_quantiles` list holds, in this order."""

_DECADES = [10 ** (half / 2) for half in range(-12, 3)]
HISTOGRAM: tuple[float, ...] = (*(-edge for edge in reversed(_DECADES)), *_DECADES)
"""Edges of the bins of a `_histogram` list, in nats of log-ratio: two a decade from 1e-6 to 10 on either side of 0.

A list of counts has one entry more than there are edges: entry i counts edge[i-1] < log ratio <= edge[i], the first
and last bins are open, and the middle one holds everything within 1e-6 of no change (numpy's and torch's
`searchsorted` with the left side give the entry)."""

LENGTHS: tuple[int, ...] = tuple(2**power for power in range(17))
"""Edges of the bins of a `_by_length` list, in tokens of a response: the powers of two from 1 to 65,536.

Such a list has one entry more than there are edges: entry i is of the responses with edge[i-1] < length <= edge[i], and
the last of all longer ones. What a bin is too empty for is null."""

METRICS: dict[str, str] = {
    "step": "Rollout batches trained on so far; 0 is the evaluation before training.",
    "time": "When the row was written, seconds since 1970.",
    "reward/mean": "Mean total reward of the scored responses.",
    "reward/std": "Standard deviation of the total reward over the scored responses.",
    "reward/solved": "Share of scored responses with a reward of at least `solved_at`.",
    "reward/groups_without_signal": "Share of groups whose rewards are all equal, so that they teach nothing.",
    "reward/abstained": "Responses left out because a verifier abstained, count.",
    "reward/part/<name>": "Mean of one reward before its weight.",
    "rollout/responses": "Responses sampled, count.",
    "rollout/response_tokens_mean": "Mean length of a response, tokens, the end-of-sequence token included.",
    "rollout/response_tokens_max": "Longest response, tokens.",
    "rollout/truncated": "Share of responses that hit the limit of response tokens.",
    "rollout/tokens_per_s": "Response tokens sampled a second of collecting, those of suspended episodes among them.",
    "partial/continued": "Share of the step's episodes that several policies sampled, one after the other.",
    "partial/age_mean": "Weight versions between first and last token of those, mean; null without any.",
    "partial/age_max": "The most of them; null without any.",
    "partial/stale_tokens": "Tokens trained on that an earlier policy sampled, count; episodes that were finished and "
    "waited for their group hold some too.",
    "partial/staleness": "Root mean square of (ratio - 1), in the objective's unit, from the policies that sampled to that "
    "of this step, over what holds stale tokens, wherever both sides are known; null without any.",
    "partial/suspended": "Episodes that go on in the next step, count.",
    "partial/waiting_groups": "Groups that wait because of them, count.",
    "partial/carried_tokens": "Tokens sampled of these groups so far, count.",
    "environment/turns_mean": "Mean number of responses of an episode.",
    "environment/unfinished": "Share of episodes that a limit of turns or tokens ended, not the environment.",
    "environment/reply_tokens_mean": "Mean number of tokens that the policy read between the responses of an episode.",
    "environment/tool_calls_mean": "Mean number of tool calls of an episode.",
    "environment/tool_errors": "Share of tool calls that were answered with a fault; null without a call.",
    "environment/reward_by_turn": "Mean reward that the environment gave to each turn in order; null where it gave none.",
    "policy/entropy": "Mean entropy of the next-token distribution, nats a trained token; of samples with a signal.",
    "objective/loss": "Loss, the mean over minibatches.",
    "ratio/sequence_mean": "Mean of s, the sequence ratio exp(mean of the token log-ratios).",
    "ratio/sequence_std": "Standard deviation of s.",
    "ratio/sequence_quantiles": "Quantiles of s at QUANTILES.",
    "ratio/sequence_histogram": "Counts of log s in the bins of HISTOGRAM.",
    "ratio/token_mean": "Mean of the token ratios.",
    "ratio/token_std": "Standard deviation of the token ratios.",
    "ratio/token_quantiles": "Quantiles of the token ratios at QUANTILES.",
    "ratio/token_histogram": "Counts of the token log-ratios in the bins of HISTOGRAM.",
    "ratio/largest_log_ratio": "Largest absolute log-ratio of a single token, nats.",
    "ratio/sequence_at_largest": "s of the sequence that holds that token.",
    "clip/sequence": "Share of trained sequences whose clipped branch was taken; for token objectives, at any token.",
    "clip/token": "Share of tokens in the clipped branch, whose gradient is zero.",
    "clip/positive": "Share of clipped tokens among those with a positive advantage.",
    "clip/negative": "Share of clipped tokens among those with a negative advantage.",
    "clip/outside_band": "Share of ratios, in the objective's own unit, outside the clip band, whatever the branch.",
    "clip/sequence_by_minibatch": "clip/sequence of each minibatch in turn.",
    "clip/token_by_minibatch": "clip/token of each minibatch in turn.",
    "clip/outside_band_by_minibatch": "clip/outside_band of each minibatch in turn.",
    "update/grad_norm": "Mean norm of the gradient before it is scaled down, over minibatches.",
    "update/grad_norm_by_minibatch": "Norm of the gradient of each minibatch in turn.",
    "update/learning_rate": "Learning rate of the last update.",
    "update/updates": "Gradient steps taken since the start of the run, count.",
    "update/looked_ahead": "Minibatches that a forward pass looked at first, so that forward and backward were of the "
    "sequences that were not clipped alone, count.",
    "update/loss_scale": "Factor of the loss in the next update, halved by an overflow.",
    "update/skipped": "Gradient steps skipped since the start because the gradient was not finite, count.",
    "update/trained_tokens": "Tokens of samples with a signal, as they were packed, count.",
    "update/samples_without_signal": "Samples with zero advantage that cost no forward or backward, count.",
    "update/micro_batches": "Micro-batches of those samples, count.",
    "kl/reference": "Estimated KL of the policy to the reference, nats a trained token.",
    "mismatch/k1": "Engine against trainer at the old policy: mean of log p(engine) - log p(trainer), nats a token. "
    "Known on the first minibatch, on all where the trainer's were recomputed.",
    "mismatch/k3": "The same by the k3 estimator, exp(-d) - 1 + d for that difference d; never negative.",
    "mismatch/largest_log_ratio": "Largest absolute difference of one token between engine and trainer, nats.",
    "mismatch/sequence_mean": "Mean of s that the mismatch alone makes, before any update.",
    "mismatch/sequence_std": "Standard deviation of that s.",
    "mismatch/sequence_mean_by_length": "mismatch/sequence_mean of the responses in each bin of LENGTHS.",
    "mismatch/sequence_std_by_length": "mismatch/sequence_std of the responses in each bin of LENGTHS.",
    "mismatch/sequences_by_length": "Sequences that the two lists before were measured on, count in each bin of LENGTHS.",
    "mismatch/decisions_differ": "Clip decisions, in the objective's unit, that the other side would change, count.",
    "mismatch/decisions": "Clip decisions that were compared for it, count.",
    "mismatch/size": "Root mean square of (ratio - 1) that the mismatch alone makes, in the objective's unit, on the first "
    "minibatch; null where that had no sample with a signal.",
    "mismatch/threshold": "What mismatch/size is compared with: a tenth of the narrower clip bound. "
    '`rollout.old_logprobs = "auto"` keeps the engine\'s while the size is at most this.',
    "mismatch/recomputed": "1 if later minibatches used the trainer's old log-probabilities, 0 if the engine's.",
    "correction/weight_mean": "Mean of the weights between trainer and engine as they were used, of tokens or sequences.",
    "correction/truncated": "Share of those weights that were capped or masked.",
    "moe/flips_by_minibatch": "Share of (token, layer, slot) choices of experts by the old policy that the policy no "
    "longer makes, in each minibatch in turn, before its update. The old policy's are the trainer's where known, else the "
    "engine's, else null; tokens of samples with a signal, prompts too.",
    "moe/flips_by_layer": "The same in the last minibatch, by layer with experts.",
    "moe/tokens_flipped": "Share of tokens with any flip in any layer, in the last minibatch.",
    "moe/flips_after_by_minibatch": "Share of the choices that routers made of themselves before the first update and no "
    "longer make after that of each minibatch in turn, prompts too, with replay as well as without: in the next minibatch "
    "where the trainer has scored it before, else, and after the last, in a few samples of the first; null if it had none.",
    "moe/flips_after_by_minibatch_and_layer": "The same, for each minibatch a list by layer with experts, to six decimals.",
    "moe/flips_after_by_layer": "The last of these lists.",
    "moe/tokens_flipped_after_by_minibatch": "Share of tokens with any flip in any layer after each update in turn.",
    "moe/tokens_flipped_after": "The same after the last.",
    "moe/engine_flips": "Share of the engine's choices of experts that the trainer's routers do not make of themselves at "
    "the old policy, also where they are replayed; wherever both are known without an extra pass.",
    "moe/engine_flips_by_layer": "The same by layer with experts.",
    "moe/load_by_layer": "Choices of the busiest expert over those of the mean expert, by layer; 1 is even.",
    "moe/dead_experts_by_layer": "Experts that no token chose, count by layer.",
    "moe/auxiliary_loss": "The model's own router loss over all tokens of the update, before its coefficient; with an even "
    "load it is the number of experts a token.",
    "moe/replay_bytes": "Records of chosen experts that the update kept, bytes over all processes.",
    "moe/replay_s": "Host time for keeping those records and giving them to the routers, seconds.",
    "mismatch/probe": "Mean absolute difference of engine and trainer on the probe's tokens at the last load, nats.",
    "time/collect_s": "Sampling responses, seconds.",
    "time/score_s": "Rewards, seconds.",
    "time/pack_s": "Advantages and packing, seconds.",
    "time/update_s": "Forward, backward and optimizer, seconds.",
    "time/sync_s": "Handing the new weights to the engine, seconds.",
    "time/evaluate_s": "Evaluation, seconds.",
    "time/save_s": "Writing the checkpoint after the row before this one, seconds.",
    "time/step_s": "The whole step, seconds.",
    "system/model_flops_per_s": "Arithmetic that the model needs for this step, a second of the whole step; FLOP/s.",
    "system/model_flops_utilisation": "The same as a share of what a large matrix product reaches on this device.",
    "system/ranks": "Processes that shared the step, one GPU each where there are any, count.",
    "system/peak_memory_gib": "Most memory in use so far, GiB.",
    "evaluation/pass@<k>": "Estimated probability that one of k responses is solved, mean over prompts.",
    "evaluation/pass@<k>_low": "Lower end of its 95% confidence interval.",
    "evaluation/pass@<k>_high": "Upper end of its 95% confidence interval.",
    "evaluation/reward": "Mean total reward of the evaluation's responses.",
    "evaluation/reward_low": "Lower end of its 95% confidence interval, a bootstrap over prompts.",
    "evaluation/reward_high": "Upper end of its 95% confidence interval.",
    "evaluation/response_tokens_mean": "Mean length of the evaluation's responses, tokens.",
    "evaluation/truncated": "Share of the evaluation's responses that hit the limit.",
    "evaluation/abstained": "Evaluation responses that a verifier abstained on, count.",
    "cold_start/loss": "Loss of supervised fine-tuning, nats a response token.",
}
"""Key to meaning and unit. `<name>` is a reward's name, `<k>` a number of samples. A value that is undefined in a step
(clip/positive without a positive advantage) is null."""

ONLY_WHEN: dict[str, str] = {
    "update/loss_scale": "parameters are float16",
    "environment/": "the recipe has an environment",
    "partial/": "rollout.max_step_tokens is set",
    "kl/": "there is a reference policy",
    "correction/": "correction is on",
    "moe/": "the model has routers of experts",
    "moe/engine_": "the engine returns its choices of experts (rollout.routed_experts)",
    "moe/auxiliary_loss": "the model's configuration has a coefficient for it",
    "evaluation/": "the step has an evaluation",
    "mismatch/probe": "the engine has weights of its own",
    "cold_start/": "the row is one of cold_start/metrics.jsonl",
}
"""Start of a key to the condition under which rows hold it; all other keys stand in the row of every training step."""


def table_key(key: str) -> str | None:
    """The key of METRICS that a logged key falls under (`evaluation/pass@4`: `evaluation/pass@<k>`), or None."""
    if key in METRICS:
        return key
    pattern = re.sub(r"^(evaluation/pass@)\d+", r"\1<k>", re.sub(r"^(reward/part/).+", r"\1<name>", key))
    return pattern if pattern != key and pattern in METRICS else None
