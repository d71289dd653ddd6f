"""Check pairs of answers, and answers with a label, for what misleads an objective: length, repeats, contradictions."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import xxhash

from kit.config.settings.objective import ObjectiveSettings
from kit.data.samples.samples import Samples
from kit.tools.report.data_checks import NUM_ORIGINS, Finding, counted, listed

MAX_COMPARED = 100_000  # samples whose prompts and answers are compared, spread over the data
MIN_FOR_SHARE = 20  # pairs, from which on a share says something
MIN_FOR_NEARLY = 8  # tokens of an answer; of a shorter one, one token is much
# From this share of pairs on, the longer answer wins so often that an objective may learn the length and little else.
ONE_SIDED = 0.7
# The weighted number of answers with the label true over that of the others. Equation 9 of the paper on KTO,
# https://arxiv.org/abs/2402.01306, whose first version said 4/3 instead of 3/2.
BALANCED = (1.0, 1.5)


def check_preferences(train: Samples, settings: ObjectiveSettings) -> list[Finding]:
    """Run the checks of pairs or of answers with a label; no finding for any other samples."""
    if train.preferences is None:
        return []
    compared = np.linspace(0, len(train) - 1, min(len(train), MAX_COMPARED)).round().astype(int).tolist()
    if train.are_rated:
        return [_balance(train, settings), _rated_lengths(train), _both_labels(train), _prompts(train, compared)]
    return [_pair_lengths(train), *_pairs(train, compared), _prompts(train, compared)]


def answer_lengths(train: Samples) -> dict[str, np.ndarray]:
    """Return the tokens of answers, int [N], by what an answer is: chosen or rejected, or its label true or false.

    The tokens are those from the first supervised one on. A label that no answer has is left out.
    """
    assert train.preferences is not None and train.labels is not None
    lengths = train.sequence_lengths - train.preferences["prompt_length"][:, None]
    if not train.are_rated:
        return {"chosen": lengths[:, 0], "rejected": lengths[:, 1]}
    by_label = {"label true": lengths[train.labels, 0], "label false": lengths[~train.labels, 0]}
    return {name: values for name, values in by_label.items() if len(values)}


def _pair_lengths(train: Samples) -> Finding:
    chosen, rejected = answer_lengths(train).values()
    num_longer, num_shorter = int((chosen > rejected).sum()), int((chosen < rejected).sum())
    longer, shorter = (f"{num / len(train):.1%}" for num in (num_longer, num_shorter))
    text = f"the chosen answer is longer in {longer} of the pairs and shorter in {shorter}: "
    text += f"{chosen.mean():,.1f} tokens on average, {rejected.mean():,.1f} the rejected"
    num_unequal = num_longer + num_shorter
    is_one_sided = num_unequal >= MIN_FOR_SHARE and max(num_longer, num_shorter) / num_unequal >= ONE_SIDED
    return Finding("look" if is_one_sided else "note", text)


def _pairs(train: Samples, compared: Sequence[int]) -> list[Finding]:
    """Find pairs whose answers nearly agree, and pairs that contradict each other."""
    assert train.preferences is not None
    num_least = train.preferences["prompt_length"] + MIN_FOR_NEARLY
    is_long = (train.sequence_lengths.min(axis=1) >= num_least).tolist()
    nearly: list[int] = []
    by_answers: dict[tuple[int, int], list[int]] = defaultdict(list)  # the samples, by the hashes of their sequences
    for i in compared:
        (chosen, _), (rejected, _) = train.sequences(i)
        nearly += [i] if is_long[i] and _differ_in_one(chosen, rejected) else []
        by_answers[xxhash.xxh3_64_intdigest(chosen.tobytes()), xxhash.xxh3_64_intdigest(rejected.tobytes())].append(i)
    among = _among(train, compared)
    found = Finding("ok", f"no answers of {MIN_FOR_NEARLY} tokens or more differ in one token alone{among}")
    if nearly:
        text = f"{len(nearly):,} of {counted(len(compared), 'pair')} differ in one token alone: training may make both "
        text += "answers less likely (https://arxiv.org/abs/2402.13228)"
        found = Finding("note", text, "nearly-same", nearly)
    both: list[int] = []  # each beside those that contradict it
    for key, samples in by_answers.items():
        if key < key[::-1]:
            both += [*samples, *by_answers[key[::-1]]] if key[::-1] in by_answers else []
    if not both:
        return [found, Finding("ok", f"no pair occurs the other way round too{among}")]
    text = f"{counted(len(both), 'pair')} contradict each other, chosen and rejected the other way round: "
    return [found, Finding("look", text + listed(map(train.origin, both[:NUM_ORIGINS]), len(both)), "both-ways", both)]


def _differ_in_one(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether one token was replaced, put in or left out between two different sequences of ids."""
    if abs(len(first) - len(second)) > 1:
        return False
    shorter = min(len(first), len(second))
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    at = int(differ[0]) if len(differ) else shorter
    skipped = [1, 1] if len(first) == len(second) else [len(first) - shorter, len(second) - shorter]
    return np.array_equal(first[at + skipped[0] :], second[at + skipped[1] :])


