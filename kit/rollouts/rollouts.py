"""Rollouts: the policy samples completions to the prompts of the data, and rewards give their advantages.

Promises:

- A rollout is a function of the seed, its number and the weights: a completion is sampled by (seed, rollout, sample,
  number of the completion, position) from the policy's own probabilities, independent of its batch and its rank.
- A checkpoint between two steps of one rollout has its trajectories, so a resume trains on the same ones.
- With ``rollout_overlap`` a server writes a rollout during the one before, by its weights: rewards and steps do not
  hold the server. The first rollout, and more prompts for one, are by their own weights. A checkpoint has the
  completions of the next rollout.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.data.feed.batches import Collator
from kit.data.feed.data import Data
from kit.data.feed.feed import GlobalBatch, counted
from kit.data.open import pad_id
from kit.rollouts.advantages import add_advantages, kl_in_reward
from kit.rollouts.environment import append_turn
from kit.rollouts.generation import Completion, Request
from kit.rollouts.play import play
from kit.rollouts.rollout_metrics import cut_probability, lengths, measured, shown
from kit.rollouts.sampler import OwnModel, Sampler, sampling_of
from kit.rollouts.sampler_check import check_sampler
from kit.rollouts.tools.tool_environment import open_environment
from kit.rollouts.trajectories import Segment, Trajectories, Trajectory, few_of
from kit.rollouts.vllm_server import Asked, VllmServer
from kit.system.console import say
from kit.system.errors import LateError
from kit.system.phases import ROLLING_OUT

if TYPE_CHECKING:
    from kit.run.run import Run
    from kit.train.policy import Policy

NUM_PROVING = 8  # tokens of a completion that proves weights, with rollout_overlap
MAX_RESAMPLES = 3  # more batches of prompts for one step: by dynamic_sampling, or because all rewards failed


class Rollouts:
    """The global batches of trajectories. It has the methods of ``kit.data.feed.feed.Feed``."""

    phase = ROLLING_OUT

    def __init__(self, policy: "Policy", run: "Run") -> None:
        recipe, data, state, progress = run.checked.recipe, run.checked.data, run.state.feed, run.progress
        assert isinstance(data, Data), "a recipe that streams is refused"
        self._policy, self._recipe, self._data, self._progress, self._run = policy, recipe, data, progress, run
        self._num_taken = int(state.get("num_taken", 0))  # batches of prompts
        self._trajectories = [Trajectory.from_state(each) for each in state.get("trajectories", [])]
        self._metrics: dict[str, float] = dict(state.get("metrics", {}))
        self._environment = open_environment(recipe, data, data.train, policy.tokenizer, lambda: run.stop.is_made)
        pad, codec = pad_id(policy.tokenizer), data.train.media_codec
        ends = sorted({policy.tokenizer.eos_token_id, *run.checked.stop_tokens.values()} - {None})
        self._server = VllmServer(policy, recipe, ends, codec, progress) if recipe.vllm_server_base_url else None
        self._sampler: Sampler = self._server or OwnModel(
            policy, recipe, sampling_of(recipe), ends, pad, codec, progress
        )
        self._mismatch: dict[str, float] = {}  # metrics of the weights that the server has
        if self._server and (known := state.get("ahead")):
            self._server.ahead = self._server.begin([], [Completion(*each) for each in known])
        self._collator = Collator(recipe.micro_batch_size, pad, recipe.packing, recipe.max_length)
        self._has_warned = False  # of a rollout without a gradient

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called by all ranks.

        Raises:
            LateError: on all ranks, if no completion has a reward, or the sampler fails or disagrees with the policy.
            Stopped: on all ranks, if one was asked to stop in a rollout.
        """
        recipe, train = self._recipe, self._data.train
        is_new = not step % recipe.num_iterations
        if is_new:
            num_taken, ahead = self._num_taken, self._server.ahead if self._server else None
            if not ahead:
                self._sampler.publish(step)
            if self._server and recipe.rollout_overlap:
                self._server.then = partial(self._begin_next, step)
            try:
                groups = self._roll_out()
                self._trajectories = [
                    each for group in groups for each in group if np.isfinite(each.reward) or not recipe.rewards
                ]
                if not ahead:
                    self._check_sampler(self._trajectories)
                self._metrics |= self._mismatch
                if recipe.cuts_rollouts:
                    cut = cut_probability(self._policy, self._collator, self._trajectories, train, recipe)
                    self._metrics["sampling/cut_probability"] = cut
            except BaseException:
                self._num_taken = num_taken  # a rollout that ends early begins again
                if self._server:
                    self._server.ahead = ahead
                self._environment.close()
                raise
        if is_new and recipe.rollout_overlap and not recipe.vllm_importance_sampling_cap:
            for each in self._trajectories:
                each.logps["old_logps"] = each.logps["engine_logps"]
        elif is_new and (recipe.num_iterations > 1 or kl_in_reward(recipe)):
            self._add_logps("old_logps")
        if is_new and recipe.beta:
            with self._policy.reference():
                self._add_logps("reference_logps")
        if is_new and recipe.rewards:
            add_advantages(groups, recipe)
        samples = self._samples()
        return replace(
            counted(samples, np.arange(len(samples)), len(train.stores)),
            micro_batches=samples.micro_batches(self._collator, self._policy.ranks),
            epoch=self._data.order.epochs_after(self._num_taken),
            origins=list(dict.fromkeys(train.origin(each.sample) for each in self._trajectories)),
            most_targets=len(samples) * self._environment.most_tokens,
            metrics=self._metrics,
            answers=shown(self._trajectories, train, self._policy.tokenizer) if recipe.rewards else [],
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of prompt batches taken, and trajectories to use again.

        With ``rollout_overlap`` also the completions of the next batch, unless the server fails.
        """
        state: dict[str, Any] = {"num_taken": self._num_taken}
        if self._recipe.num_iterations > 1:
            state |= {"trajectories": [each.state() for each in self._trajectories], "metrics": self._metrics}
        if self._server and self._server.ahead:
            with suppress(LateError):  # ``take`` raises it again
                progress, stop = self._run.guard.progress, self._run.stop
                state["ahead"] = self._server.wait(self._server.ahead, progress, lambda: stop.is_made or stop.is_agreed)
        return state

    def notes(self) -> list[str]:
        """A line for the user about a step."""
        recipe = self._recipe
        if not recipe.rewards:
            kept = (
                "" if recipe.on_policy_share == 1 else ", and so are those whose answer in the data exceeds max_length"
            )
            return [f"rollouts: {recipe.on_policy_share:.0%} of the sequences are on-policy (student-generated){kept}"]
        num_prompts = recipe.global_batch_size // recipe.num_generations
        again = f", {recipe.num_iterations} steps each" if recipe.num_iterations > 1 else ""
        rewards = ", ".join(self._environment.keys)
        by = f", by {recipe.vllm_server_base_url}" if recipe.vllm_server_base_url else ""
        return [
            f"rollouts: {num_prompts} prompts x {recipe.num_generations} completions{by}{again}; rewards: {rewards}"
        ]

    def closing_notes(self) -> list[str]:
        """A line for each reward that failed."""
        return self._environment.closing_notes()

    def _samples(self) -> Trajectories:
        return Trajectories(self._trajectories, self._data.train, self._recipe.mask_truncated_completions)

    def _add_logps(self, name: str) -> None:
        of_policy = self._policy, self._collator, self._recipe.rollout_temperature
        for i, values in self._samples().compute_logps(*of_policy).items():
            self._trajectories[i].logps[name] = values

    def _roll_out(self) -> list[list[Trajectory]]:
        """Return the groups of a rollout, and set ``_metrics``."""
        recipe = self._recipe
        if not recipe.rewards:
            groups = self._sample(self._num_taken)
            self._num_taken += 1
            return groups
        wanted = recipe.global_batch_size // recipe.num_generations
        groups = []
        without_variance: list[list[Trajectory]] = []  # zero reward variance; a group without rewards is in neither
        sampled: list[list[Trajectory]] = []
        for _ in range(1 + MAX_RESAMPLES):
            batch = self._sample(self._num_taken)
            self._num_taken += 1
            sampled += batch
            for group, values in zip(batch, add_advantages(batch, recipe), strict=True):
                if values.any():
                    groups.append(group)
                elif any(np.isfinite(each.reward) for each in group):
                    without_variance.append(group)
            if len(groups) >= wanted or (not recipe.dynamic_sampling and groups + without_variance):
                break
        self._environment.say_failures(list(chain.from_iterable(sampled)))
        if not groups and not self._has_warned:
            self._has_warned = True
            say("warning: all groups have zero reward variance: this rollout gives no gradient")
        groups = groups[:wanted]
        self._metrics = measured(sampled, self._environment.keys, len(without_variance))
        # Groups of zero variance count in the divisors, as in the papers; with dynamic sampling there should be none.
        if not recipe.dynamic_sampling or not groups:
            groups += without_variance[: wanted - len(groups)]
        return groups

    def _sample(self, number: int) -> list[list[Trajectory]]:
        """Sample a batch of prompts. Returns a group of trajectories for each prompt, and sets ``_metrics``."""
        recipe, ranks, train = self._recipe, self._policy.processes, self._data.train
        trajectories, num = self._started(number), recipe.answers_per_prompt
        places = [place for place, each in enumerate(trajectories) if not each.outcome]
        trajectories = play(
            self._environment,
            self._sampler,
            trajectories,
            recipe.max_new_tokens,
            train.media_with_origin,
            ranks,
            self._progress,
        )
        self._metrics = lengths([trajectories[place] for place in places])
        return [trajectories[place : place + num] for place in range(0, len(trajectories), num)]

    def _started(self, number: int) -> list[Trajectory]:
        """The trajectories of a batch of prompts, before they are sampled."""
        indices = np.concatenate(self._data.order.batch(number)).tolist()
        return [self._start((number, i, k)) for i in indices for k in range(self._recipe.answers_per_prompt)]

    def _begin_next(self, step: int) -> None:
        """Let the server write the next batch of prompts by the weights after ``step`` steps, proven on a few."""
        assert self._server
        recipe, server, started = self._recipe, self._server, partial(self._started, self._num_taken + 1)

        def begin(some: Sequence[Trajectory], most: int) -> Asked:
            media = self._data.train.media_with_origin
            return server.begin([Request(each.ids, each.key, most, media(each.sample)) for each in some])

        if server.step != step:
            server.publish(step)
            few = few_of(started())
            for each, completion in zip(few, server.wait(begin(few, NUM_PROVING)), strict=True):
                append_turn(each, completion)
            self._check_sampler(few)
        if step + recipe.num_iterations < self._run.checked.total_steps:
            server.ahead = begin(started(), recipe.max_new_tokens)

    def _check_sampler(self, trajectories: Sequence[Trajectory]) -> None:
        if published := self._sampler.published:
            of_policy = self._policy, self._collator
            self._mismatch = check_sampler(*of_policy, trajectories, self._data.train, published)

    def _start(self, key: tuple[int, int, int]) -> Trajectory:
        """A trajectory that the policy completes; or, off-policy, the data's answer, unless it is too long.

        With the data's answer, earlier assistant turns are trained on, too.
        """
        recipe, train = self._recipe, self._data.train
        length = sum(map(len, train.prompt(key[1])))
        draw = np.random.default_rng([recipe.seed, *key]).random()
        if recipe.rewards or draw < recipe.on_policy_share or length > recipe.max_length:
            return self._environment.start(key)
        ids, weights = (values[:length] for values in train[key[1]])
        bounds = np.flatnonzero(np.diff(weights)) + 1
        parts = zip(np.split(ids, bounds), np.split(weights, bounds), strict=True)
        return Trajectory(key, [Segment(part.tolist(), float(its[0])) for part, its in parts], "ended")
