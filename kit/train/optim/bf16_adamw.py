"""AdamW on bf16 weights and moments, with stochastic rounding: ``optim: adamw_bf16``.

The update is that of ``torch.optim.AdamW``, computed in float32. A result x between two neighbours in bf16 becomes the
upper one with the probability (x - lower) / (upper - lower), so its mean is x. Rounded to the nearest, an update below
half the distance of the neighbours, 2^-9 to 2^-8 of the weight, would be lost at every step; and the second moment,
which decays by a thousandth, would never decay.

Promises: the random bits are a function of the seed, the step, the number of the weight and the position of the element
in the whole weight. So they are the same on every topology, and after a resume. A value that bf16 has is never changed
by rounding. Runs on any device.
"""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.memory.sizes import UPDATED_TOGETHER
from kit.strategy.weights import own_part, own_start

if TYPE_CHECKING:
    from kit.config.settings.optimisation import OptimSettings


class AdamWBF16(torch.optim.AdamW):
    """AdamW for weights in bf16; with the groups, the state and the names of torch's."""

    def __init__(self, groups: list[dict[str, Any]], *, seed: int, **options: Any) -> None:
        """
        Args:
            seed: of the random bits.
            options: as ``torch.optim.AdamW`` has them.
        """
        super().__init__(groups, foreach=False, **options)
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient, of any dtype."""
        assert closure is None
        everything = [p for group in self.param_groups for p in group["params"]]
        numbers = {p: i for i, p in enumerate(everything)}
        for group in self.param_groups:
            weights: list[torch.Tensor] = []
            others: tuple[list[torch.Tensor], ...] = ([], [], [], [], [])
            self._init_group(group, weights, *others)  # torch's: makes states, and fills the lists
            gradients, firsts, seconds, _, steps = others
            for weight, gradient, first, second, num_steps in zip(
                weights, gradients, firsts, seconds, steps, strict=True
            ):
                num_steps += 1
                step = int(num_steps)
                key = _keys(self._seed, step, len(everything))[numbers[weight]]
                parts = [own_part(each).view(-1) for each in (weight, first, second)]
                parts.append(own_part(gradient).reshape(-1))
                _update(parts, group, step, key, own_start(weight))


def build(
    model: torch.nn.Module, groups: list[dict[str, Any]], settings: "OptimSettings", rate: float, seed: int
) -> AdamWBF16:
    """Build it, see ``kit.train.optim.optim.build_optimizer``."""
    return AdamWBF16(groups, seed=seed, lr=rate, betas=settings.adam_betas, eps=settings.adam_epsilon)


def _update(parts: list[torch.Tensor], group: dict[str, Any], step: int, key: tuple[int, int], start: int) -> None:
    """Update a part of a weight in place, in chunks.

    Args:
        parts: weight, first and second moment in bf16 and gradient, [n] each.
        step: from 1.
        start: position of the first element in the whole weight.
    """
    beta1, beta2 = group["betas"]
    rate, decay, epsilon = group["lr"], group["weight_decay"], group["eps"]
    root = (1 - beta2**step) ** 0.5
    for at in range(0, parts[0].numel(), UPDATED_TOGETHER):
        chunks = [part[at : at + UPDATED_TOGETHER] for part in parts]
        weight, first, second, gradient = (chunk.float() for chunk in chunks)
        weight *= 1 - rate * decay
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.addcdiv_(first, (second.sqrt() / root).add_(epsilon), value=-rate / (1 - beta1**step))
        bits = random_bits(key, start + at, weight.numel(), weight.device)
        # Weight and first moment share bits: each has the right mean, and the next step draws others.
        low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
        for chunk, exact, noise in zip(chunks, (weight, first, second), (low, low, high), strict=False):
            chunk.copy_(stochastic_round(exact, noise))


def stochastic_round(exact: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round finite float32 values stochastically, in place, to bf16 values.

    Args:
        noise: int32, uniform from 0 to 2^16 - 1. With these added, the bits that bf16 lacks carry over to those that it
            has with the right probability; then they are cut off.
    """
    exact.view(torch.int32).add_(noise).bitwise_and_(-(1 << 16))
    return exact


def random_bits(key: tuple[int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 32 random bits, as int32 [count], for each position from ``start`` on: a function of key and position.

    The positions, times an odd number, go through the integer hash ``lowbias32`` of Hash Prospector (Chris Wellons,
    public domain), with the second word of the key added in its middle.
    """
    step = 0x9E3779B9
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.mul_(_signed(step)).add_(_signed(start * step + key[0]))
    bits ^= (bits >> 16) & 0xFFFF  # the shift copies the sign
    bits.mul_(_signed(0x7FEB352D)).add_(_signed(key[1]))
    bits ^= (bits >> 15) & 0x1FFFF
    bits.mul_(_signed(0x846CA68B))
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _signed(value: int) -> int:
    """The int32 that has the lowest 32 bits of ``value``."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@functools.lru_cache(maxsize=2)
def _keys(seed: int, step: int, count: int) -> list[tuple[int, int]]:
    """Two random words of 32 bits for each weight."""
    words = np.random.SeedSequence([seed, step]).generate_state(2 * count)
    return [(int(a), int(b)) for a, b in words.reshape(-1, 2)]
