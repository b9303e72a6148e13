"""The figures of a report: what each is drawn from, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .drawing import (
    BY_LENGTH,
    Draw,
    Run,
    deviation_by_length,
    differing,
    largest,
    lines,
    log_lines,
    mismatch_by_length,
    quantiles,
    rewards,
    seconds,
)
from .pictures import by_layer, engine_by_trainer, gap_by_trainer, histogram, ratio_by_length
from .svg import figure_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    """Its own heading, or "" where the figure's will do."""
    needs: tuple[str, ...]
    """Keys of the table that it is drawn from; those that a run lacks are left out, and named below the figure."""
    draw: Draw
    """What is drawn."""
    by: Literal["step", "length", "log-ratio", "log-probability"] = "step"
    """What the x axis is: steps, or something that the drawing itself sets."""


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """One figure: panels side by side, under a title and over a caption."""

    name: str
    """Its anchor in the page."""
    title: str
    """Heading."""
    caption: str
    """How it is read, in one or two sentences."""
    panels: tuple[Panel, ...]
    """What is drawn."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure, ready for the page."""

    name: str
    """Its anchor."""
    title: str
    """Heading."""
    caption: str
    """How it is read."""
    panels: tuple[tuple[str, str], ...]
    """(heading, SVG element) of each panel that could be drawn."""
    missing: tuple[str, ...]
    """Keys of the table that the run holds no value for."""


def draw_figures(specs: Sequence[FigureSpec], run: Run) -> list[Drawn]:
    """Each figure with the panels that the run has metrics for."""
    return [_drawn(spec, run) for spec in specs]


def _drawn(spec: FigureSpec, run: Run) -> Drawn:
    panels = []
    for number, panel in enumerate(spec.panels):
        if keys := run.keys(panel.needs):
            alt = f"{spec.title}{': ' if panel.title else ''}{panel.title}, by {panel.by}"
            svg = figure_svg(f"{spec.name}-{number}", alt, _on_axes(panel, run, keys), beside=len(spec.panels))
            panels.append((panel.title, svg))
    missing = tuple(need for panel in spec.panels for need in panel.needs if not run.keys([need]))
    return Drawn(spec.name, spec.title, spec.caption, tuple(panels), missing)


