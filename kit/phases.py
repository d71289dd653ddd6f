"""The phases of a run. Messages about ranks that hang and about out of memory say which phase the run was in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a run: its names in messages, and what it keeps in memory."""

    doing: str  # as in "rank 1 loading the model"
    noun: str = ""  # as in "out of memory in loading"
    # Full names of functions that run only in this phase: a traceback that contains one of them shows the phase.
    functions: tuple[str, ...] = ()


STARTING = Phase("starting")
LOADING = Phase(
    "loading the model",
    "loading",
    (
        "kit.model.load.build_model",
        "kit.strategy.accelerator.prepare",
        "kit.checkpoint.load.load_checkpoint",
        # Checks with a few tokens: if these do not fit, the weights hardly do.
        "kit.train.head_proof.prove_head",
        "kit.train.isolation.check_isolation",
    ),
)
REFERENCE = Phase("computing the reference", "the reference's forward passes", ("kit.train.precompute.add_references",))
TEACHER = Phase("asking the teacher", "the teacher's forward passes", ("kit.train.stored_teacher.store_teacher",))
READING = Phase("reading data", "reading data", ("kit.data.feed.feed.take", "kit.data.feed.stream.take"))
ROLLING_OUT = Phase("rolling out", "a rollout", ("kit.train.rollouts.take",))
TRAINING = Phase("training", "training")
FORWARD = Phase("training", "the forward pass")
COMPARING = Phase(
    "training", "a pass without gradients", ("kit.train.reference.with_references", "kit.train.preference.estimate_kl")
)
BACKWARD = Phase("training", "the backward pass", ("torch.autograd.backward",))
UPDATING = Phase("training", "the optimiser's step", ("accelerate.optimizer.step",))
EVALUATING = Phase("evaluating", "evaluation", ("kit.evaluate.evaluate",))
GENERATING = Phase("evaluating", "generation", ("transformers.generation.utils.generate",))
SAVING = Phase("saving", "saving", ("kit.checkpoint.save.save", "kit.checkpoint.save.wait"))
WRITING_FINAL = Phase("writing the final model", "writing the final model", ("kit.export.final.save_final",))

_TRACED = (
    LOADING,
    REFERENCE,
    TEACHER,
    READING,
    ROLLING_OUT,
    COMPARING,
    BACKWARD,
    UPDATING,
    EVALUATING,
    GENERATING,
    SAVING,
    WRITING_FINAL,
)
BY_FUNCTION = {name: phase for phase in _TRACED for name in phase.functions}
