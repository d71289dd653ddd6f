"""Try tensor and expert parallelism of transformers on tiny models, beside one process. Prints a line of JSON per case.

    python benchmarks/tensor_parallelism.py

Each case takes three steps of AdamW in float32 over gloo and reports the largest differences from one process: of the
losses and gradient norms, relative; of the trained weights; and of the next loss of what was saved, opened again by
one process. What fails is reported with the first line of its error.
"""

import json
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mixtral": SHAPE | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SHAPE | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp_size": 2},
    "fsdp 2 x tp 2": {"fsdp_size": 2, "tp_size": 2},
    "ep 2, tp 2": {"tp_size": 2, "ep_size": 2},
    "ep 2, fsdp 2": {"fsdp_size": 2, "ep_size": 2},
}
TARGETS = {"lora": "q_proj k_proj v_proj o_proj", "lora without o_proj": "q_proj k_proj v_proj"}
CASES = [
    (family, method, layout)
    for family in FAMILIES
    for method in ("full", *TARGETS)
    for layout in LAYOUTS
    if layout.startswith("ep") <= (family != "llama") and (layout != "fsdp 2 x tp 2" or family == "llama")
]
STEPS, RATE = 3, 1e-2


def opened(folder: Path, method: str, layout: dict[str, Any] | None) -> Any:
    """Open the model, with adapters for LoRA whose weights are the same on each rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    more = {} if layout is None else {"distributed_config": DistributedConfig(**layout)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)
    if method in TARGETS:
        torch.manual_seed(1)
        targets = TARGETS[method].split()
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets))
    return model.train()


def whole(tensor: Any) -> torch.Tensor:
    """A parameter, gathered if it is sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(model: Any, ids: torch.Tensor, num_parts: int, part: int) -> tuple[list[float], list[float]]:
    """Train on a part of the rows [B, T]. Returns the losses over all rows, and the gradient norms."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    own = ids.chunk(num_parts)[part]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        norms.append(sum(whole(each.grad).square().sum().item() for each in parameters) ** 0.5)
        optimizer.step()
        mean = loss.detach().clone()
        if num_parts > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses, norms


def first_line(error: Exception) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def tried(rank: int, world_size: int, port: int, folder: Path, case: tuple[str, str, str]) -> None:
    """Run a case on one rank; rank 0 writes what was found."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    family, method, layout = case
    ids = torch.randint(320, (4, 24), generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"family": family, "method": method, "layout": layout}
    stage = "baseline"
    try:
        one = opened(folder / family, method, None)
        expected, norms = trained(one, ids, 1, 0)
        after = one(input_ids=ids, labels=ids).loss.item()
        stage = "open"
        model = opened(folder / family, method, LAYOUTS[layout])
        stage = "train"
        num_parts = LAYOUTS[layout].get("fsdp_size", 1)
        own, own_norms = trained(model, ids, num_parts, rank // (world_size // num_parts))
        try:
            torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 1.0)
        except RuntimeError as error:
            found["clip_grad_norm_"] = first_line(error)
        found["losses"] = max(abs(a / b - 1) for a, b in zip(own, expected, strict=True))
        found["norms"] = max(abs(a / b - 1) for a, b in zip(own_norms, norms, strict=True))
        stage = "gather"
        theirs = dict(one.named_parameters())
        pairs = [(whole(each), theirs[name]) for name, each in model.named_parameters() if each.requires_grad]
        found["weights"] = max((a - b).abs().max().item() for a, b in pairs)
        stage = "save"
        model.save_pretrained(folder / "saved")
        dist.barrier()
        stage = "open again"
        if method in TARGETS:
            from peft import PeftModel

            again: Any = PeftModel.from_pretrained(opened(folder / family, "full", None), folder / "saved")
        else:
            again = opened(folder / "saved", "full", None)
        found["saved"] = abs(again(input_ids=ids, labels=ids).loss.item() / after - 1)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found |= {"failed": stage, "error": first_line(error), "at": f"{Path(place.filename).name}:{place.lineno}"}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)  # a rank that waits in a collective is not waited for


def main() -> None:
    """Run all cases."""
    import peft  # noqa: F401 -- processes are forked, so that imports are made once
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        with tempfile.TemporaryDirectory() as name:
            folder, (family, _, layout) = Path(name), case
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(
                folder / family
            )
            sizes = LAYOUTS[layout]
            world_size = sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1)
            processes = [
                mp.get_context("fork").Process(target=tried, args=(rank, world_size, 29600 + number, folder, case))
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(120)
                process.kill()
            file = folder / "found.json"
            print(file.read_text() if file.exists() else json.dumps({"case": case, "failed": "no answer"}), flush=True)


if __name__ == "__main__":
    main()