def _on_axes(panel: Panel, run: Run, keys: Sequence[str]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        panel.draw(axes, run, keys)
        if panel.by != "step":
            return
        steps = [row["step"] for row in run.rows]
        axes.set_xlim(min(steps), max(max(steps), min(steps) + 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))

    return draw


def _panel(draw: Callable[..., Draw], labels: dict[str, str], title: str = "", **settings: object) -> Panel:
    return Panel(title, tuple(labels), draw(labels, **settings))


_CLIPPED = {"clip/sequence": "sequences", "clip/token": "tokens", "clip/outside_band": "ratios outside the band"}
_COMPARED = ("samples: tokens/engine_gap",)
_STAGES = {
    "time/collect_s": "collect",
    "time/score_s": "score",
    "time/pack_s": "pack",
    "time/update_s": "update",
    "time/sync_s": "sync",
    "time/evaluate_s": "evaluate",
    "time/save_s": "save",
}

TRAINING: tuple[tuple[str, tuple[FigureSpec, ...]], ...] = (
    (
        "Is it learning?",
        (
            FigureSpec(
                "reward",
                "Reward and evaluation",
                "Training reward as a line; evaluation scores as points with their 95% confidence intervals.",
                (Panel("", ("reward/mean", "evaluation/pass@<k>"), rewards),),
            ),
            FigureSpec(
                "solved",
                "Solved responses, groups without signal",
                "A group whose rewards are all equal teaches nothing: near 100% there is nothing left to learn from.",
                (
                    _panel(
                        lines,
                        {"reward/solved": "responses solved", "reward/groups_without_signal": "groups without signal"},
                        percent=True,
                    ),
                ),
            ),
        ),
    ),
    (
        "What does it write?",
        (
            FigureSpec(
                "length",
                "Response length",
                "Tokens, the end-of-sequence token included; a share that hits the limit is cut off in mid-thought.",
                (
                    _panel(
                        lines,
                        {"rollout/response_tokens_mean": "mean", "rollout/response_tokens_max": "longest"},
                        "Tokens",
                    ),
                    _panel(lines, {"rollout/truncated": "responses that hit the limit"}, "Truncated", percent=True),
                ),
            ),
            FigureSpec(
                "entropy",
                "Entropy",
                "Nats a trained token. In a steep fall the policy stops exploring; in a steep rise it falls apart.",
                (_panel(lines, {"policy/entropy": "entropy"}),),
            ),
            FigureSpec(
                "largest",
                "Largest change of one token",
                "Averaging over a response can hide a large change of one token: the two are shown side by side.",
                (Panel("", ("ratio/largest_log_ratio", "ratio/sequence_at_largest"), largest),),
            ),
        ),
    ),
    (
        "How far does each update go?",
        (
            FigureSpec(
                "ratios",
                "Ratios of new to old policy",
                "Log-ratios on one signed-log scale (linear within ±10⁻⁴), so that both panels can be compared by eye.",
                (
                    Panel("Sequences: log s", ("ratio/sequence_quantiles",), quantiles),
                    Panel("Tokens: d", ("ratio/token_quantiles",), quantiles),
                ),
            ),
            FigureSpec(
                "update",
                "Loss, gradient and learning rate",
                "Means over minibatches. The loss is near zero by construction and says little about progress; the norm of "
                "the gradient is taken before it is scaled down.",
                (
                    _panel(lines, {"objective/loss": "loss"}, "Loss", bottom=None),
                    _panel(log_lines, {"update/grad_norm": "gradient norm"}, "Gradient norm"),
                    _panel(lines, {"update/learning_rate": "learning rate"}, "Learning rate", exact=True),
                ),
            ),
            FigureSpec(
                "histograms",
                "Histograms of the ratios",
                "How often a log-ratio of each size occurs, on the same signed-log axis left and right. gspo clips s and "
                "grpo single tokens, at the edges of the band. Most of what stands at 0 is the first minibatch, on-policy.",
                (
                    Panel("Sequences: log s", ("ratio/sequence_histogram",), histogram, "log-ratio"),
                    Panel("Tokens: d", ("ratio/token_histogram",), histogram, "log-ratio"),
                ),
            ),
            FigureSpec(
                "ratio-length",
                "s against response length",
                "s - 1 of single responses by their number of tokens: at most 1,000, evenly spread over the steps that "
                "this page holds. Those of one length stand side by side. Noise averages out with length, drift does not.",
                (Panel("", ("samples: ratio",), ratio_by_length, "length"),),
            ),
            FigureSpec(
                "clipped",
                "Clipped shares",
                "Clipped: the gradient is zero. Outside the band is another, larger share. Steps with a share of exactly 0 "
                "are dashes below the log scale.",
                (_panel(log_lines, _CLIPPED, percent=True),),
            ),
        ),
    ),
    (
        "Do engine and trainer agree?",
        (
            FigureSpec(
                "mismatch",
                "Engine against trainer, same weights",
                "What numerics alone do to log-probabilities. Zeros are dashes below the log scale. Decisions are of "
                "sequences or tokens, as the objective clips; a share near that of clipped ones means that noise decides.",
                (
                    _panel(log_lines, {"mismatch/k3": "k3", "mismatch/k1": "|k1|"}, "KL estimates, nats a token"),
                    _panel(log_lines, {"mismatch/largest_log_ratio": "largest |d|"}, "Largest difference, nats"),
                    Panel("Clip decisions that would differ", ("mismatch/decisions",), differing),
                ),
            ),
            FigureSpec(
                "mismatch-length",
                "What the mismatch does to s, by response length",
                "s of engine against trainer with the same weights, over all steps. Bars that leave the "
                "clip band mean that numerics, not the update, would decide what is clipped. A mean that stays off 0 is a "
                "bias, which length does not average away. For grpo and dapo the band is one of token ratios.",
                (
                    Panel("Mean of s - 1 and deviation", BY_LENGTH, mismatch_by_length, "length"),
                    Panel("Deviation, log scale", BY_LENGTH, deviation_by_length, "length"),
                ),
            ),
            FigureSpec(
                "engine-trainer",
                "Engine against trainer, token by token",
                "Log-probabilities of recorded tokens with the same weights, at most 1,000. On the dashed line both agree; "
                "what is too small to see on the left is the height of a point on the right.",
                (
                    Panel(
                        "Engine (up) by trainer (right)",
                        ("samples: tokens/engine_gap",),
                        engine_by_trainer,
                        "log-probability",
                    ),
                    Panel("Engine less trainer", ("samples: tokens/engine_gap",), gap_by_trainer, "log-probability"),
                ),
            ),
        ),
    ),
    (
        "Where does the time go?",
        (
            FigureSpec(
                "seconds",
                "Seconds of each stage",
                "Stacked. The scale fits 98 steps in 100; rarer peaks leave the picture at the top.",
                (_panel(seconds, _STAGES),),
            ),
            FigureSpec(
                "speed",
                "Tokens a second",
                "Response tokens sampled, a second of collecting.",
                (_panel(lines, {"rollout/tokens_per_s": "tokens/s"}),),
            ),
            FigureSpec(
                "utilisation",
                "Model FLOP utilisation",
                "Arithmetic that the model needs, as a share of what the device can do, over the whole step.",
                (_panel(lines, {"system/model_flops_utilisation": "utilisation"}, percent=True),),
            ),
            FigureSpec(
                "memory",
                "Peak memory",
                "Most memory in use so far, GiB.",
                (_panel(lines, {"system/peak_memory_gib": "GiB"}, exact=True),),
            ),
        ),
    ),
)
"""The sections of a report with their figures."""

REFERENCE = FigureSpec(
    "reference",
    "KL to the reference policy",
    "Estimated, nats a trained token.",
    (_panel(lines, {"kl/reference": "KL"}, bottom=None),),
)
"""Drawn only where there is a reference policy."""

FLIPS = FigureSpec(
    "flips",
    "Expert flips by layer over time",
    "The share of a token's choices of experts that differ. By layer, the first at the top, and by step; the stronger the "
    "colour, the more. Before and after the update: what routers choose of themselves, whatever was replayed.",
    (
        Panel("Old against new policy, in the last minibatch", ("moe/flips_by_layer",), by_layer(percent=True)),
        Panel("Before against after the whole update", ("moe/flips_after_by_layer",), by_layer(percent=True)),
        Panel("Engine against trainer", ("moe/engine_flips_by_layer",), by_layer(percent=True)),
    ),
)
LOAD = FigureSpec(
    "load",
    "Load of experts by layer over time",
    "The share of the busiest expert over the mean share; 1 is even.",
    (Panel("Busiest over mean", ("moe/load_by_layer",), by_layer(percent=False)),),
)
MIXTURE = (FLIPS, LOAD)
"""Drawn only of mixtures of experts."""

COLD_START = FigureSpec(
    "cold-start",
    "Cold start",
    "Supervised fine-tuning before reinforcement learning: nats a response token.",
    (_panel(lines, {"cold_start/loss": "loss"}),),
)
"""Drawn from cold_start/metrics.jsonl."""
