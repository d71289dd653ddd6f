"""Open, check, load, quantise and adapt a causal language model, obeying the ``LoadPlan``.

One dtype rule under every strategy. Weights that train are float32 (the optimiser's master copy); frozen weights are
in the compute type of the topology (bfloat16 under ``mixed_precision: bf16``, else float32); 4-bit weights are NF4
with double quantisation, stored in the compute type, because sharding corrupts any other storage silently.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)

from kit.config import LoadPlan, Recipe
from kit.errors import Problem, UserError, did_you_mean
from kit.loss import install_loss_head

HUB_SECONDS = 5.0  # to wait for the hub's first answer


def open_config(recipe: Recipe) -> Any:
    """The model's config. Raises ``UserError`` for a folder or hub id that is none."""
    _check_place(recipe)
    try:
        return AutoConfig.from_pretrained(recipe.model_name_or_path, **_hub(recipe))
    except Exception as error:
        fix = (
            "--trust_remote_code true runs the model's own code: read it first"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise UserError(
            Problem("model_name_or_path", f"{recipe.model_name_or_path}: {_first_line(error)}", fix=fix)
        ) from None


def open_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ``UserError`` where there is none, or only a slow one."""
    _check_place(recipe)
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model_name_or_path, **_hub(recipe))
    except Exception as error:
        found = f"no tokenizer in {recipe.model_name_or_path}: {_first_line(error)}"
        raise UserError(Problem("model_name_or_path", found, "tokenizer.json beside the weights")) from None
    if not tokenizer.is_fast:
        raise UserError(Problem("model_name_or_path", "a slow tokenizer only", "a tokenizer.json"))
    return tokenizer


def build_meta_model(recipe: Recipe, config: Any) -> Any:
    """The model's modules and shapes without memory, to check against. Raises ``UserError``."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.trust_remote_code)
    except Exception as error:
        found = f"{recipe.model_name_or_path} is not a causal language model: {_first_line(error)}"
        raise UserError(Problem("model_name_or_path", found)) from None


def check_model(recipe: Recipe, config: Any, meta_model: Any) -> list[Problem]:
    """What config and shapes tell about the recipe before any weight is read."""
    problems = []
    folder = Path(recipe.model_name_or_path)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        found = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no weights"
        fix = "convert them: pickled weights are never opened" if ".bin" in found else ""
        problems.append(Problem("model_name_or_path", f"{found} in {folder}", "*.safetensors", fix))
    if getattr(config, "quantization_config", None):
        problems.append(
            Problem(
                "model_name_or_path",
                "a quantised checkpoint",
                "the original one",
                "--method qlora quantises it",
            )
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and recipe.max_length > positions:
        found = f"{recipe.max_length} tokens, the model has {positions} positions"
        problems.append(Problem("max_length", found, fix=f"--max_length {positions}"))
    if meta_model.get_output_embeddings() is None:
        problems.append(Problem("model_name_or_path", f"{type(meta_model).__name__} has no output head", "a causal LM"))
    if recipe.method != "full" and recipe.lora_target_modules != "all-linear":
        linear = {name.rsplit(".", 1)[-1] for name, m in meta_model.named_modules() if isinstance(m, torch.nn.Linear)}
        full_names = [name for name, _ in meta_model.named_modules()]
        for target in recipe.lora_target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in full_names):
                expected = f"all-linear, or some of {', '.join(sorted(linear))}"
                problems.append(
                    Problem("lora_target_modules", f"no module {target!r}", expected, did_you_mean(target, linear))
                )
    if recipe.adapter_name_or_path and Path(recipe.adapter_name_or_path).is_dir():
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (Path(recipe.adapter_name_or_path) / file).is_file():
                problems.append(Problem("adapter_name_or_path", f"no {file} in {recipe.adapter_name_or_path}"))
    return problems


def build_model(recipe: Recipe, config: Any, plan: LoadPlan) -> torch.nn.Module:
    """Load, quantise, adapt, and install the loss head. Every rank builds the same adapters.

    Raises:
        UserError: weights missing or unfit for the config.
    """
    compute = getattr(torch, plan.compute_dtype)
    loader: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.float32 if recipe.method == "full" else compute}
    if plan.device != "cpu":
        options["device_map"] = {"": plan.device}
    if recipe.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
            bnb_4bit_quant_storage=compute,
        )
    try:
        model, loaded = loader.from_pretrained(
            recipe.model_name_or_path,
            config=config,
            attn_implementation=recipe.attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **options,
            **_hub(recipe),
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ImportError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(Problem("model_name_or_path", f"{recipe.model_name_or_path}: {_first_line(error)}")) from None
    # A process that waits for its weights from rank 0 misses all of them.
    missing = sorted(loaded["missing_keys"]) if not any(p.is_meta for p in model.parameters()) else []
    if missing:
        found = f"{len(missing)} weights are not in {recipe.model_name_or_path}: {', '.join(missing[:3])}"
        raise UserError(
            Problem("model_name_or_path", found, "a complete checkpoint: random weights are not trained on")
        )
    model.config.use_cache = False
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        # On a CPU, bitsandbytes repacks weights at the first evaluation: other bits, and not for every shape.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    base = model
    model = attach_adapter(model, recipe)
    install_loss_head(base)
    model.train()
    return model


def attach_adapter(model: Any, recipe: Recipe) -> torch.nn.Module:
    """Freeze the base and add the adapters of the recipe, or load those it names; nothing for ``full``."""
    if recipe.method == "full":
        return model
    from peft import LoraConfig, PeftModel, get_peft_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # The same seed on every rank: sharding takes each rank's own part of what should be one matrix.
    torch.manual_seed(recipe.seed)
    if recipe.adapter_name_or_path:
        return PeftModel.from_pretrained(model, recipe.adapter_name_or_path, is_trainable=True)
    targets = recipe.lora_target_modules
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora_r,
            lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=recipe.lora_dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=recipe.use_rslora,
            use_dora=recipe.use_dora,
        ),
    )


def _check_place(recipe: Recipe) -> None:
    """Refuse a folder that holds no model, and a hub id that cannot be had; always with the same problem."""
    name, revision = recipe.model_name_or_path, recipe.model_revision
    folder = Path(name)
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if (folder / "config.json").is_file():
            return
        found = "no config.json in it" if folder.is_dir() else "no such folder"
        raise UserError(Problem("model_name_or_path", f"{name}: {found}", "a folder with config.json, or a hub id"))
    if constants.HF_HUB_OFFLINE or try_to_load_from_cache(name, "config.json", revision=revision):
        return
    # One short request: transformers retries for half a minute, for each of its files.
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
    except HfHubHTTPError as error:
        found = f"no folder {name!r}, and the hub refuses it ({_first_line(error)})"
        fix = "check the name; a private or gated model needs `hf auth login`"
        raise UserError(Problem("model_name_or_path", found, fix=fix)) from None
    except Exception as error:  # the connection's own, of whichever client library is in use
        found = f"no folder {name!r}, and the hub cannot be reached ({_first_line(error)})"
        raise UserError(Problem("model_name_or_path", found, "a local folder, or a network")) from None


def _hub(recipe: Recipe) -> dict[str, Any]:
    return {"revision": recipe.model_revision or "main", "trust_remote_code": recipe.trust_remote_code}


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
