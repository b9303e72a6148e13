"""A run that never ran: every metric and sample a report reads, with plausible shapes, from a seed."""

import json
import math
from pathlib import Path

import numpy as np

from gspo.reporting.names import HISTOGRAM, LENGTHS, QUANTILES
from gspo.reporting.records import RunRecords
from gspo.reporting.tokens import Trace, token_record

NASTY = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "\u202ereversed\u202c \u2066isolate\u2069 \x1b[31mred\x1b[0m \x00 \x07 \x9b31m",
    "]]> &amp; &lt;b&gt; {{ 7*7 }} {% raw %} ${alert(1)} ` \\u003c",
    "line\u2028separator\u2029 and a lone surrogate \ud800",
    "مرحبا 你好 שלום 🙂",
)


def quantiles(rng, centre, spread):
    """Ascending log-ratios at QUANTILES, exponentiated."""
    inner = [-3.2, -2.33, -1.64, -0.67, 0.0, 0.67, 1.64, 2.33, 3.2]
    return np.exp(np.array(inner) * spread * rng.uniform(0.9, 1.1) + centre).tolist()


def step_row(step, steps, rng):
    """All keys of one training step."""
    done = step / steps
    reward = 0.3 + 0.5 * (1 - math.exp(-4 * done)) + rng.normal(0, 0.03)
    spread = 2.5e-4 * (1 + 0.6 * done)
    clipped = float(np.clip(0.12 + 0.05 * rng.normal(), 0, 1)) if step > 1 else 0.0
    by_minibatch = [0.0, clipped * 0.7, clipped, clipped * 1.4]
    tokens = quantiles(rng, 0.0, 0.06 + 0.05 * done)
    collect, update = 0.2 + rng.gamma(4, 0.01), 0.15 + rng.gamma(4, 0.005)
    save = 0.3 if step % 20 == 0 else 0.0
    held = [5 <= i <= 9 for i in range(len(LENGTHS) + 1)]  # responses of 17 to 512 tokens
    counts = rng.multinomial(256, np.full(len(HISTOGRAM) + 1, 1 / (len(HISTOGRAM) + 1))).tolist()
    return {
        "step": step,
        "time": 1.8e9 + step,
        "reward/mean": reward,
        "reward/std": 0.4,
        "reward/solved": max(reward - 0.02, 0.0),
        "reward/groups_without_signal": float(np.clip(0.2 + 0.4 * done + rng.normal(0, 0.04), 0, 1)),
        "reward/abstained": 0,
        "reward/part/exact": reward,
        "rollout/responses": 256,
        "rollout/response_tokens_mean": 40 + 60 * done + rng.normal(0, 3),
        "rollout/response_tokens_max": int(120 + 70 * done + rng.integers(0, 10)),
        "rollout/truncated": max(0.0, 0.04 * done + rng.normal(0, 0.006)),
        "rollout/tokens_per_s": 11000 + rng.normal(0, 500),
        "policy/entropy": 0.9 * math.exp(-2 * done) + 0.1 + rng.normal(0, 0.01),
        "objective/loss": rng.normal(0, 0.002),
        "ratio/sequence_mean": 1 + rng.normal(0, 2e-5),
        "ratio/sequence_std": spread,
        "ratio/sequence_quantiles": quantiles(rng, rng.normal(0, 1e-5), spread),
        "ratio/sequence_histogram": counts,
        "ratio/token_mean": 1.002,
        "ratio/token_std": 0.08,
        "ratio/token_quantiles": tokens,
        "ratio/token_histogram": counts,
        "ratio/largest_log_ratio": abs(math.log(tokens[-1])) * 1.1,
        "ratio/sequence_at_largest": 1 + rng.normal(0, 8e-4),
        "clip/sequence": clipped,
        "clip/token": clipped * 0.8,
        "clip/positive": clipped * 0.7,
        "clip/negative": clipped * 0.9,
        "clip/outside_band": min(clipped * 1.9, 1.0),
        "clip/sequence_by_minibatch": by_minibatch,
        "clip/token_by_minibatch": by_minibatch,
        "clip/outside_band_by_minibatch": by_minibatch,
        "update/grad_norm": float(rng.lognormal(-0.5, 0.3)),
        "update/grad_norm_by_minibatch": rng.lognormal(-0.5, 0.3, 4).tolist(),
        "update/learning_rate": 1e-4 * min(1.0, step / 20),
        "update/updates": 4 * step,
        "update/skipped": 0,
        "update/trained_tokens": 9000,
        "update/samples_without_signal": 60,
        "update/micro_batches": 4,
        "mismatch/k1": rng.normal(0, 1e-8),
        "mismatch/k3": abs(rng.normal(3e-12, 1e-12)),
        "mismatch/largest_log_ratio": abs(rng.normal(5e-6, 1e-6)),
        "mismatch/sequence_mean": 1.0,
        "mismatch/sequence_std": 1e-7,
        "mismatch/sequence_mean_by_length": [1 + rng.normal(0, 2e-5) if on else None for on in held],
        "mismatch/sequence_std_by_length": [2e-3 / 2 ** (i / 2) if on and i < 9 else None for i, on in enumerate(held)],
        "mismatch/sequences_by_length": [(1 if i == 9 else 15) * on for i, on in enumerate(held)],
        "mismatch/decisions_differ": int(rng.poisson(0.2)),
        "mismatch/decisions": 61,
        "mismatch/size": 1e-7,
        "mismatch/threshold": 3e-5,
        "mismatch/recomputed": 0,
        "update/looked_ahead": 0,
        "time/collect_s": collect,
        "time/score_s": 0.01,
        "time/pack_s": 0.004,
        "time/update_s": update,
        "time/sync_s": 0.002,
        "time/evaluate_s": 0.0,
        "time/save_s": save,
        "time/step_s": collect + update + save + 0.016,
        "system/model_flops_per_s": 4e10,
        "system/model_flops_utilisation": 0.31 + rng.normal(0, 0.01),
        "system/ranks": 1,
        "system/peak_memory_gib": 1.2 + 0.1 * done,
    }


