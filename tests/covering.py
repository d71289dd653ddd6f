"""Rows of options in which every pair of values meets: a covering array of strength two, made greedily."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]  # of two (factor, value)


class Rules:
    """Which values do not meet: of each rule all factors, whose values are separated by |."""

    def __init__(self, rules: Sequence[Mapping[str, str]]) -> None:
        self._others: dict[tuple[str, str], list[dict[str, list[str]]]] = defaultdict(list)
        for rule in rules:
            split = {factor: values.split("|") for factor, values in rule.items()}
            for factor, values in split.items():
                others = {other: each for other, each in split.items() if other != factor}
                for value in values:
                    self._others[factor, value].append(others)

    def allow(self, factor: str, value: str, row: Row) -> bool:
        """Whether a row to which no rule applies may have this value too."""
        return not any(
            all(row.get(other) in values for other, values in each.items()) for each in self._others[factor, value]
        )


def _pairs_of(row: Row) -> Iterator[Pair]:
    return map(frozenset, combinations(row.items(), 2))


def _possible_pairs(factors: Mapping[str, Sequence[str]], rules: Rules) -> set[Pair]:
    values = [(factor, value) for factor, each in factors.items() for value in each if rules.allow(factor, value, {})]
    return {frozenset((a, b)) for a, b in combinations(values, 2) if a[0] != b[0] and rules.allow(*b, dict([a]))}


def covering_rows(
    factors: Mapping[str, Sequence[str]], rules: Rules, covered: Sequence[Row] = (), candidates: int = 12
) -> list[Row]:
    """Rows that cover every possible pair that no row of ``covered`` has; each takes as many as a greedy search finds.

    The rows are the same in every process. A pair of which no allowed row is found is left out: rules of more than two
    factors can forbid it.
    """
    rng = random.Random(0)
    left = _possible_pairs(factors, rules).difference(*map(_pairs_of, covered))
    order = sorted(left, key=sorted)  # a set of strings has another order in each process
    rng.shuffle(order)
    rows = []
    while order := [pair for pair in order if pair in left]:
        made = [row for _ in range(candidates) if (row := _complete(dict(order[0]), factors, rules, left, rng))]
        if not made:
            left.discard(order[0])
            continue
        rows.append(max(made, key=lambda row: sum(pair in left for pair in _pairs_of(row))))
        left -= set(_pairs_of(rows[-1]))
    return rows


def _complete(
    row: Row, factors: Mapping[str, Sequence[str]], rules: Rules, left: set[Pair], rng: random.Random
) -> Row | None:
    """Give each missing factor, in random order, the value that meets most uncovered partners."""
    missing = [factor for factor in factors if factor not in row]
    rng.shuffle(missing)
    for factor in missing:
        allowed = [value for value in factors[factor] if rules.allow(factor, value, row)]
        if not allowed:
            return None
        rng.shuffle(allowed)
        row[factor] = max(
            allowed, key=lambda value: sum(frozenset(((factor, value), other)) in left for other in row.items())
        )
    return {factor: row[factor] for factor in factors}
