"""Open, check, load, quantise and adapt a causal language model, obeying the ``LoadPlan``.

One dtype rule under every strategy. Weights that train are float32 (the optimiser's master copy); frozen weights are
in the compute type of the topology (bfloat16 under ``mixed_precision: bf16``, else float32); 4-bit weights are NF4
with double quantisation, stored in the compute type, because sharding corrupts any other storage silently.
"""

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from kit.config import LoadPlan, Recipe
from kit.errors import Problem, UserError, did_you_mean
from kit.loss import install_loss_head

HUB_SECONDS = 5.0  # to wait for the hub's first answer
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def open_config(recipe: Recipe) -> Any:
    """The model's config. Raises ``UserError`` for a folder or hub id that is none."""
    name = check_place(recipe.model_name_or_path, recipe.model_revision)
    try:
        return AutoConfig.from_pretrained(name, **_hub(recipe))
    except Exception as error:
        fix = (
            "--trust_remote_code true runs the model's own code: read it first"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise UserError(
            Problem("model_name_or_path", f"{recipe.model_name_or_path}: {_first_line(error)}", fix=fix)
        ) from None


def open_tokenizer(recipe: Recipe, folder: Path | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or ``folder``'s. Raises ``UserError`` where there is none, or only a slow one."""
    name = str(folder) if folder else check_place(recipe.model_name_or_path, recipe.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_hub(recipe))
    except Exception as error:
        found = f"no tokenizer in {name}: {_first_line(error)}"
        raise UserError(Problem("model_name_or_path", found, "tokenizer.json beside the weights")) from None
    if not tokenizer.is_fast:
        raise UserError(Problem("model_name_or_path", "a slow tokenizer only", "a tokenizer.json"))
    return tokenizer


def build_meta_model(recipe: Recipe, config: Any) -> Any:
    """The model's modules and shapes without memory, to check against. Raises ``UserError``."""
    found = f"{recipe.model_name_or_path} is not a causal language model"
    # Some encoders open as causal models too, and would learn to copy the token they are asked for.
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        kind = "an encoder" if is_encoder else "an encoder and a decoder"
        raise UserError(Problem("model_name_or_path", f"{found}: {config.model_type} is {kind}"))
    try:
        return _on_meta(recipe, config, recipe.attn_implementation)
    except Exception as error:
        try:
            other = _on_meta(recipe, config, "eager")
        except Exception:
            raise UserError(Problem("model_name_or_path", f"{found}: {_first_line(error)}")) from None
        found = f"{type(other).__name__} has no {recipe.attn_implementation} attention here"
        raise UserError(Problem("attn_implementation", found, fix="--attn_implementation eager")) from None


def _on_meta(recipe: Recipe, config: Any, attention: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=recipe.trust_remote_code
        )


def check_model(recipe: Recipe, config: Any, meta_model: Any) -> list[Problem]:
    """What config and shapes tell about the recipe before any weight is read."""
    problems = []
    folder = Path(os.path.expanduser(recipe.model_name_or_path))
    if os.path.isdir(folder) and not list(folder.glob("*.safetensors")):
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
    return problems + (check_adapter(recipe, meta_model) if recipe.method != "full" else [])


def check_adapter(recipe: Recipe, meta_model: Any) -> list[Problem]:
    """Whether the adapters of the recipe, new or read from files, fit the model. Leaves ``meta_model`` as it is."""
    if not recipe.adapter_name_or_path:
        return _check_targets(recipe, meta_model)
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    try:
        folder = open_adapter(recipe.adapter_name_or_path)
    except UserError as error:
        return error.problems
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        base, kind, use_dora = (
            config.base_model_name_or_path,
            config.peft_type.value,
            getattr(config, "use_dora", False),
        )
        # Neither is looked at: some ways to begin need the base's weights, and the base may have moved.
        config.init_lora_weights, config.base_model_name_or_path = False, None
    except Exception as error:  # whatever JSON may hold
        found = f"{folder / ADAPTER_FILES[0]} is no adapter's: {_first_line(error)}"
        return [Problem("adapter_name_or_path", found)]
    if kind != "LORA":
        return [Problem("adapter_name_or_path", f"{folder} holds a {kind} adapter", "a LoRA")]
    if use_dora and recipe.method == "qlora":
        found = f"{folder} was made with use_dora, given with method qlora"
        return [Problem("adapter_name_or_path", found, fix="use --method lora")]
    try:
        adapted = get_peft_model(copy.deepcopy(meta_model), config)
        with safe_open(folder / ADAPTER_FILES[1], "pt") as file:
            stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (ValueError, RuntimeError, OSError, SafetensorError, TypeError, KeyError) as error:
        return [Problem("adapter_name_or_path", f"{folder}: {_first_line(error)}", fix=f"its base is {base}")]
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    wanted = {name: list(tensor.shape) for name, tensor in state.items() if "lora_" in name}
    stored = {name: shape for name, shape in stored.items() if "lora_" in name}
    unlike = sorted(name for name in {**wanted, **stored} if wanted.get(name) != stored.get(name))
    if not unlike:
        return []
    has, needs = (shapes.get(unlike[0], "absent") for shapes in (stored, wanted))
    found = f"{folder} does not fit this model in {len(unlike)} tensors: {unlike[0]} is {has}"
    return [Problem("adapter_name_or_path", found, str(needs), f"its base is {base}")]


def _check_targets(recipe: Recipe, meta_model: Any) -> list[Problem]:
    problems = []
    modules = dict(meta_model.named_modules())
    linear = {name.rsplit(".", 1)[-1] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    expected = f"all-linear, or some of {', '.join(sorted(linear))}"
    for target in () if recipe.lora_target_modules == "all-linear" else recipe.lora_target_modules:
        named = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not named:
            problems.append(
                Problem("lora_target_modules", f"no module {target!r}", expected, did_you_mean(target, linear))
            )
        elif not all(isinstance(module, torch.nn.Linear) for module in named):
            try:
                attach_adapter(copy.deepcopy(meta_model), recipe.model_copy(update={"lora_target_modules": [target]}))
            except (ValueError, RuntimeError, TypeError):
                found = f"{target!r} is a {type(named[0]).__name__}, which takes no adapter"
                problems.append(Problem("lora_target_modules", found, expected))
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
            check_place(recipe.model_name_or_path, recipe.model_revision),
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
        with warnings.catch_warnings():
            # Shapes alone take no values: in a dry run, and where another rank sends them.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            folder = open_adapter(recipe.adapter_name_or_path)
            return PeftModel.from_pretrained(model, str(folder), is_trainable=True)
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


def open_adapter(name: str) -> Path:
    """The folder with an adapter's two files; those of a hub id are fetched. Raises ``UserError``."""
    field = "adapter_name_or_path"
    folder = Path(os.path.expanduser(name))
    if _is_local(name):
        absent = [file for file in ADAPTER_FILES if not os.path.isfile(folder / file)]
        if not os.path.isdir(folder):
            raise UserError(Problem(field, f"{name}: no such folder", "a folder with adapter_config.json, or a hub id"))
        pickled = os.path.isfile(folder / "adapter_model.bin")
        fix = "convert adapter_model.bin: pickled weights are never opened" if pickled else ""
        if absent:
            raise UserError(*(Problem(field, f"no {file} in {folder}", fix=fix) for file in absent))
        return folder
    _ask_hub(name, None, field, *ADAPTER_FILES)
    try:
        paths = [try_to_load_from_cache(name, file) for file in ADAPTER_FILES]
        if not all(isinstance(path, str) for path in paths):
            paths = [hf_hub_download(name, file) for file in ADAPTER_FILES]
        return Path(str(paths[0])).parent
    except Exception as error:
        raise UserError(Problem(field, f"{name}: {_first_line(error)}", " and ".join(ADAPTER_FILES))) from None


def recipe_of_run(recipe: Recipe, run_file: Path) -> Recipe:
    """``recipe`` with the model, method and adapters of the run that wrote ``run.json``. Raises ``UserError``."""
    keys = ["model_name_or_path", "model_revision", "method", "adapter_name_or_path", "chat_template"]
    keys += [key for key in Recipe.model_fields if key.startswith(("lora_", "use_"))]
    try:
        trained = json.loads(run_file.read_text(encoding="utf-8"))["recipe"]
        opener = Recipe.model_validate(recipe.model_dump() | {key: trained[key] for key in keys})
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{run_file} is no record of a run ({type(error).__name__})"
        raise UserError(Problem("model_name_or_path", found, "a checkpoint in the folder of its run")) from None
    fix = "a relative path counts from where the run was started"
    _check_base(str(run_file), opener.model_name_or_path, opener.model_revision, fix)
    return opener


def base_of_adapter(folder: Path, fix: str) -> str:
    """The base that a local adapter names, there to be opened. Raises ``UserError``, with ``fix``, if it is not."""
    where = str(folder / ADAPTER_FILES[0])
    try:
        base = json.loads(Path(where).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(where, f"is no adapter's ({_first_line(error)})", fix=fix)) from None
    if not base or not isinstance(base, str):
        raise UserError(Problem(where, "names no base", fix=fix))
    _check_base(where, base, None, fix)
    return base


def _check_base(where: str, base: str, revision: str | None, fix: str) -> None:
    try:
        check_place(base, revision)
    except UserError as error:
        raise UserError(Problem(where, f"names a base that is not there: {error.problems[0].found}", fix=fix)) from None


def check_place(name: str, revision: str | None) -> str:
    """The folder or hub id to open. Refuses what holds no model or cannot be had; always with the same problem."""
    folder = os.path.expanduser(name)
    if not _is_local(name):
        _ask_hub(name, revision, "model_name_or_path", "config.json")
        return name
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    found = "no config.json in it" if os.path.isdir(folder) else "no such folder"
    raise UserError(Problem("model_name_or_path", f"{name}: {found}", "a folder with config.json, or a hub id"))


def _is_local(name: str) -> bool:
    return os.path.exists(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _ask_hub(name: str, revision: str | None, field: str, *files: str) -> None:
    """One short request: transformers retries for half a minute, for each of its files. Raises ``UserError``."""
    try:
        if constants.HF_HUB_OFFLINE or all(try_to_load_from_cache(name, file, revision=revision) for file in files):
            return
        HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
    except HFValidationError as error:
        found = f"no folder {name!r}, and it is no hub id ({_first_line(error)})"
        raise UserError(Problem(field, found, "a local folder, or a hub id")) from None
    except HfHubHTTPError as error:
        found = f"no folder {name!r}, and the hub refuses it ({_first_line(error)})"
        fix = "check the name; a private or gated model needs `hf auth login`"
        raise UserError(Problem(field, found, fix=fix)) from None
    except Exception as error:  # the connection's own, of whichever client library is in use
        found = f"no folder {name!r}, and the hub cannot be reached ({_first_line(error)})"
        raise UserError(Problem(field, found, "a local folder, or a network")) from None


def _hub(recipe: Recipe) -> dict[str, Any]:
    return {"revision": recipe.model_revision or "main", "trust_remote_code": recipe.trust_remote_code}


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
