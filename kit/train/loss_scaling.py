"""Dynamic loss scaling, for fp16: it would round small gradients to zero.

What a step minimises is multiplied by a scale, and its gradients are divided by it before they are clipped. The scale
is a power of 2, so this changes no bit of a gradient that fp16 can hold. If the gradient norm is not finite although
the loss is, gradients overflowed: the step is skipped, and the scale halves. Numbers and rules are those of
``torch.amp.GradScaler``. The norm is global, so all ranks have the same scale.

Promises: the scale follows from the steps before, and checkpoints have its state, so a resume is exact.
"""

INITIAL = 2.0**16
GROWTH_STEPS = 2000  # the scale doubles after so many steps in a row without an overflow
LEAST = 1.0  # gradients that overflow without any scale have another cause


def next_scale(scale: float, good_steps: int, overflowed: bool) -> tuple[float, int]:
    """Return the scale of the next step, and the number of steps without an overflow since it last changed.

    Args:
        scale: of this step, whose loss is finite.
        good_steps: that number before this step.
        overflowed: whether its gradients did, so that it was skipped.
    """
    if overflowed:
        return scale / 2, 0
    return (scale * 2, 0) if good_steps + 1 == GROWTH_STEPS else (scale, good_steps + 1)