def evaluation(done, rng):
    """Keys that only rows with an evaluation hold."""
    score = 0.33 + 0.45 * (1 - math.exp(-4 * done)) + rng.normal(0, 0.01)
    out = {"evaluation/reward": score, "evaluation/response_tokens_mean": 50.0}
    out |= {"evaluation/reward_low": score - 0.03, "evaluation/reward_high": score + 0.03}
    out |= {"evaluation/truncated": 0.01, "evaluation/abstained": 0}
    for k, value in ((1, score), (4, min(score + 0.15, 0.97))):
        out |= {f"evaluation/pass@{k}": value, f"evaluation/pass@{k}_low": value - 0.03}
        out |= {f"evaluation/pass@{k}_high": value + 0.03}
    return out


def tokens_of(text, rng, minibatch):
    """A `tokens` table of a text cut into pieces of three characters; of long texts both ends, as a run writes it."""
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    num = len(pieces)
    d, engine = rng.normal(0, 0.05, num) * (minibatch > 1), -rng.exponential(0.4, num)
    gap = rng.normal(0, 2e-6, num) if minibatch == 1 else None
    trainer = engine + d - (0 if gap is None else gap)
    arrays = (x.astype(np.float32) if x is not None else None for x in (d, trainer, engine, gap, np.full(num, 0.7)))
    return token_record(Trace(minibatch, ("chosen by hand",), *arrays), range(num), pieces)


