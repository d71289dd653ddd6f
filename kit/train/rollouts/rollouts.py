"""Rollouts: the model answers the prompts of the data, rewards say what its answers are worth, and a step learns.

Promises:

- A rollout is a function of the seed, its number and the weights: an answer is drawn by (seed, rollout, sample, number
  of the answer, position), from the model's own probabilities, whatever else is generated beside it or on which rank.
- What was drawn is what is trained on: ids, never text that was encoded again.
- A checkpoint between two steps of one rollout has its answers, so a resume learns from the same ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from kit.data.feed.batches import Collator, on_device
from kit.data.feed.feed import GlobalBatch, counted
from kit.data.feed.packing import pack
from kit.data.open import Data, pad_id, prompt_and_reference
from kit.data.read.image_files import Image
from kit.data.read.sources import FIX_ROWS, shown
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.model.adapters.adapter import adapters_off
from kit.scoring.own_metric import MetricError, is_own
from kit.scoring.rewards import Asked, Scorer, key_of, reward
from kit.strategy.processes.launcher import cores_of_rank
from kit.system.console import Progress, progress, say
from kit.system.errors import LateError, Problem, Problems
from kit.system.interrupt import Stopped
from kit.train.reference import without_gradients
from kit.train.rollouts.advantages import advantages
from kit.train.rollouts.engine import Engine, OwnEngine
from kit.train.rollouts.generation import text_of
from kit.train.rollouts.vllm_server import FIELD, VllmServer

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.data.feed.stream import Stream
    from kit.strategy.accelerator import Prepared

MAX_REFILLS = 3  # times that other prompts are asked for one step: by dynamic_sampling, or as all rewards failed
MAX_WORKERS = 8  # processes of a rank that compute rewards
NUM_SHOWN = 3  # prompts of a rollout in ``metrics.jsonl``
NUM_PROVEN = 16  # answers of a rollout whose log-probabilities are compared with those of the engine
# The largest mean over their tokens, in nats. vLLM 0.32 was off by 4e-7 in float32, an adapter of the step before by
# 0.03 (recipes/tiny). In bf16 both sides round: by up to 8e-3 there, and larger models by more.
FARTHEST, FARTHEST_ROUNDED = 1e-3, 0.05


@dataclass
class Answer:
    """One answer to one prompt. A checkpoint holds it as JSON."""

    sample: int  # index of the prompt's sample
    ids: list[int]  # of prompt and answer
    prompt_length: int
    ended: bool
    rewards: list[float | str]  # in place of one that failed, why
    advantage: float = 0.0
    logps: dict[str, list[float]] = field(default_factory=dict)  # of its tokens, by old_, engine_ and reference_logps
    weights: list[float] = field(default_factory=list)  # of the ids, if it is of the data: earlier turns teach, too

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.prompt_length

    def reward(self, weights: Sequence[float]) -> float:
        """The weighted sum of its rewards; NaN if one failed."""
        return sum(
            weight * each if isinstance(each, float) else np.nan
            for weight, each in zip(weights, self.rewards, strict=True)
        )


class Answers(Table):
    """The answers of a rollout as samples."""

    def __init__(self, answers: Sequence[Answer], prompts: Samples, masks_cut: bool) -> None:
        """
        Args:
            prompts: the samples of which they are.
            masks_cut: nothing is learned from an answer that did not end.
        """
        self._answers, self._prompts, self.image_maker = answers, prompts, prompts.image_maker
        self._is_learned = [answer.ended or not masks_cut for answer in answers]
        weights = [self._weights(i)[1:] for i in range(len(answers))]
        records: dict[str, np.ndarray] = {
            "length": np.array([len(answer.ids) for answer in answers], np.int32),
            "num_targets": np.array([(each > 0).sum() for each in weights], np.int32),
            "target_weight": np.array([each.sum(dtype=np.float64) for each in weights]),
        }
        super().__init__(records, None, prompts.dataset_ids[[answer.sample for answer in answers]])

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._answers[i].ids, np.int64), self._weights(i)

    def images_with_origin(self, i: int) -> list[tuple[Image, str, str]]:
        """See ``Table``."""
        return self._prompts.images_with_origin(self._answers[i].sample)

    def per_sequence(self, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """See ``kit.data.feed.batches.Rows``."""
        return {"advantages": np.array([self._answers[i].advantage for i in members.tolist()], np.float64)}

    def per_token(self, i: int) -> dict[str, np.ndarray]:
        """See ``kit.data.feed.batches.Rows``."""
        known = {name: np.array(values, np.float32) for name, values in self._answers[i].logps.items()}
        return {name: self._of_tokens(i, values) for name, values in known.items() if len(values)}

    def _weights(self, i: int) -> np.ndarray:
        answer = self._answers[i]
        if answer.weights:
            return np.array(answer.weights, np.float32)
        return self._of_tokens(i, np.full(answer.length, self._is_learned[i], np.float32))

    def _of_tokens(self, i: int, of_answer: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros(self._answers[i].prompt_length, of_answer.dtype), of_answer])


class Rollouts:
    """The global batches of answers. It has the methods of ``kit.data.feed.feed.Feed``."""

    def __init__(
        self,
        prepared: "Prepared",
        recipe: "Recipe",
        data: "Data | Stream",
        tokenizer: Any,
        stops: Iterable[int],
        state: Mapping[str, Any],
        progress: Progress,
        is_stopping: Callable[[], bool],
    ) -> None:
        """
        Args:
            stops: ids that end an answer, beside that of EOS.
            state: what ``state`` returned; empty at the beginning of a run.
            progress: wraps each loop over calls. It may raise an exception to end it, if it does so on all ranks at the
                same call.
            is_stopping: whether this process was asked to stop.
        """
        assert isinstance(data, Data), "a recipe that streams is refused"
        self._prepared, self._recipe, self._data, self._tokenizer = prepared, recipe, data, tokenizer
        self._progress = progress
        self._num_taken = int(state.get("num_taken", 0))  # batches of the data's order
        self._answers = [Answer(**each) for each in state.get("answers", [])]
        self._metrics: dict[str, float] = dict(state.get("metrics", {}))
        self._weights = recipe.reward_weights or [1.0] * len(recipe.rewards)
        self._scorer = Scorer(recipe.rewards, recipe.reward_timeout, min(MAX_WORKERS, cores_of_rank()), is_stopping)
        is_read = any(map(is_own, recipe.rewards))
        self._rows: Any = data.train.data_rows(range(len(data.train))) if is_read else {}
        pad = pad_id(tokenizer)
        ends = sorted({tokenizer.eos_token_id, *stops} - {None})
        self._engine: Engine = (
            VllmServer(prepared, recipe, self._prompt, ends, progress)
            if recipe.vllm_server_base_url
            else OwnEngine(prepared, recipe, data.train, ends, pad)
        )
        self._collator = Collator(recipe.micro_batch_size, pad, recipe.packing, recipe.max_length)
        keys = [key_of(name) for name in recipe.rewards]
        self._keys = [f"{key}_{keys[: k + 1].count(key)}" if keys.count(key) > 1 else key for k, key in enumerate(keys)]
        self._failures: Counter[str] = Counter()  # by reward
        self._has_warned = False  # of a rollout without a lesson

    def take(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, counted from 0. Called by all ranks.

        Raises:
            LateError: on all ranks, if no answer has a reward, or the engine fails or disagrees with the model.
            Stopped: on all ranks, if one was asked to stop in a rollout.
        """
        recipe = self._recipe
        if not step % recipe.num_iterations:
            self._engine.publish(step)
            try:
                self._answers = self._roll_out()
            except BaseException:  # of a rollout that ends early nobody reads the rewards
                self._scorer.close()
                raise
            if self._engine.published:
                self._prove_engine()
            if recipe.num_iterations > 1:
                self._add_logps("old_logps")
            if recipe.beta:
                self._add_logps("reference_logps")
        samples = self._samples()
        origins = dict.fromkeys(self._data.train.origin(answer.sample) for answer in self._answers)
        return replace(
            counted(samples, np.arange(len(samples)), len(self._data.train.stores)),
            micro_batches=self._collator.micro_batches(samples, self._items(samples), self._prepared.ranks),
            epoch=self._data.order.epochs_after(self._num_taken),
            origins=list(origins),
            most_targets=len(samples) * recipe.max_new_tokens,
            metrics=self._metrics,
            answers=self._shown() if recipe.rewards else [],
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must store: how many prompts were asked, and answers that are learned from again."""
        repeats = self._recipe.num_iterations > 1
        # Of numbers alone, as all that a state holds. None has a reward that failed.
        answers = [asdict(answer) | {"ended": int(answer.ended)} for answer in self._answers if repeats]
        return {"num_taken": self._num_taken, "answers": answers, "metrics": self._metrics if repeats else {}}

    def notes(self) -> list[str]:
        """A line for the user about a step."""
        recipe = self._recipe
        if not recipe.rewards:
            kept = "" if recipe.on_policy_share == 1 else ", and those whose answer in the data exceeds max_length"
            return [f"rollouts: the student answers {recipe.on_policy_share:.0%} of the prompts{kept}"]
        num_prompts = recipe.global_batch_size // recipe.num_generations
        again = f", {recipe.num_iterations} steps each" if recipe.num_iterations > 1 else ""
        rewards = ", ".join(self._keys)
        by = f", by {recipe.vllm_server_base_url}" if recipe.vllm_server_base_url else ""
        return [f"rollouts: {num_prompts} prompts x {recipe.num_generations} answers{by}{again}; rewards: {rewards}"]

    def closing_notes(self) -> list[str]:
        """A line for each reward that failed."""
        return [f"warning: reward {name} failed {count} times" for name, count in self._failures.items()]

    def _prompt(self, sample: int) -> Sequence[int]:
        return prompt_and_reference(self._data.train, sample)[0]

    def _samples(self, answers: Sequence[Answer] | None = None) -> Answers:
        """The answers of the step; or some, of which nothing is masked."""
        masks_cut = self._recipe.mask_truncated_completions and answers is None
        return Answers(self._answers if answers is None else answers, self._data.train, masks_cut)

    def _items(self, samples: Answers) -> list[np.ndarray]:
        if self._recipe.packing:
            return pack(samples.lengths, self._recipe.max_length).items()
        return list(np.arange(len(samples))[:, None])

    def _roll_out(self) -> list[Answer]:
        """Return the answers of the next prompts, with their advantages, and set ``_metrics``."""
        recipe = self._recipe
        if not recipe.rewards:
            answers = self._draw(self._num_taken)
            self._num_taken += 1
            self._metrics = _lengths([answer for answer in answers if not answer.weights])
            return answers
        wanted = recipe.global_batch_size // recipe.num_generations
        groups: list[list[Answer]] = []
        even: list[list[Answer]] = []  # whose answers all have the same reward; one without rewards is in neither
        asked: list[Answer] = []
        num_taken = self._num_taken
        for _ in range(1 + MAX_REFILLS):
            drawn = self._draw(num_taken)
            num_taken += 1
            asked += drawn
            rewards = np.array([answer.reward(self._weights) for answer in drawn]).reshape(-1, recipe.num_generations)
            of_answers = advantages(rewards, recipe.policy_loss)
            for i, gains in enumerate(of_answers.tolist()):
                group = drawn[i * recipe.num_generations : (i + 1) * recipe.num_generations]
                for answer, gain in zip(group, gains, strict=True):
                    answer.advantage = gain
                if any(gains):
                    groups.append(group)
                elif any(np.isfinite(answer.reward(self._weights)) for answer in group):
                    even.append(group)
            if len(groups) >= wanted or (not recipe.dynamic_sampling and groups + even):
                break
        self._say_failures(asked)
        self._num_taken = num_taken  # only now: a rollout that is interrupted begins again
        if not groups and not self._has_warned:
            self._has_warned = True
            say("warning: all answers to each prompt have the same reward: nothing is learned from this rollout")
        groups = groups[:wanted]
        self._metrics = self._measured(asked, len(even))
        # Groups without a lesson count in the divisors, as in the papers; with dynamic sampling there should be none.
        groups += even[: wanted - len(groups)] if not recipe.dynamic_sampling or not groups else []
        answers = [answer for group in groups for answer in group]
        return [answer for answer in answers if np.isfinite(answer.reward(self._weights))]

    def _draw(self, number: int) -> list[Answer]:
        """Return the answers to the prompts of a batch of the data's order, those to one prompt one after another."""
        recipe, ranks, train = self._recipe, self._prepared.processes, self._data.train
        indices = np.concatenate(self._data.order.batch(number)).tolist()
        tasks = [(i, k) for i in indices for k in range(recipe.answers_per_prompt)]
        written = [place for place, task in enumerate(tasks) if self._is_written(number, *task)]
        mine = written[ranks.index :: ranks.count]
        size = recipe.eval_batch_size
        num_calls = -(-len(written) // (ranks.count * size))
        drawn: list[tuple[int, Answer]] = []
        submitted = []
        with self._engine.answering(number, tasks) as answers_to:
            for call in self._progress(range(num_calls), "rollout", num_calls):
                places = mine[call * size : (call + 1) * size]
                # A rank without a task left generates for the first one, and nobody reads that answer.
                for place, (ids, ended, logps) in zip(places, answers_to(places or [0]), strict=False):
                    i = tasks[place][0]
                    prompt, reference = prompt_and_reference(train, i)
                    expected, text = text_of(self._tokenizer, reference), text_of(self._tokenizer, ids, ended)
                    asked = Asked(expected, text, self._rows.get(i), train.origin(i), len(ids), recipe.max_new_tokens)
                    submitted += self._scorer.submit([asked])
                    answer = Answer(i, [*prompt, *ids], len(prompt), ended, [])
                    if logps:
                        answer.logps["engine_logps"] = list(logps)
                    drawn.append((place, answer))
        for call in self._progress(range(num_calls), "rewards", num_calls):
            of_call = slice(call * size, (call + 1) * size)
            for (_, answer), rewards in zip(drawn[of_call], self._scorer.collect(submitted[of_call]), strict=True):
                answer.rewards = rewards
        found = gather_object(drawn)
        for place in set(range(len(tasks))) - set(written):
            i = tasks[place][0]
            prompt, reference = prompt_and_reference(train, i)
            ids = [*prompt, *reference]
            weights = train[i][1][: len(ids)].tolist()
            found.append((place, Answer(i, ids, len(prompt), True, [], weights=weights)))
        answers = [answer for _, answer in sorted(found, key=lambda pair: pair[0])]
        if any(len(answer.rewards) < len(recipe.rewards) for answer in answers):
            raise Stopped
        return answers

    def _is_written(self, number: int, sample: int, answer: int) -> bool:
        """Whether the model writes this answer, and does not take that of the data, which may be too long."""
        recipe = self._recipe
        if recipe.rewards:
            return True
        length = sum(map(len, prompt_and_reference(self._data.train, sample)))
        draw = np.random.default_rng([recipe.seed, number, sample, answer]).random()
        return draw < recipe.on_policy_share or length > recipe.max_length

    def _add_logps(self, name: str) -> None:
        """Compute the log-probabilities of all tokens of the answers, by the model or its reference."""
        of_model = self._prepared.reference() if name == "reference_logps" else nullcontext()
        for i, values in self._logps(of_model):
            self._answers[i].logps[name] = values

    def _logps(
        self, of_model: AbstractContextManager[None], answers: Sequence[Answer] | None = None
    ) -> list[tuple[int, list[float]]]:
        """The places of answers in ``_samples``, with the log-probabilities of their tokens. Called by all ranks.

        Args:
            of_model: in which the model is the one that is asked for.
        """
        samples = self._samples(answers)
        micro_batches = self._collator.micro_batches(samples, self._items(samples), self._prepared.ranks)
        model, found = self._prepared.model, []
        with of_model, without_gradients(self._prepared):
            for micro_batch in on_device(micro_batches, self._prepared.accelerator.device):
                assert micro_batch.sequence_ids is not None
                logps = (-model(**micro_batch.model_inputs())).float().cpu()
                sequence_ids = micro_batch.sequence_ids.cpu()
                for number, (_, _, i) in enumerate(micro_batch.segments):
                    found.append((i, logps[sequence_ids == number].tolist()))
        return list(gather_object(found))

    def _prove_engine(self) -> None:
        """Compare the log-probabilities that came with some answers with the model's own; add this to the metrics.

        Raises:
            LateError: on all ranks, if they differ by more than rounding, or are those of the model without adapters.
        """
        some = self._answers[:: -(-len(self._answers) // NUM_PROVEN)]

        def differences(of_model: AbstractContextManager[None]) -> np.ndarray:
            known = self._logps(of_model, some)
            return np.concatenate([np.abs(np.subtract(own, some[i].logps["engine_logps"])) for i, own in known])

        own, of_base = differences(nullcontext()), differences(adapters_off(self._prepared.model))
        mean, most = float(own.mean()), float(own.max())
        self._metrics |= {"sampling/logp_difference/mean": mean, "sampling/logp_difference/max": most}
        accelerator, model = self._prepared.accelerator, self._prepared.model
        is_exact = accelerator.mixed_precision == "no" and all(p.dtype == torch.float32 for p in model.parameters())
        farthest = min(FARTHEST if is_exact else FARTHEST_ROUNDED, 2 * float(of_base.mean()))
        if not mean <= farthest:
            found = (
                f"after publish {self._engine.published} the server's log-probabilities of {len(own)} tokens of "
                f"{len(some)} answers differ from the model's by {mean:.2g} nats in the mean, {most:.2g} at most, and "
                f"by {of_base.mean():.2g} from those of the model without adapters"
            )
            fix = "let the server serve this run's model_name_or_path, in its precision (--dtype); docs/rollouts.md"
            raise LateError(Problem(FIELD, found, f"{farthest:.2g} in the mean: rounding alone", fix))

    def _say_failures(self, answers: Sequence[Answer]) -> None:
        failed = [
            (key, why)
            for answer in answers
            for key, why in zip(self._keys, answer.rewards, strict=True)
            if isinstance(why, str)
        ]
        if not failed:
            return
        new = {key: why for key, why in reversed(failed) if key not in self._failures}
        self._failures.update(key for key, _ in failed)
        if not any(np.isfinite(answer.reward(self._weights)) for answer in answers):
            raise MetricError(Problem("--rewards", f"no answer of this rollout has a reward: {failed[0][1]}"))
        say(*(f"warning: reward {key} failed, such an answer is left out: {why}" for key, why in new.items()))

    def _measured(self, answers: Sequence[Answer], num_even: int) -> dict[str, float]:
        """The metrics of a rollout, over all answers that were drawn for it."""
        recipe = self._recipe
        rewards = np.array([answer.reward(self._weights) for answer in answers])
        of_groups = rewards.reshape(-1, recipe.num_generations)
        spreads = np.nanstd(of_groups[np.isfinite(of_groups).any(axis=1)], axis=1)
        metrics = {
            "reward": float(np.nanmean(rewards)),
            "reward_std": float(np.mean(spreads)),
            "frac_reward_zero_std": num_even * recipe.num_generations / len(answers),
        } | _lengths(answers)
        for k, key in enumerate(self._keys):
            values = [answer.rewards[k] for answer in answers]
            numbers = [value for value in values if isinstance(value, float)]
            if numbers and len(recipe.rewards) > 1:
                metrics[f"rewards/{key}"] = float(np.mean(numbers))
            if len(numbers) < len(values):
                metrics[f"rewards/{key}/failed"] = len(values) - len(numbers)
        return metrics

    def _shown(self) -> list[dict[str, Any]]:
        """What a log and a report show: of the first prompts the best and the worst answer."""
        groups: dict[int, list[Answer]] = {}
        for answer in self._answers:
            groups.setdefault(answer.sample, []).append(answer)
        shown = []
        for sample, group in list(groups.items())[:NUM_SHOWN]:
            ranked = sorted(group, key=lambda answer: answer.reward(self._weights))
            for answer in (ranked[-1], ranked[0]):
                _, reference = prompt_and_reference(self._data.train, sample)
                shown.append(
                    {
                        "prompt": self._data.train.shown(self._tokenizer.decode(answer.ids[: answer.prompt_length])),
                        "reference": text_of(self._tokenizer, reference),
                        "text": text_of(self._tokenizer, answer.ids[answer.prompt_length :], answer.ended),
                        "reward": answer.reward(self._weights),
                    }
                )
        return shown


def try_rewards(recipe: "Recipe", train: Samples, tokenizer: Any) -> list[str]:
    """Judge expected answers as if the model gave them, before it is loaded: by ``math`` all, by the user's the first.

    Returns:
        A line for each rule that gives 0 for all of them.

    Raises:
        UserError: a reward of the user fails, or ``math`` cannot read an expected answer.
    """

    def asked(i: int) -> Asked:
        text = text_of(tokenizer, prompt_and_reference(train, i)[1])
        return Asked(text, text, None, train.origin(i), 1, recipe.max_new_tokens)

    def judged(name: str, each: Sequence[Asked]) -> list[list[float | str]]:
        with closing(Scorer([name], recipe.reward_timeout, min(MAX_WORKERS, cores_of_rank()))) as scorer:
            return scorer.collect(progress(scorer.submit(each), "expected answers", len(each)))

    notes, problems = [], Problems()
    for name in recipe.rewards:
        if is_own(name):
            [[found]] = judged(name, [asked(0)._replace(row=train.data_rows([0]).get(0))])
            if isinstance(found, str):
                problems.append(Problem("--rewards", f"the expected answer of a row has no reward: {found}"))
        elif name == "math":
            every = [*{one.expected: one for one in map(asked, range(len(train)))}.values()]  # one of equals
            problems += shown(
                [
                    Problem(one.origin, f"math-verify cannot read {one.expected[:60]!r}")
                    for one, found in zip(every, judged(name, every), strict=True)
                    if found != [1.0]
                ],
                "--rewards math",
                FIX_ROWS,
            )
        elif key_of(name) in ("number", "json", "regex") and not any(reward(name, asked(i)) for i in range(len(train))):
            notes.append(f"warning: --rewards {name}: 0 for the expected answer of every row")
    problems.raise_if_any()
    return notes


def _lengths(answers: Sequence[Answer]) -> dict[str, float]:
    """The metrics of answers that the model wrote; nothing if it wrote none."""
    if not answers:
        return {}
    return {
        "completions/mean_length": float(np.mean([answer.length for answer in answers])),
        "completions/clipped_ratio": float(np.mean([not answer.ended for answer in answers])),
    }
