"""The ranks of a command that runs a model: process group, load plan, and the guard that explains failures."""

from collections.abc import Sequence
from functools import partial

from kit.config.recipe import Recipe
from kit.failures.guard import Guard
from kit.memory.out_of_memory import explain
from kit.strategy.accelerator import start
from kit.strategy.processes.agreement import Fact
from kit.strategy.topology import Topology


class Session:
    """The ranks of a command that runs a model. Every rank creates one.

    Attributes:
        accelerator: the only one of the process.
        load_plan: how this process loads weights.
        guard: explains failures.
        enter: notes that this rank begins a phase: ``enter(phase, step=0)``, see ``Watch.enter``.
        progress: wraps an iterable in a progress bar; takes the iterable, a name and the number of items.
    """

    def __init__(self, recipe: Recipe, topology: Topology, facts: Sequence[Fact] = (), trains: bool = False) -> None:
        """Join the ranks. Raises as ``kit.strategy.accelerator.start`` does; ``facts`` are its argument."""
        self.topology = topology
        self.accelerator, self.load_plan = start(recipe, topology, facts)
        explain_memory = partial(explain, recipe=recipe, topology=topology, trains=trains)
        self.guard = Guard(self.accelerator, recipe.ddp_timeout, explain_memory, trains)
        self.enter = self.guard.enter
        self.progress = self.guard.progress
