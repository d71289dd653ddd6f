"""Measure how much packed samples differ from the same samples alone, with your model and data, in fp32 on a CPU.

    python benchmarks/isolation.py --model_name_or_path M --dataset D --max_length 512 [any finetune flag]

For the first packs of the run it prints: the largest absolute difference of a logit between a sample in its pack and
the sample alone; the same if nothing separates the samples of a pack (a control, which must be large); and the largest
relative difference between the loss of a pack and that of its samples in padded rows.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit import preflight
from kit.config.command_line import read_recipe
from kit.data.feed.batches import Collator
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan

NUM_PACKS = 10


def main() -> None:
    checked = preflight.check(read_recipe([*sys.argv[1:], "--packing", "--method", "full"]))
    recipe, data = checked.recipe, checked.data
    packs = [item for item in data.order.batch(0) if len(item) > 1][:NUM_PACKS]
    print(f"{len(packs)} packs of {sum(map(len, packs))} samples\n")
    print("| attention | worst logit, packed against alone | leaking control | loss, packed against padded |")
    print("|---|---|---|---|")
    for implementation in ("sdpa", "varlen"):
        chosen = recipe.model_copy(update={"attn_implementation": implementation})
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        model = build_model(chosen, open_config(chosen), plan, packing=True).eval()
        worst = np.zeros(3)
        with torch.no_grad():
            for pack in packs:
                worst = np.maximum(worst, differences(model, data.train, pack))
        print(f"| {implementation} | {worst[0]:.1e} | {worst[1]:.2f} | {worst[2]:.1e} |")


def differences(model: torch.nn.Module, samples: object, pack: np.ndarray) -> tuple[float, float, float]:
    """Return the largest logit difference, that of the control, and the relative difference of the loss."""
    batch = Collator(1, 0, packing=True, max_length=512).collate(samples, [pack])
    forward = {key: value for key, value in batch.model_inputs().items() if "target" not in key}
    if model.config._attn_implementation == "sdpa":
        forward = {key: forward[key] for key in ("input_ids", "position_ids")}
    packed = model(**forward, use_cache=False).logits[0]
    leaking = model(input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)).logits[0]
    start = 0
    worst = 0.0
    control = 0.0
    for i in pack:
        ids = torch.from_numpy(samples[i][0].astype(np.int64))[None]
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        here = slice(start, start + ids.shape[1])
        worst = max(worst, (packed[here] - alone).abs().max().item())
        control = max(control, (leaking[here] - alone).abs().max().item())
        start += ids.shape[1]
    losses = []
    for items, packing in (([pack], True), (list(pack[:, None]), False)):
        inputs = Collator(len(items), 0, packing, max_length=512).collate(samples, items).model_inputs()
        losses.append(model(**inputs).double().sum().item())
    return worst, control, abs(losses[0] - losses[1]) / losses[1]


if __name__ == "__main__":
    main()
