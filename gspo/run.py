"""A run while it runs: what the loop's stages need, and the place it has reached."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import credit, data
from .config import Config
from .distributed import ALONE, SharedError, World
from .environments import Environment, EpisodeError, open_environment
from .evaluation.evaluate import sample_and_score, summarise
from .folder import Clock, leave_folder, newest_checkpoint, open_folder, open_records
from .objectives import clip_warning, estimate_kl
from .prompts import training_and_evaluation_prompts
from .reporting.records import RunRecords
from .reporting.rollouts import episode_metrics, partial_metrics, reward_metrics, rollout_metrics, sample_lines
from .reporting.terminal import Terminal
from .reporting.trackers import Trackers
from .rewards import Built, RewardError, build, notes, score
from .rollout.collect import Group, begin, go_on, num_tokens, unfinished, whole
from .rollout.engine import Engine, EngineError, sample_seed
from .rollout.engines import open_engine, open_probe, prove
from .rollout.probe import Probe
from .rollout.suspended import restored, saved
from .signals import Interrupted, Signals
from .training import checkpoint, diagnosis
from .training.flops import FlopCounter, peak_flops, peak_memory
from .training.optimizer import Optimizer
from .training.packing import TrainingError
from .training.policy import Policy, load_policy, require_length, shard
from .training.reference import ReferenceScore, open_reference
from .training.routing import require_routing
from .training.traces import token_records
from .training.update import Minibatch, Skips, Updated, chosen_clip, pack_minibatches, update, why_recomputed
from .types import Advantage, Metrics, Prompt, Sample, Scored, Unfinished

Groups = list[list[Scored]]
Advantages = list[list[Advantage]]


@dataclass
class Run:
    """Everything of a run. The loop calls its methods in the order in which they stand here.

    Of several ranks each has one. All call the same methods; each samples, scores and updates its share, all know the whole
    batch, and the first alone writes and speaks.
    """

    config: Config
    folder: Path
    policy: Policy
    optimizer: Optimizer
    engine: Engine
    probe: Probe
    reference: ReferenceScore | None
    environment: Environment
    rewards: Sequence[Built]
    training: list[Prompt]
    evaluation: list[Prompt]
    records: RunRecords
    trackers: Trackers
    terminal: Terminal
    signals: Signals
    world: World = ALONE
    """The ranks of the run."""
    clock: Clock = field(default_factory=Clock)
    step: int = 0
    """Rollout batches trained on."""
    cursor: data.Cursor = field(default_factory=data.Cursor)
    """The next prompt."""
    waiting: list[Group] = field(default_factory=list)
    """Groups that go on in the next step, with all that was sampled of them."""
    sampled_tokens: int = 0
    """Tokens that the last collecting sampled, over all ranks."""
    skips: Skips = field(default_factory=Skips)
    """Updates left out."""
    saved_at: int = 0
    """Step of the newest checkpoint."""
    probed: float | None = None
    """What the probe found at the last load."""
    told: set[tuple[bool, bool]] = field(default_factory=set)
    """Of the reasons to recompute old log-probabilities, those told: stale tokens, and whether a mismatch was measured."""

    def __post_init__(self) -> None:
        self.flops = FlopCounter(self.policy)
        self.peak_flops = peak_flops(self.policy.device, self.policy.dtype)

    @property
    def room(self) -> int:
        """Prompts to begin in this step: groups that wait to go on count as prompts of it."""
        return self.config.rollout.prompts_per_step - len(self.waiting)

    def collect(self, prompts: Sequence[Prompt]) -> tuple[list[list[Sample]], list[Group]]:
        """A group of samples to each prompt: those that are whole, and those that wait to go on in the next step.

        All that waits goes on, beside the new prompts, for rollout.max_step_tokens each; and again as often as it takes
        until there is a whole group for each minibatch. Without that setting all groups are whole.
        """
        size = self.config.rollout.group_size
        groups = [*self.waiting, *begin(prompts, group_size=size, seed=self.config.seed, step=self.step + 1)]
        enough, before = min(self.config.training.minibatches, len(groups)), num_tokens(groups)
        done: list[list[Sample]] = []
        while len(done) < enough:
            groups = self.world.merge(self._go_on(self.world.share(groups)))
            done = whole(groups)
        self.sampled_tokens = num_tokens(groups) - before
        return done, unfinished(groups)

    def _go_on(self, mine: Sequence[Group]) -> list[Group]:
        config, tokenizer, environment = self.config.rollout, self.policy.tokenizer, self.environment
        todo = sum(isinstance(s, Unfinished) for group in mine for s in group)
        with self.terminal.generation(todo) as progress, self._sampling():
            return go_on(self.engine, mine, config, tokenizer, config.max_step_tokens, progress, environment)

    def score(self, groups: list[list[Sample]]) -> Groups:
        """The verdicts of the rewards, all samples of a rank in one call to each; returns the groups of all ranks."""
        mine = self.world.share(groups)
        with self.signals.apart(RewardError):
            scored = iter(score(self.rewards, [s for group in mine for s in group]))
            verdicts = [[next(scored) for _ in group] for group in mine]
        return self.world.merge(verdicts)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Each rank samples apart from the others, with the whole of the weights."""
        scope = nullcontext() if self.engine.copies_weights else self.policy.whole()
        with scope, self.signals.apart(EngineError, EpisodeError, RewardError):
            yield

    def pack(self, groups: Groups) -> tuple[Advantages, list[Minibatch]]:
        """Advantages by group, and the scored samples dealt into packed minibatches."""
        config = self.config
        references = self._references(groups)
        penalty = self._penalties(groups, references)
        advantages = [credit.advantages(group, config.advantage, config.rewards, penalty) for group in groups]
        trajectories = [
            credit.trajectory(s.sample, a, references.get(s.sample.id), self.policy.version)
            for group, of_group in zip(groups, advantages, strict=True)
            for s, a in zip(group, of_group, strict=True)
            if a is not None
        ]
        if not trajectories:
            why = next(part.why for s in groups[0] for part in s.parts.values() if part.value is None)
            raise RewardError(f"the rewards abstained on every sample of step {self.step + 1}, e.g. because {why}")
        seed = sample_seed(config.seed, self.step + 1, "minibatches", 0)
        device = self.policy.device
        return advantages, pack_minibatches(trajectories, config, seed=seed, device=device, world=self.world)

    def _references(self, groups: Groups) -> dict[str, np.ndarray]:
        if self.reference is None:
            return {}
        mine = [credit.trajectory(s.sample) for group in self.world.share(groups) for s in group if s.total is not None]
        return {name: logps for part in self.world.gather(self.reference(mine)) for name, logps in part.items()}

    def _penalties(self, groups: Groups, references: dict[str, np.ndarray]) -> dict[str, float]:
        """By sample id what a KL term in the reward takes off it; empty without one."""
        kl = self.config.objective.kl
        if kl is None or kl.place == "loss":
            return {}
        out = {}
        for s in (s for group in groups for s in group if s.total is not None):
            log_ratio_T = s.sample.completion.logprobs - references[s.sample.id]
            out[s.sample.id] = kl.coefficient * float(estimate_kl(torch.from_numpy(log_ratio_T), kl.estimator).sum())
        return out

    def update(self, minibatches: list[Minibatch]) -> Updated:
        """The gradient steps, with whatever memory the engine can spare meanwhile."""
        try:
            self.engine.rest()
            return update(self.policy, self.optimizer, minibatches, self.config, self.skips)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"step {self.step + 1}: out of memory in the update: lower training.micro_batch_tokens, or with the engine "
                "vllm lower rollout.vllm.memory_fraction or set rollout.vllm.sleep = true"
            ) from error

    def sync(self) -> None:
        """Hand the weights to the engine, and hold it to them. Raises TrainingError, since the weights have moved."""
        try:
            self.prove()
        except EngineError as error:
            raise TrainingError(f"step {self.step + 1}: the engine cannot take up the new weights: {error}") from error

    def prove(self) -> None:
        """Load the weights as they are, and compare engine and trainer."""
        self.probed = prove(self.engine, self.policy, self.probe)

    def advance(self, cursor: data.Cursor, waiting: list[Group]) -> None:
        """The batch is trained on: from here on it belongs to the past."""
        self.step, self.cursor, self.waiting = self.step + 1, cursor, waiting

    def evaluation_is_due(self) -> bool:
        """At every so many steps, and at the end."""
        config = self.config.evaluation
        if config is None:
            return False
        return self.step == self.config.training.steps or (config.every > 0 and self.step % config.every == 0)

    def evaluate(self) -> Metrics:
        """`evaluation/`: the policy on the held-out prompts, and the samples written."""
        config = self.config.evaluation
        assert config is not None
        mine = self.world.share(self.evaluation)
        with self.clock("evaluate"), self.terminal.generation(len(mine) * config.samples) as progress:
            with self._sampling():
                tokenizer, environment = self.policy.tokenizer, self.environment
                scored = sample_and_score(self.engine, mine, self.rewards, config, tokenizer, progress, environment)
            done = summarise(self.world.merge(scored), config, solved_at=self.config.solved_at)
        untrained: Advantages = [[None] * len(group) for group in done.groups]
        if self.world.is_main:
            self.records.write_samples(self.step, sample_lines(done.groups, untrained, {}, step=self.step), "evaluation")
        return done.metrics

    def measure(
        self, groups: Groups, advantages: Advantages, minibatches: Sequence[Minibatch], updated: Updated
    ) -> Metrics:
        """All metrics of the step, and its samples written."""
        self._tell_once(updated)
        if self.world.is_main:
            completions = {s.sample.id: s.sample.completion for group in groups for s in group}
            tokens = token_records(updated.ratios, completions, self.policy.tokenizer.decode)
            lines = sample_lines(groups, advantages, diagnosis.by_sample(updated.ratios), step=self.step, tokens=tokens)
            self.records.write_samples(self.step, lines)
        times = {f"time/{stage}_s": 0.0 for stage in ("evaluate", "save")} | self.clock.take()
        trained = [r for part in updated.ratios for r in part]  # of all ranks
        partial = self.config.rollout.max_step_tokens is not None
        return {
            "step": self.step,
            "time": time.time(),
            **reward_metrics(groups, advantages, solved_at=self.config.solved_at),
            **rollout_metrics(groups, sampled_tokens=self.sampled_tokens, seconds=times["time/collect_s"]),
            **partial_metrics(groups, [t for part in minibatches for t in part.trajectories], self.waiting, on=partial),
            **diagnosis.staleness_metrics(updated.ratios, on=partial),
            **episode_metrics(groups, on=self.config.environment is not None),
            **diagnosis.ratio_metrics(updated.ratios),
            **diagnosis.mismatch_metrics(updated.ratios, recomputed=updated.recomputed),
            **diagnosis.correction_metrics(updated.ratios, on=self.config.rollout.correction is not None),
            **({} if self.probed is None else {"mismatch/probe": self.probed}),
            **diagnosis.reference_kl(updated.ratios),
            **updated.metrics(),
            "update/updates": self.optimizer.updates,
            "update/skipped": self.skips.total,
            **self.optimizer.metrics(),
            "update/trained_tokens": sum(len(r.log_ratio_T) for r in trained),
            "update/samples_without_signal": sum(len(part.trajectories) for part in minibatches)
            - sum(len(r.ids) for r in trained),
            "update/micro_batches": len(trained),
            **times,
            **self._system(groups, minibatches, updated, times["time/step_s"]),
        }

    def _tell_once(self, updated: Updated) -> None:
        """Why old log-probabilities are recomputed, at the first step where they are."""
        why, kind = why_recomputed(updated, self.config), (updated.stale, updated.mismatch is not None)
        if why is not None and kind not in self.told:
            self.told.add(kind)
            self.terminal.note(why)

    def _system(self, groups: Groups, minibatches: Sequence[Minibatch], updated: Updated, seconds: float) -> Metrics:
        samples = [s.sample for group in groups for s in group]
        sizes = [(len(s.prompt.token_ids) + s.num_reply_tokens, s.num_tokens) for s in samples]
        shared = [(len(group[0].sample.prompt.token_ids), 0) for group in groups]
        mine = 0.0
        for i, part in enumerate(minibatches):
            passes = 4 if updated.recomputed and i else 3  # forward, backward twice that, and a forward before
            mine += passes * sum(self.flops.forward(m) for m in part.micro_batches)
        by_rank = self.world.gather((mine, peak_memory(self.policy.device)))
        total = self.flops.generation([*shared, *sizes]) + sum(flops for flops, _ in by_rank)
        return {
            "system/model_flops_per_s": total / seconds,
            "system/model_flops_utilisation": total / seconds / (self.peak_flops * self.world.size),
            "system/ranks": self.world.size,
            "system/peak_memory_gib": max(memory for _, memory in by_rank) / 2**30,
        }

    def record(self, row: Metrics) -> None:
        """Write a row of metrics, and show it."""
        if not self.world.is_main:
            return
        self.records.append(row)
        self.trackers.log(row)
        self.terminal.step(row)

    def checkpoint_is_due(self) -> bool:
        """At every so many steps, and at the end; never where the recipe wants none."""
        every = self.config.checkpoint.every
        return every is not None and (self.step % every == 0 or self.step == self.config.training.steps)

    def save(self) -> None:
        """Write a checkpoint of the place that the run has reached."""
        state = {
            "cursor": self.cursor.state(),
            "waiting": saved(self.waiting),
            "skips": [self.skips.total, self.skips.in_a_row],
            "version": self.policy.version,
        }
        keep = self.config.checkpoint.keep
        with self.clock("save"):
            checkpoint.save(self.folder / "checkpoints", self.policy, self.optimizer, state, step=self.step, keep=keep)
        self.saved_at = self.step

    def save_progress(self) -> None:
        """Write a checkpoint if steps were taken since the last."""
        if self.saved_at < self.step:
            self.save()
            self.terminal.note(f"saved at step {self.step}")

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint."""
        found.restore(self.optimizer)
        self.step = self.saved_at = found.state["step"]
        self.cursor = data.Cursor.of(found.state["cursor"])
        self.waiting = restored(found.state["waiting"], self.training)
        self.skips = Skips(*found.state["skips"])
        self.policy.version = found.state["version"]


@contextmanager
def open_run(config: Config, start: Path | None, *, resume: bool, world: World = ALONE) -> Iterator[Run]:
    """Check everything that can be checked, load, and yield the run; on a signal save, whatever happens close.

    start: the model that a cold start left, None for the recipe's. Raises what `train` says.
    """
    folder = world.first(lambda: open_folder(config, resume=resume))
    with ExitStack() as stack:
        stack.callback(leave_folder, folder)
        rewards = build(config.rewards)
        environment = stack.enter_context(closing(open_environment(config.environment)))
        found = world.first(lambda: newest_checkpoint(folder, resume=resume, say=print))
        done = found.state["step"] if found else 0
        title = f"{config.objective.name}, {config.rollout.prompts_per_step} prompts x {config.rollout.group_size}"
        signals = stack.enter_context(Signals(world))
        silent = not world.is_main
        terminal = stack.enter_context(Terminal(config.name, config.training.steps, done=done, title=title, silent=silent))
        for said in notes(rewards):
            terminal.note(said)
        if warning := clip_warning(config.objective.name, chosen_clip(config)):
            terminal.note(f"warning: {warning}")
        weights = found.model if found and config.model.lora is None else start
        policy = load_policy(config.model, temperature=config.rollout.temperature, seed=config.seed, path=weights)
        require_length(policy, config)
        require_routing(policy, config)
        shard(policy, world)
        training, evaluation = training_and_evaluation_prompts(config, policy.tokenizer, rewards, terminal.note)
        world.require_same("the prompts", lambda: [(p.id, p.token_ids) for p in (*training, *evaluation)])
        with signals.interruptible():
            engine = stack.enter_context(closing(open_engine(config, policy, terminal.note)))
        records, trackers = open_records(config, folder, done if found else None, world)
        stack.callback(trackers.close)
        total = config.training.steps * config.training.minibatches
        run = Run(
            config=config,
            folder=folder,
            policy=policy,
            optimizer=Optimizer(policy.trainable, config.training, total, policy.dtype),
            engine=engine,
            probe=open_probe(config, policy, training),
            reference=open_reference(config, policy, start),
            environment=environment,
            rewards=rewards,
            training=training,
            evaluation=evaluation,
            records=records,
            trackers=trackers,
            terminal=terminal,
            signals=signals,
            world=world,
        )
        if found:
            run.restore(found)
        with signals.interruptible():  # nothing can be lost yet
            run.prove()
        run.clock.take()  # what came before belongs to no step
        with _saved_when_interrupted(run):
            yield run


@contextmanager
def _saved_when_interrupted(run: Run) -> Iterator[None]:
    try:
        yield
    except (RewardError, EngineError, EpisodeError, SharedError):  # before any weight of the step moved
        run.save_progress()
        raise
    except Interrupted:
        run.save_progress()
        done = f"saved at step {run.step}" if run.step else "stopped before the first step was done"
        run.terminal.note(f"{done}; go on with --resume")
        raise
