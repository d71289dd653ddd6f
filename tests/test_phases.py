"""Every phase of a run is on the one list, in words of its own, and its functions exist."""

import accelerate.optimizer
import torch
import transformers.generation.utils

from kit import evaluate, phases
from kit.checkpoint import load as checkpoint
from kit.checkpoint import save as saver
from kit.data.feed import feed, stream
from kit.export import final as export
from kit.model import load as model
from kit.phases import BY_FUNCTION, Phase
from kit.strategy import accelerator as strategy
from kit.train import head_proof, isolation, precompute, preference, reference, rollouts, stored_teacher


def test_the_functions_that_show_the_phase_exist():
    holders = {
        "accelerate.optimizer": accelerate.optimizer.AcceleratedOptimizer,
        "transformers.generation.utils": transformers.generation.utils.GenerationMixin,
        "torch.autograd": torch.autograd,
        "kit.checkpoint.save": saver.Saver,
        "kit.data.feed.feed": feed.Feed,
        "kit.data.feed.stream": stream.StreamFeed,
        "kit.train.preference": preference.KahnemanTversky,
        "kit.train.rollouts": rollouts.Rollouts,
    }
    modules = (
        checkpoint,
        evaluate,
        export,
        head_proof,
        isolation,
        model,
        precompute,
        reference,
        stored_teacher,
        strategy,
    )
    holders |= {module.__name__: module for module in modules}
    for name in BY_FUNCTION:
        module, _, function = name.rpartition(".")
        assert callable(getattr(holders[module], function)), name


def test_every_function_shows_its_phase_and_no_other():
    shown = [name for phase in vars(phases).values() if isinstance(phase, Phase) for name in phase.functions]
    assert sorted(shown) == sorted(BY_FUNCTION)
