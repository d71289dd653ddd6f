"""Evaluation: the loss and the metrics of the objective, and metrics of generated last answers.

Promises: each sample counts exactly once, on any number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from kit.config.recipe import Recipe
from kit.data.chat.template import Jinja
from kit.data.chat.tokens import form_of
from kit.data.feed.batches import MicroBatch, evaluation_batches
from kit.data.feed.data import Data
from kit.data.open import pad_id
from kit.data.read.media_files import small
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.model.layers.attention import without_cudnn_attention
from kit.model.sampling import Sampling
from kit.rollouts.environment import append_turn
from kit.rollouts.generation import ANY_ANSWER, Request, generate_answers, reference_of, special_ids, text_of
from kit.rollouts.play import play
from kit.rollouts.rollout_metrics import by_reward, conversation, lengths
from kit.rollouts.sampler import OwnModel
from kit.rollouts.tools.tool_calls import CallReader, MalformedCall, call_reader
from kit.rollouts.tools.tool_environment import open_environment
from kit.rollouts.trajectories import Segment, Trajectory
from kit.run.evaluation import Answer, Evaluation
from kit.scoring.metrics import TOOL_CALLS, Metric
from kit.scoring.own_metric import MetricError, is_own
from kit.strategy.float64 import float64_device
from kit.strategy.weights import generating
from kit.system.console import Progress, is_main, progress
from kit.system.errors import Problem, UserError
from kit.tasks.base import Measured, Objective
from kit.tasks.sft.loss import SupervisedLoss
from kit.train.policy import Policy

NUM_SHOWN = 3
MOST_PICTURES, SIDE = 4, 160  # of an answer that is shown, and their pixels


def evaluate(
    policy: Policy,
    objective: Objective,
    data: Data,
    recipe: Recipe,
    progress: Progress = progress,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Compute the loss, and with ``predict_with_generate`` metrics of generated answers. Called by all ranks.

    Without reference answers there is no loss and no ``exact_match``; with rewards there is their mean instead.

    Dropout is off. Only sums are kept from batch to batch, and with ``predict_with_generate`` a hash of each reference.

    Args:
        objective: of the run. Answers are measured by their cross-entropy, whatever is minimised.
        data: with evaluation data.
        progress: wraps each loop over batches. It may raise an exception to end the evaluation, if it does so on all
            ranks at the same batch.
        is_stopping: whether this process was asked to stop, and so does not wait for tools.

    Raises:
        MetricError: on all ranks, if a metric of the user fails.
    """
    samples, tokenizer, batch_size = data.evaluation, policy.tokenizer, recipe.eval_batch_size
    assert samples is not None
    without_reference = samples.without_reference
    answered = samples
    if len(without_reference):
        answered = samples.select(np.flatnonzero(samples.num_targets), "with a reference answer")
    num_batches = math.ceil(len(answered) / (policy.ranks.count * batch_size))

    def batches(rows: Table, name: str) -> Iterable[MicroBatch]:
        return progress(evaluation_batches(rows, policy.ranks, batch_size, pad_id(tokenizer)), name, num_batches)

    model = policy.model
    was_training = model.training
    model.eval()
    try:
        if samples.kind.is_demonstration:
            objective = SupervisedLoss(samples.dataset_names)
        measured = Measured({}, [], {})
        if len(answered):
            with torch.no_grad():
                measured = objective.measure(policy, answered, data.mismatched(answered), batches)
        metrics, odd = {f"eval_{name}": value for name, value in measured.metrics.items()}, measured.odd_samples
        if not recipe.predict_with_generate:
            return Evaluation(metrics, odd_samples=odd, details=measured.details)
        with_prompt, ends = _references(samples, recipe.train_on)
        num_without = len(samples) - len(with_prompt)
        without_prompt = {"num_samples_without_prompt": num_without} if num_without else {}
        if not len(with_prompt):
            return Evaluation(metrics, counts=without_prompt, odd_samples=odd)
        if without_prompt:
            samples = samples.select(with_prompt, "with a prompt")
        # The stop tokens: EOS, and the last tokens of references; a chat template may use another token than EOS.
        if len(without_reference) and form_of(*(store.info["counts"] for store in samples.stores)) == "chat":
            ends |= data.encoder.answer_ends()
        stops = ({tokenizer.eos_token_id, *ends} & special_ids(tokenizer)) - {None}
        compare = call_reader(tokenizer, tokenizer.chat_template).equal if TOOL_CALLS in recipe.metrics else None
        names = dict.fromkeys(["exact_match", *recipe.metrics])
        if len(without_reference):
            del names["exact_match"]
        of_answers = [Metric(name, compare) for name in names]
        trajectories: Iterable[Trajectory]
        of_rewards = len(without_reference) or recipe.metric_for_best_model == "eval_reward"
        if recipe.has_tools or (recipe.rewards and of_rewards):
            trajectories, of_played = _play(policy, data, samples, stops, recipe, progress, is_stopping)
            metrics |= {f"eval_{name}": value for name, value in of_played.items()}
        else:
            trajectories = _generate(policy, samples, stops, recipe, progress)
        answers, values, num_truncated = _score(policy, samples, recipe, of_answers, trajectories)
        intervals = {}
        for metric, of_metric in zip(of_answers, values, strict=False):  # without metrics there is still an array
            for name, numbers in metric.results(of_metric).items():
                metrics[f"eval_{name}"] = metric.result(numbers)
                if is_main():
                    intervals[f"eval_{name}"] = metric.bounds(numbers)
        counts = {
            "num_answers": len(samples) * recipe.num_return_sequences,
            "num_truncated_answers": num_truncated,
            **without_prompt,
        }
        named = stops - {tokenizer.eos_token_id} or stops
        return Evaluation(metrics, answers, counts, tokenizer.convert_ids_to_tokens(sorted(named)), intervals, odd)
    finally:
        model.train(was_training)


