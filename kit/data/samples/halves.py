"""Samples of several sequences, or with a label: how they are encoded, cut and stored. Pure.

Promises:

- The prompt has the same tokens in both halves of a pair, and the answers differ. What does not is a problem.
- Cutting takes tokens of the prompt, the same from both halves. No answer is cut: a pair that is too long for that is
  left out.
"""

from collections.abc import Sequence

from kit.data.chat.formats import Sample
from kit.data.chat.tokens import Encoded
from kit.system.errors import Problem
from kit.tasks.spec import Rows

ANSWERS = ("chosen", "rejected", "completion")
PROMPT_CUT = "the start of the prompt was cut off, so that no answer is cut"
# Of a pair the prompt with each of its answers; of texts that belong to each other each; of any other sample one.
Halves = tuple[Encoded, ...]


def parts_to_encode(sample: Sample, wanted: Rows) -> list[Sample]:
    """Return the samples that are encoded for ``sample``: for a pair, its prompt with each of its answers."""
    if wanted == "answers":
        return [sample]
    if "plain" in sample:
        return [{"plain": texts} for texts in sample["plain"]]
    names = [name for name in ANSWERS if name in sample]
    shared = {key: value for key, value in sample.items() if key not in (*names, "label", "values")}
    return [{**shared, "completion": sample[name]} for name in names]


def joined(sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Halves] | Problem:
    """Join what the parts of a sample became. Returns a ``Problem`` if it cannot be learned from."""
    if "plain" in sample or sample.get("completion") == []:
        if problem := next((each for each in encoded if isinstance(each, Problem)), None):
            return problem
        texts = tuple(each[0] for each in encoded if not isinstance(each, Problem))
        if not all(each.input_ids for each in texts):
            return Problem("", "a text without a token", "text")
        if len(texts) == 1 or "values" not in sample:
            return [texts]
        better, *worse = texts
        if any(each.input_ids == better.input_ids for each in worse):
            return Problem("", "the worse text has the same tokens as the better one", "another text")
        return [(better, each) for each in worse]
    names = [name for name in ANSWERS if name in sample]
    halves: Halves = ()
    for name, half in zip(names, encoded, strict=True):
        if isinstance(half, Problem):
            return half
        if len(half) > 1:
            found = "the chat template rewrites earlier turns, so these answers have no text in common"
            return Problem(name, found, "one answer", "make a row of each, with the turns before it as the prompt")
        if not any(half[0].weights[1:]):
            return Problem(name, "nothing of it is supervised", "an answer with a weight")
        halves += (half[0],)
    if len(halves) == 1:
        return [halves]
    chosen, rejected = halves
    num_prompt = first_target(chosen.weights)
    if num_prompt != first_target(rejected.weights) or chosen.input_ids[:num_prompt] != rejected.input_ids[:num_prompt]:
        found = "the prompt before it has other tokens than before the chosen answer"
        return Problem("rejected", found, "the same prompt; turns that are only read are part of it, up to an answer")
    if chosen.input_ids == rejected.input_ids:
        return Problem("rejected", "the same tokens as chosen", "another answer")
    return [halves]


def without_start_of_prompt(halves: Halves, max_length: int, bos: int | None) -> Halves | None:
    """Cut tokens of the prompt until the longest half has ``max_length``. None if the answers leave no prompt."""
    num_over = max(len(half.input_ids) for half in halves) - max_length
    num_first = 1 if halves[0].input_ids[0] == bos else 0  # BOS stays first
    # At least one token must predict the first of the answer.
    if num_over > first_target(halves[0].weights) - max(num_first, 1):
        return None
    start = num_first + num_over
    return tuple(
        Encoded(half.input_ids[:num_first] + half.input_ids[start:], half.weights[:num_first] + half.weights[start:])
        for half in halves
    )


def first_target(weights: Sequence[float]) -> int:
    """Return the number of tokens before the first supervised one that has a token before it."""
    return next(i for i, weight in enumerate(weights) if i and weight)


def shortened(encoded: Encoded, max_length: int, special: set[int], from_start: bool) -> Encoded:
    """Cut a text in its middle, or at its start behind the first token. The special tokens that end it stay."""
    ids = encoded.input_ids
    if len(ids) <= max_length:
        return encoded
    if from_start:
        first = 1 if ids[0] in special else 0
        kept = ids[:first] + ids[len(ids) - max_length + first :]
    else:
        num_last = next(i for i, id_ in enumerate(reversed([None, *ids])) if id_ not in special)
        num_last = min(num_last, max_length - 1)
        kept = ids[: max_length - num_last] + ids[len(ids) - num_last :]
    return Encoded(kept, [1.0] * max_length)


def pooled(halves: Halves, pooling: str) -> Halves:
    """Return halves whose weights are 1 for the tokens of which a head reads the states: the last one, or all."""
    last = pooling == "last"
    return tuple(
        Encoded(half.input_ids, [0.0 if last else 1.0] * (len(half.input_ids) - 1) + [1.0], half.remarks)
        for half in halves
    )


def in_a_row(halves: Halves) -> Encoded:
    """Return the tokens of all halves as one sample. Nothing predicts the first token of a half."""
    first, *others = halves
    for other in others:
        first = Encoded(first.input_ids + other.input_ids, [*first.weights, 0.0, *other.weights[1:]])
    return first
