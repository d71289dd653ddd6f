"""Rows of options in which every pair of values meets: a covering array of strength two, made greedily."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]  # of two (factor, value)


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs of values that meet in a row."""
    return map(frozenset, combinations(row.items(), 2))


def possible_pairs(factors: Mapping[str, Sequence[str]], is_allowed: Callable[[Row], bool]) -> set[Pair]:
    """The pairs that no rule forbids. ``is_allowed`` answers for rows in which factors are still missing, too."""
    values = [(factor, value) for factor, each in factors.items() for value in each]
    return {frozenset((a, b)) for a, b in combinations(values, 2) if a[0] != b[0] and is_allowed(dict((a, b)))}


def covering_rows(
    factors: Mapping[str, Sequence[str]],
    is_allowed: Callable[[Row], bool],
    covered: Sequence[Row] = (),
    candidates: int = 12,
) -> list[Row]:
    """Rows that cover every possible pair that no row of ``covered`` has; each takes as many as a greedy search finds.

    The rows are the same in every process. A pair of which no allowed row is found is left out: rules of more than two
    factors can forbid it.
    """
    rng = random.Random(0)
    left = possible_pairs(factors, is_allowed).difference(*map(pairs_of, covered))
    order = sorted(left, key=sorted)  # a set of strings has another order in each process
    rng.shuffle(order)
    rows = []
    while order := [pair for pair in order if pair in left]:
        made = [row for _ in range(candidates) if (row := _complete(dict(order[0]), factors, is_allowed, left, rng))]
        if not made:
            left.discard(order[0])
            continue
        rows.append(max(made, key=lambda row: sum(pair in left for pair in pairs_of(row))))
        left -= set(pairs_of(rows[-1]))
    return rows


def _complete(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    is_allowed: Callable[[Row], bool],
    left: set[Pair],
    rng: random.Random,
) -> Row | None:
    """Give each missing factor, in random order, the value that meets most uncovered partners."""
    missing = [factor for factor in factors if factor not in row]
    rng.shuffle(missing)
    for factor in missing:
        allowed = [value for value in factors[factor] if is_allowed(row | {factor: value})]
        if not allowed:
            return None
        rng.shuffle(allowed)
        row[factor] = max(
            allowed, key=lambda value: sum(frozenset(((factor, value), other)) in left for other in row.items())
        )
    return {factor: row[factor] for factor in factors}