def try_metrics(recipe: Recipe, samples: Samples, tokenizer: Any, template: Jinja) -> None:
    """Call each metric of the user with the expected answer of the first sample, before the model is loaded.

    With ``tool_calls`` the calls of all expected answers are read, as ``template`` writes them.

    Raises:
        MetricError: one fails.
        UserError: there are no calls that can be read.
    """
    own = [Metric(name) for name in recipe.metrics if is_own(name)]
    if own and recipe.predict_with_generate and recipe.train_on != "all" and len(samples):
        expected = reference_of(tokenizer, samples, 0)
        for metric in own:
            metric.values(
                expected, ANY_ANSWER if expected is None else expected, samples.data_rows([0]).get(0), samples.origin(0)
            )
    if TOOL_CALLS in recipe.metrics and recipe.predict_with_generate:
        _check_calls(call_reader(tokenizer, template), samples, tokenizer, recipe.train_on)


def _check_calls(reader: CallReader, samples: Samples, tokenizer: Any, train_on: str) -> None:
    num_calls = 0
    for i in _references(samples, train_on)[0].tolist():
        prompt, reference = samples.prompt(i)
        try:
            num_calls += len(reader.read(tokenizer.decode(prompt), text_of(tokenizer, reference)))
        except MalformedCall as error:
            fix = "correct the row, or leave tool_calls out of --metrics"
            raise UserError(samples.origin(i), f"its last answer has a malformed call: {error}", fix=fix) from None
    if not num_calls:
        found = "tool_calls, but no conversation to evaluate on ends with a call"
        raise UserError("metrics", found, "an assistant's message with tool_calls, last", "leave it out")


def _play(
    policy: Policy,
    data: Data,
    samples: Samples,
    stops: set[int],
    recipe: Recipe,
    progress: Progress,
    is_stopping: Callable[[], bool],
) -> tuple[list[Trajectory], dict[str, float]]:
    """Play every prompt with the tools, or for its rewards, ``num_return_sequences`` times.

    Returns:
        What ``_generate`` yields; and metrics of all ranks' trajectories.
    """
    ranks = policy.processes
    with closing(open_environment(recipe, data, samples, policy.tokenizer, is_stopping)) as environment:
        stops = stops | (set() if environment.end is None else {environment.end})
        sampling = Sampling(recipe.temperature, recipe.top_p)
        sampler = OwnModel(policy, recipe, sampling, stops, pad_id(policy.tokenizer), samples.media_codec, progress)
        started = [
            environment.start((0, i, k)) for i in range(len(samples)) for k in range(recipe.num_return_sequences)
        ]
        played = play(environment, sampler, started, recipe.max_new_tokens, samples.media_with_origin, ranks, progress)
        environment.say_failures(played)
        metrics = lengths(played) | by_reward(played, environment.keys)
    if recipe.rewards:
        metrics["reward"] = float(np.nanmean([each.reward for each in played]))
    return [each for each in played if each.num_written and each.sample % ranks.count == ranks.index], metrics


