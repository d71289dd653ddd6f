"""The phases of a run. Messages about ranks that hang and about out of memory name the phase."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of a run: its names in messages."""

    doing: str  # as in "rank 1 loading the model"
    noun: str = ""  # as in "out of memory in loading"


STARTING = Phase("starting")
LOADING = Phase("loading the model", "loading")
REFERENCE = Phase("running the reference model", "the reference model's forward passes")
TEACHER = Phase("running the teacher", "the teacher's forward passes")
READING = Phase("reading data", "reading data")
ROLLING_OUT = Phase("generating rollouts", "a rollout")
TRAINING = Phase("training", "training")
EVALUATING = Phase("evaluating", "evaluation")
SAVING = Phase("saving", "saving")
WRITING_FINAL = Phase("writing the final model", "writing the final model")