def _prompts(train: Samples, compared: Sequence[int]) -> Finding:
    """Find prompts that occur more than once."""
    assert train.preferences is not None
    by_prompt: dict[int, list[int]] = defaultdict(list)
    for i in compared:
        ids = train[i][0][: train.preferences["prompt_length"][i]]
        by_prompt[xxhash.xxh3_64_intdigest(ids.tobytes())].append(i)
    noun = "answer" if train.are_rated else "pair"
    again = sorted((same for same in by_prompt.values() if len(same) > 1), key=len, reverse=True)
    if not again:
        return Finding("ok", f"no two {noun}s have the same prompt{_among(train, compared)}")
    text = f"{counted(len(compared), noun)} have {counted(len(by_prompt), 'prompt')}; one of them has {len(again[0]):,}"
    return Finding("note", text, "same-prompt", [i for same in again for i in same])


def _among(train: Samples, compared: Sequence[int]) -> str:
    return "" if len(compared) == len(train) else f", of the {len(compared):,} that were compared"


def _balance(train: Samples, settings: ObjectiveSettings) -> Finding:
    """Compare the numbers of answers with either label, each times its weight in the loss."""
    assert train.labels is not None
    num_true = int(train.labels.sum())
    num_false = len(train) - num_true
    if not num_true or not num_false:
        only = "true" if num_true else "false"
        return Finding("look", f"all {counted(len(train), 'answer')} have the label {only}: kto learns from both kinds")
    ratio = num_true * settings.desirable_weight / (num_false * settings.undesirable_weight)
    text = f"{num_true / len(train):.1%} of the answers have the label true, and count {ratio:.2g} times as much as "
    text += f"the others; advised: {BALANCED[0]:g} to {BALANCED[1]:g} times (https://arxiv.org/abs/2402.01306)"
    if BALANCED[0] <= round(ratio, 1) <= BALANCED[1]:
        return Finding("ok", text)
    fix = f"--desirable_weight {settings.undesirable_weight * num_false / num_true:.3g}"
    if ratio > 1:
        fix = f"--undesirable_weight {settings.desirable_weight * num_true / num_false:.3g}"
    return Finding("look", f"{text}; {fix} makes it 1")


def _rated_lengths(train: Samples) -> Finding:
    lengths = answer_lengths(train)
    means = ", ".join(f"{values.mean():,.1f} with the {name}" for name, values in lengths.items())
    return Finding("note", f"tokens of an answer on average: {means}")


def _both_labels(train: Samples) -> Finding:
    """Find answers to a prompt that are there with the label true and with the label false."""
    assert train.labels is not None
    _, content, counts = np.unique(train.hashes("ids_hash"), return_inverse=True, return_counts=True)
    num_true = np.bincount(content, weights=train.labels)
    both = np.flatnonzero(((num_true > 0) & (num_true < counts))[content])
    if not len(both):
        return Finding("ok", "no answer has both labels")
    together = both[np.argsort(content[both], kind="stable")].tolist()  # each beside those that contradict it
    origins = listed(map(train.origin, together[:NUM_ORIGINS]), len(together))
    text = f"{counted(len(together), 'sample')} contradict each other, the same answer with both labels: {origins}"
    return Finding("look", text, "both-labels", together)