def _generate(
    policy: Policy, samples: Samples, stops: set[int], recipe: Recipe, progress: Progress
) -> Iterator[Trajectory]:
    """Answer every prompt, ``num_return_sequences`` times. Yields this rank's answers, each as a trajectory."""
    accelerator, ranks, batch_size = policy.accelerator, policy.processes, recipe.eval_batch_size
    num = recipe.num_return_sequences
    mine = np.arange(ranks.index, len(samples), ranks.count)
    # Samples of similar length share a call. Every rank makes the same number of calls, because each call gathers
    # sharded weights.
    mine = mine[np.argsort(samples.lengths[mine], kind="stable")]
    keys = [(i, draw) for i in mine.tolist() for draw in range(num)]
    num_calls = math.ceil(math.ceil(len(samples) / ranks.count) * num / batch_size)
    with torch.no_grad(), without_cudnn_attention(), generating(accelerator, policy.model) as generate:
        for call in progress(range(num_calls), "evaluation answers", num_calls):
            of_call = keys[call * batch_size : (call + 1) * batch_size]
            # A rank without a sample left generates for the first one, and nobody reads that answer.
            requests = [
                Request(samples.prompt(i).ids, (i, draw), recipe.max_new_tokens, samples.media_with_origin(i))
                for i, draw in of_call or [(0, 0)]
            ]
            completions = generate_answers(
                generate,
                requests,
                stops=stops,
                pad_token_id=pad_id(policy.tokenizer),
                sampling=Sampling(recipe.temperature, recipe.top_p),
                seed=recipe.seed,
                device=accelerator.device,
                media_codec=samples.media_codec,
            )
            for key, request, completion in zip(of_call, requests, completions, strict=False):
                trajectory = Trajectory((0, *key), [Segment([*request.ids], 0.0)])
                append_turn(trajectory, completion)
                yield trajectory


def _score(
    policy: Policy, samples: Samples, recipe: Recipe, metrics: Sequence[Metric], trajectories: Iterable[Trajectory]
) -> tuple[list[Answer], list[np.ndarray], int]:
    """Compute metrics of answers: the last turns of this rank's trajectories.

    Returns:
        The first answers to the first ``NUM_SHOWN`` prompts; the numbers of each answer for each of ``metrics``,
        float64 [samples, answers, num_values]; and over all ranks the number of truncated answers, whose reference
        fits into ``max_new_tokens``.

    Raises:
        MetricError: on all ranks, after all answers, the first one in the order of the samples.
    """
    ranks, tokenizer = policy.processes, policy.tokenizer
    mine = np.arange(ranks.index, len(samples), ranks.count)
    num_truncated = torch.zeros((), dtype=torch.float64, device=float64_device(policy.accelerator.device))
    num_values = [metric.num_values for metric in metrics]
    values = np.zeros((len(samples), recipe.num_return_sequences, sum(num_values)))  # first those of this rank
    wants_rows = any(is_own(metric.name) for metric in metrics)
    data_rows: Any = samples.data_rows(mine.tolist()) if wants_rows else {}
    shown: dict[int, Answer] = {}
    failed: dict[int, list[Problem]] = {}
    for trajectory in trajectories:
        (_, i, draw), (*before, last) = trajectory.key, [ids for ids, _ in trajectory.segments]
        reference = samples.prompt(i).reference
        texts = reference_of(tokenizer, samples, i), text_of(tokenizer, last, trajectory.outcome != "max_new_tokens")
        prompt = tokenizer.decode([*chain.from_iterable(before)])
        try:
            given = *texts, data_rows.get(i), samples.origin(i), prompt
            values[i, draw] = [value for metric in metrics for value in metric.values(*given)]
        except MetricError as error:
            failed.setdefault(i, error.problems)
        num_truncated += not trajectory.ended and len(reference) <= recipe.max_new_tokens
        if i < NUM_SHOWN and not draw:
            shown[i] = Answer(
                samples.shown(tokenizer.decode(before[0])),
                *texts,
                pictures=[jpeg for media in samples.media(i)[:MOST_PICTURES] if (jpeg := small(*media, SIDE))],
                conversation=conversation(trajectory, tokenizer) if recipe.has_tools else "",
                reward=trajectory.reward if recipe.rewards and np.isfinite(trajectory.reward) else None,
            )
    if faults := dict(gather_object([*failed.items()])):
        raise MetricError(*faults[min(faults)])
    for ids_of_rank, of_rank in gather_object([(mine, values[mine])]):
        values[ids_of_rank] = of_rank
    answers = [answer for _, answer in sorted(gather_object([*shown.items()]))]
    return answers, np.split(values, np.cumsum(num_values)[:-1], axis=2), int(ranks.sum(num_truncated).item())


def _references(samples: Samples, train_on: str) -> tuple[np.ndarray, set[int]]:
    """Return the samples that have a prompt, int64, and the last tokens of their references.

    With ``train_on`` "all" there are none: the prompt is trained on, too.
    """
    if train_on == "all":
        return np.array([], np.int64), set()
    starts, ends = samples.answer_spans.T
    with_prompt = np.flatnonzero(starts)
    return with_prompt, {int(samples[i][0][ends[i] - 1]) for i in np.flatnonzero(starts * (ends > starts)).tolist()}
