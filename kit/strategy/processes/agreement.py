"""Check that all ranks have the same run, in one exchange, before they connect to each other or read a weight.

Each rank writes its facts to the store; rank 0 compares them, and all ranks read the result.

Promises: every rank raises the same problems, each with the machines that differ; a problem that one rank found on its
machine is raised by all.
"""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from kit.system.errors import Problem, listed

_MOST_VALUES = 4  # in a message
_LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class Fact:
    """A value that must be equal on all ranks."""

    name: str  # a field of the recipe, a library, an environment variable
    value: Any  # JSON
    fix: str  # what to do if it differs


def exchange(store: Any, rank: int, world: int, facts: Sequence[Fact], problems: Sequence[Problem]) -> list[Problem]:
    """Compare facts with those of all ranks. Called by all ranks.

    Args:
        store: a key-value store that only the ranks of this start use; ``get`` waits for a key.
        problems: of this machine's network.

    Returns:
        Problems, the same on all ranks.
    """
    own = [socket.gethostname(), list(map(asdict, facts)), list(map(asdict, problems))]
    store.set(f"facts/{rank}", json.dumps(own))
    if rank:
        found = [Problem(**each) for each in json.loads(store.get("result"))]
        store.set(f"read/{rank}", "here")
        return found
    hosts, all_facts, network = zip(*(json.loads(store.get(f"facts/{each}")) for each in range(world)), strict=True)
    found = list(dict.fromkeys(Problem(**problem) for each in network for problem in each))
    found += compare_facts([[Fact(**fact) for fact in each] for each in all_facts], hosts)
    store.set("result", json.dumps([asdict(problem) for problem in found]))
    if found:  # this rank ends, and the store may end with it
        for other in range(1, world):
            store.get(f"read/{other}")
    return found


def compare_facts(all_facts: Sequence[Sequence[Fact]], hosts: Sequence[str]) -> Iterator[Problem]:
    """Return a problem for each fact that differs between ranks.

    Args:
        all_facts: of each rank; all have the same names, except those that only some machines have.
        hosts: the machine of each rank.
    """

    fixes = {fact.name: fact.fix for own in all_facts for fact in own}
    shown = [{fact.name: _shown(fact.value) for fact in own} for own in all_facts]
    for name, fix in fixes.items():
        ranks: dict[tuple[str, str], list[str]] = {}  # by value and host
        for rank, own in enumerate(shown):
            ranks.setdefault((own.get(name, "not set"), hosts[rank]), []).append(str(rank))
        if len({value for value, _ in ranks}) == 1:
            continue
        parts = [f"{value} on {host} (rank {listed(where)})" for (value, host), where in ranks.items()]
        yield Problem(name, listed(parts, _MOST_VALUES), "the same on every machine", fix)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({xxhash.xxh3_64_hexdigest(text.encode())[:8]})"
