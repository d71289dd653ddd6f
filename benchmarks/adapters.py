"""Compare each kind of adapter with peft's own use of it: 20 steps of AdamW in float32, final/ opened by peft, a merge.

    python benchmarks/adapters.py [--model_name_or_path M] [KIND ...]

Prints a Markdown table: the largest relative difference of the loss of a step; the largest difference of a logit
between the model that was trained and ``final/`` as plain peft opens it; and the same of the model that peft merges.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.recipe import Recipe
from kit.export.final import write_model
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STEPS, RATE = 20, 2e-3
# Of kinds that have no usable default for a model of this size.
OPTIONS: dict[str, dict[str, Any]] = {
    "c3a": {"block_size": 32},
    "fourierft": {"n_frequency": 50},
    "ia3": {"feedforward_modules": []},
    "vera": {"r": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default=str(ROOT / "recipes/tiny/model"))
    parser.add_argument("kinds", nargs="*", default=ADAPTER_TYPES)
    args = parser.parse_args()
    print("| adapter_type | loss of 20 steps | final/ opened by peft | merged |\n|---|---|---|---|")
    for name in args.kinds:
        differences = compare(args.model_name_or_path, name, OPTIONS.get(name))
        print(f"| `{name}` | {' | '.join(f'{each:.1e}' for each in differences)} |", flush=True)


def compare(model_name: str, adapter_type: str, options: dict[str, Any] | None) -> tuple[float, float, float]:
    """Return the three differences for one kind."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)

    names = {"model_name_or_path": model_name, "dataset": "none", "adapter_type": adapter_type, "output_dir": "none"}
    recipe = Recipe.model_validate({**names, "adapter_options": options})
    ours = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"), seed=0)
    torch.manual_seed(0)
    theirs = get_peft_model(base(), ours.peft_config["default"])  # type: ignore[arg-type, index]
    theirs.train()
    rows = torch.randint(3, theirs.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(0))
    losses = [trained(model, rows) for model in (ours, theirs)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    ours.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        state = {name: p.detach() for name, p in ours.named_parameters() if p.requires_grad}
        write_model(Path(folder), ours, state, open_tokenizer(recipe), "", None)
        opened = PeftModel.from_pretrained(base(), folder).eval()
        logits = ours(input_ids=rows).logits
        of_final = (opened(input_ids=rows).logits - logits).abs().max().item()
        merged = opened.merge_and_unload(safe_merge=True)
        return worst, of_final, (merged(input_ids=rows).logits - logits).abs().max().item()


def trained(model: torch.nn.Module, rows: torch.Tensor) -> list[float]:
    """Train ``model`` on the same rows in each step, and return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        logits = model(input_ids=rows).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
