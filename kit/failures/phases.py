"""What a run is doing: the one list of phases, for messages about ranks that hang and about memory that runs out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A part of a run, by the words for it and what is in memory meanwhile."""

    doing: str  # as in "rank 1 loading the model"
    noun: str = ""  # as in "out of memory in loading"
    # With their modules, functions that run in this phase only: a traceback through one of them names the phase.
    functions: tuple[str, ...] = ()
    activations: bool = False  # of a forward pass
    mid_step: bool = False  # gradients and optimiser states may still be to come


STARTING = Phase("starting")
LOADING = Phase(
    "loading the model",
    "loading",
    (
        "kit.model.load.build_model",
        "kit.strategy.accelerator.prepare",
        "kit.checkpoint.load.load_checkpoint",
    ),
)
READING = Phase(
    "reading data",
    "reading data",
    ("kit.data.feed.feed.take", "kit.data.feed.stream.take"),
    activations=True,
    mid_step=True,
)
TRAINING = Phase("training", "training", activations=True, mid_step=True)
FORWARD = Phase("training", "the forward pass", activations=True, mid_step=True)
BACKWARD = Phase("training", "the backward pass", ("torch.autograd.backward",), activations=True, mid_step=True)
UPDATING = Phase("training", "the optimiser's step", ("accelerate.optimizer.step",), mid_step=True)
EVALUATING = Phase("evaluating", "evaluation", ("kit.evaluate.evaluate",), activations=True)
GENERATING = Phase("evaluating", "generation", ("transformers.generation.utils.generate",), activations=True)
SAVING = Phase("saving", "saving", ("kit.checkpoint.save.save", "kit.checkpoint.save.wait"))
WRITING_FINAL = Phase("writing the final model", "writing the final model", ("kit.export.final.save_final",))

PHASES = (
    STARTING,
    LOADING,
    READING,
    TRAINING,
    FORWARD,
    BACKWARD,
    UPDATING,
    EVALUATING,
    GENERATING,
    SAVING,
    WRITING_FINAL,
)
BY_FUNCTION = {name: phase for phase in PHASES for name in phase.functions}