def samples_of(step, rng, num=64):
    """Samples, some of them with texts that would like to be more than text."""
    out = []
    for i in range(num):
        a, b = (int(x) for x in rng.integers(10, 99, 2))
        right = bool(rng.random() < 0.6)
        nasty = NASTY[(step + i) % len(NASTY)] if i % 5 == 0 else ""
        long = 40 if i == 15 else 1
        response = f"{a} + {b}: first the tens, then the ones, so the sum is {a + b + (not right)}. {nasty}"
        out.append(
            {
                "id": f"s{step}/e0-r{i // 8}/{i % 8}",
                "step": step,
                "prompt": f"What is {a} + {b}?",
                "response": response * long,
                "answer": str(a + b),
                "reward": None if i == 3 else float(right),
                "parts": {"last_number": {"value": None if i == 3 else float(right), "why": f"{a + b} {nasty}"}},
                "advantage": None if i == 3 else (0.7 if right else -1.1),
                "num_tokens": len(response),
                "finish_reason": "stop" if i % 9 else "length",
                "seed": int(rng.integers(2**31)),
                "weight_version": 4 * (step - 1),
                "ratio": None if i == 3 else float(1 + rng.normal(0, 3e-4)),
                "clipped": None if i == 3 else bool(rng.random() < 0.15),
                **({"tokens": tokens_of(response * long, rng, 1 + i % 4)} if i in (0, 5, 14, 15) else {}),
            }
        )
    return out


CONFIG = {
    "name": "synthetic",
    "objective": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "training": {"steps": 500, "learning_rate": 1e-4},
    "data": {"template": "<b>{a}</b> </pre><script>document.title='owned'</script>"},
}


def routing(layers: int, rng: np.random.Generator) -> dict[str, object]:
    """What a step of a mixture of that many layers adds to a row."""
    deeper = np.arange(layers) / layers
    by_layer, engine = (scale * (0.2 + deeper * rng.uniform(0.5, 1, layers)) for scale in (0.1, 0.02))
    after = np.array([0.6, 0.8, 1.0, 1.2])
    return {
        "moe/flips_by_minibatch": [0.0, *(float(by_layer.mean()) * np.array([0.6, 0.8, 1.0])).tolist()],
        "moe/flips_by_layer": by_layer.tolist(),
        "moe/tokens_flipped": rng.uniform(0.3, 0.6),
        "moe/flips_after_by_minibatch": (float(by_layer.mean()) * after).tolist(),
        "moe/flips_after_by_minibatch_and_layer": np.outer(after, by_layer).tolist(),
        "moe/tokens_flipped_after_by_minibatch": (0.5 * after).tolist(),
        "moe/flips_after_by_layer": (1.2 * by_layer).tolist(),
        "moe/tokens_flipped_after": rng.uniform(0.4, 0.7),
        "moe/engine_flips": float(engine.mean()),
        "moe/engine_flips_by_layer": engine.tolist(),
        "moe/load_by_layer": rng.uniform(1.1, 2.5, layers).tolist(),
        "moe/dead_experts_by_layer": rng.integers(0, 3, layers).tolist(),
        "moe/auxiliary_loss": rng.uniform(1.0, 1.1),
        "moe/replay_bytes": 400 * layers * 8,
        "moe/replay_s": rng.uniform(0.005, 0.01),
    }


def write_run(
    folder: Path, steps: int = 500, *, drop: tuple[str, ...] = (), samples_every: int = 5, seed: int = 0, layers: int = 0
) -> Path:
    """Write a whole run folder; keys that start with one of `drop` are left out. layers: with experts."""
    rng = np.random.default_rng(seed)
    records = RunRecords(folder)
    rows = [{"step": 0, "time": 1.8e9} | evaluation(0, rng)]
    rows += [step_row(s, steps, rng) | (evaluation(s / steps, rng) if s % 50 == 0 else {}) for s in range(1, steps + 1)]
    if layers:
        rows[1:] = [row | routing(layers, rng) for row in rows[1:]]
    for row in rows:
        records.append({key: value for key, value in row.items() if not key.startswith(drop or ("\0",))})
    for step in range(1, steps + 1, samples_every):
        records.write_samples(step, samples_of(step, rng))
    cold = RunRecords(folder / "cold_start")
    for s in range(1, 121):
        loss = 2.5 * math.exp(-s / 30) + 0.4 + rng.normal(0, 0.03)
        cold.append({"step": s, "time": 1.8e9 + s, "cold_start/loss": loss, "time/step_s": 0.1})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "versions.json").write_text(json.dumps({"gspo": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}))
    return folder


assert len(QUANTILES) == 9
