"""Settings of the objective."""

from functools import partial
from typing import Literal

from pydantic import BaseModel

from kit.config.fields import STRICT, option

_identity = partial(option, "Objective", identity=True)


class ObjectiveSettings(BaseModel):
    """What a step minimises. ``OBJECTIVES`` in kit/train/objective.py has the class of each name."""

    model_config = STRICT

    objective: Literal["sft"] = _identity("sft", "what is minimised; sft: cross-entropy of the supervised tokens")
