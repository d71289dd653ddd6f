"""Bytes of tensors that ``kit plan`` predicts for models that read images, beside the kit's step on fake tensors.

    python benchmarks/plan_media.py [--only TEXT]

Each family in the sizes of one of its models, by config alone (``CONFIGS``, or a shape that comes with the kit), but
with four layers of text, so that the encoder is most of it; frozen, and training. One GPU, one row of some 2,000
tokens, most of them of its image.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.simulate import simulate  # noqa: E402
from kit.memory.formulas import predict  # noqa: E402
from kit.memory.workload import Workload  # noqa: E402
from kit.system.errors import TrainingError  # noqa: E402
from kit.tools.plan.models import SHAPES, find_shape  # noqa: E402

GIB = 2**30


def text(kind: str, h: int, f: int, layers: int, heads: int, kv: int, vocab: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": h, "intermediate_size": f, "num_hidden_layers": layers, "vocab_size": vocab}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv, **others}


def siglip(kind: str, size: int, layers: int = 27, patch: int = 14, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": layers, "num_attention_heads": 16}
    return {"model_type": kind, **sizes, "image_size": size, "patch_size": patch, **others}


PIXTRAL = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
PIXTRAL |= {"num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "image_size": 1540}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
CLIP |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768}
INTERN = {"model_type": "internvl_vision"}  # InternViT-300M, as the class has it
GLM_ROPE = {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
# By name: the model's type, its encoder, its text, and other keys.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "LLaVA 1.5 7B": ("llava", CLIP, text("llama", 4096, 11008, 32, 32, 32, 32064), {}),
    "Pixtral 12B": ("llava", PIXTRAL, text("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128), FULL),
    "LLaVA-NeXT, Mistral 7B": ("llava_next", CLIP, text("mistral", 4096, 14336, 32, 32, 8, 32064), {}),
    "LLaVA-OneVision 0.5B": (
        "llava_onevision",
        siglip("siglip_vision_model", 384, 26, vision_use_head=False),
        text("qwen2", 896, 4864, 24, 14, 2, 152000),
        {"tie_word_embeddings": True},
    ),
    "InternVL3 8B": ("internvl", INTERN, text("qwen2", 3584, 18944, 28, 28, 4, 151674), {}),
    "SmolVLM2 2.2B": (
        "smolvlm",
        siglip("smolvlm_vision", 384),
        text("llama", 2048, 8192, 24, 32, 32, 49280),
        {"scale_factor": 3},
    ),
    "Idefics3 8B": (
        "idefics3",
        siglip("idefics3_vision", 364),
        text("llama", 4096, 14336, 32, 32, 8, 128259),
        {"scale_factor": 2},
    ),
    "PaliGemma 3B": (
        "paligemma",
        siglip("siglip_vision_model", 448, vision_use_head=False),
        text("gemma", 2048, 16384, 18, 8, 1, 257216, head_dim=256),
        {"projection_dim": 2048},
    ),
    "LightOnOCR 1B": (
        "lighton_ocr",
        PIXTRAL,
        text("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128),
        {"spatial_merge_size": 2, "tie_word_embeddings": True},
    ),
    "GLM-4.1V 9B": ("glm4v", {}, {"rope_parameters": GLM_ROPE}, {}),  # GLM and Cohere as their classes have them
    "Cohere2 Vision": ("cohere2_vision", {}, {}, {}),
    "Qwen3-VL 30B A3B": (
        "qwen3_vl_moe",
        {"deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 2048},
        text(
            "qwen3_vl_moe_text", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768
        )
        | {"num_experts_per_tok": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        {"tie_word_embeddings": False},
    ),
}
SHIPPED = ("qwen2.5-vl-3b", "qwen3-vl-4b", "qwen3.5-4b", "gemma-3-4b", "gemma-4-31b", "ministral-3-3b")
TOKENS = {
    "idefics2": 320,
    "llava_next": 2880,
    "llava_onevision": 3645,
}  # of the whole image, and of the squares that it is cut into
ALL = ("vision", "projector", "language")
WAYS: dict[str, dict[str, Any]] = {
    "lora, frozen": {"method": "lora", "gradient_checkpointing": True},
    "full, trained": {"method": "full", "trained_parts": ALL},
    "checkpointed, trained": {"method": "full", "trained_parts": ALL, "gradient_checkpointing": True},
}


def folder_of(name: str, parent: Path) -> Path:
    """Write the config of a model, and return its folder."""
    if name in SHIPPED:
        values = json.loads((SHAPES / name / "config.json").read_text())
    else:
        kind, vision, of_text, others = CONFIGS[name]
        known = {"llava": "Llava", "llava_next": "LlavaNext"}
        values = {"model_type": kind, "vision_config": vision, "text_config": of_text, **others}
        values |= {"dtype": "bfloat16", "architectures": [known.get(kind, kind) + "ForConditionalGeneration"]}
    of_text = values["text_config"]
    of_text["num_hidden_layers"] = 4
    if "layer_types" in of_text:
        of_text["layer_types"] = [*of_text["layer_types"][:3], of_text["layer_types"][-1]]
    folder = parent / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--way", default="", help="ways whose name has this text")
    options = parser.parse_args()
    print("| model | parameters | image tokens | | GiB simulated | planned | |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for name in (name for name in (*SHIPPED, *CONFIGS) if options.only in name):
            shape = find_shape(str(folder_of(name, Path(parent))))
            assert shape.tower
            tower = shape.tower
            unit = 1 if tower.token_pixels else tower.patches_seen // tower.patches_per_token
            tokens = TOKENS.get(CONFIGS.get(name, ("",))[0]) or max(1, 1536 // unit) * unit
            for way, values in WAYS.items():
                if options.way not in way:
                    continue
                own = {"image_tokens": tokens, "length": max(2048, tokens + 256), **values}
                workload = Workload(shape=shape, **own)
                planned = predict(workload).tensors
                try:
                    simulated = simulate(workload, deadline_seconds=1500).tensors
                    cells = f"{simulated / GIB:.2f} | {planned / GIB:.2f} | {planned / simulated - 1:+.1%}"
                except TrainingError as error:
                    cells = f"{error} | {planned / GIB:.2f} |"
                print(f"| {name} | {shape.num_parameters:,} | {tokens} | {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
