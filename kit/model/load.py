"""Open, check, load and quantise a causal language model, and attach adapters.

The dtypes are the same under every strategy:

- Trainable weights are float32 (the optimiser's master copy).
- Frozen weights have the compute dtype of the topology: bfloat16 with ``mixed_precision: bf16``, else float32.
- 4-bit weights are NF4 with double quantisation. Their storage dtype is the compute dtype, because sharding silently
  corrupts any other storage.

Nothing is unpickled. Code that comes with a model runs only with ``trust_remote_code``.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from kit.config.recipe import Recipe
from kit.errors import Problem, UserError, out_of_memory
from kit.model.adapter import attach_adapter, check_adapter
from kit.model.attention import NOT_CAUSAL, VARLEN, supports_sdpa, unfit
from kit.model.attention import register as register_attention
from kit.model.four_bit import made_on, packed_on_meta
from kit.model.freeze import check_freeze
from kit.model.locate import commit_of, first_line, has_weights, hint_trust, hub_options, locate_model
from kit.model.loss_head import install_loss_head
from kit.model.parts import check_parts, four_bit_config, router_aux_loss_coef
from kit.model.plan import LoadPlan
from kit.model.reach import freeze_out_of_reach, only_chooses
from kit.model.token_rows import grow

_FINGERPRINT_BYTES = 1 << 20  # read at the beginning and at the end of each weight file


def open_config(recipe: Recipe) -> Any:
    """Open the model's config. Raises ``UserError`` if the folder or hub id has none that can be read."""
    name = locate_model(recipe.model_name_or_path, recipe.model_revision)
    try:
        return AutoConfig.from_pretrained(name, **hub_options(recipe))
    except Exception as error:
        found = f"{recipe.model_name_or_path}: {first_line(error)}"
        raise UserError(Problem("model_name_or_path", found, fix=hint_trust(error))) from None


def fingerprint(recipe: Recipe) -> str:
    """Return a text that identifies the base model.

    For a hub id it is the commit. For a folder it is ``folder_fingerprint``; hashing whole weight files would take
    minutes.
    """
    if commit := commit_of(recipe.model_name_or_path, recipe.model_revision):
        return commit
    return folder_fingerprint(Path(os.path.expanduser(recipe.model_name_or_path)), "config.json")


def folder_fingerprint(folder: Path, config_name: str) -> str:
    """Return a hash of a folder's config and of each weight file's size, first and last mebibyte."""
    state = xxhash.xxh3_128((folder / config_name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            state.update(f"{path.name} {size}".encode() + file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            state.update(file.read())
    return state.hexdigest()


def num_positions(config: Any) -> int | None:
    """Return the longest input that the model can read, in tokens; None if its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def build_meta_model(recipe: Recipe, config: Any) -> Any:
    """Build the model on the meta device: modules and shapes, without weights, for checks.

    Raises:
        UserError: it is not a causal language model, or does not support the attention kernel.
    """
    found = f"{recipe.model_name_or_path} is not a causal language model"
    # Some encoders can be opened as causal models, but would see the token that they must predict.
    encoders = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
    is_encoder = config.model_type in encoders and not getattr(config, "is_decoder", False)
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        kind = "an encoder" if is_encoder else "an encoder and a decoder"
        raise UserError(Problem("model_name_or_path", f"{found}: {config.model_type} is {kind}"))
    if config.model_type in NOT_CAUSAL:
        raise UserError(Problem("model_name_or_path", f"{found}: in {config.model_type} tokens attend to later ones"))
    attention = attention_of(recipe, config)
    try:
        model = _on_meta(recipe, config, attention)
    except Exception as error:
        try:
            other = _on_meta(recipe, config, "eager")
        except Exception:
            raise UserError(Problem("model_name_or_path", f"{found}: {first_line(error)}")) from None
        found = f"{type(other).__name__} has no {attention} attention here"
        raise UserError(Problem("attn_implementation", found, fix="--attn_implementation eager")) from None
    grow(model, recipe)
    return model


def attention_of(recipe: Recipe, config: Any) -> str:
    """Return the attention kernel of the recipe, by its name in transformers. Registers ``VARLEN``."""
    register_attention()
    if recipe.attn_implementation == "auto":
        if not supports_sdpa(config):
            return "eager"
        return VARLEN if recipe.packing and not unfit(config) else "sdpa"
    return VARLEN if recipe.attn_implementation == "varlen" else recipe.attn_implementation


def _on_meta(recipe: Recipe, config: Any, attention: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, trust_remote_code=recipe.trust_remote_code
        )


def check_model(recipe: Recipe, config: Any, meta_model: Any, needs_weights: bool = True) -> list[Problem]:
    """Check the recipe against the model's config and shapes, before any weight is read.

    Args:
        needs_weights: whether a folder without weights is a problem; one with pickled weights only always is.
    """
    problems = []
    folder = Path(os.path.expanduser(recipe.model_name_or_path))
    if os.path.isdir(folder) and not has_weights(recipe):
        pickled = ", ".join(sorted(p.name for p in folder.glob("*.bin")))
        fix = "convert them: pickled weights are never opened" if pickled else ""
        if pickled or needs_weights:
            found = f"{pickled or 'no weights'} in {folder}"
            problems.append(Problem("model_name_or_path", found, "*.safetensors", fix))
    if getattr(config, "quantization_config", None):
        problems.append(
            Problem(
                "model_name_or_path",
                "a quantised checkpoint",
                "the original one",
                "--method qlora quantises it",
            )
        )
    if recipe.attn_implementation == "varlen" and (reason := unfit(config)):
        problems.append(Problem("attn_implementation", f"varlen, but {reason}", "auto or sdpa"))
    positions = num_positions(config)
    if positions and recipe.max_length > positions:
        found = f"{recipe.max_length} tokens, the model has {positions} positions"
        problems.append(Problem("max_length", found, fix=f"--max_length {positions}"))
    if meta_model.get_output_embeddings() is None:
        problems.append(Problem("model_name_or_path", f"{type(meta_model).__name__} has no output head", "a causal LM"))
    check_method = check_freeze if recipe.method == "full" else check_adapter
    return problems + check_parts(recipe, meta_model) + check_method(recipe, meta_model)


def build_model(recipe: Recipe, config: Any, plan: LoadPlan) -> torch.nn.Module:
    """Load the weights, quantise them, attach adapters, and install the loss head. Every rank builds the same adapters.

    Raises:
        UserError: weights are missing, or do not fit the config.
    """
    if plan.reads_weights:
        model = _read_model(recipe, config, plan)
    else:
        model = _on_meta(recipe, config, attention_of(recipe, config))
        if recipe.method == "qlora":
            model = packed_on_meta(model, getattr(torch, plan.compute_dtype))
    grow(model, recipe)
    model.config.use_cache = False
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        # On a CPU, bitsandbytes would repack weights at the first evaluation. That changes bits, and not every shape
        # supports it.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    base = model
    model = attach_adapter(model, recipe)
    freeze_out_of_reach(base)
    if recipe.method == "full":  # everything was loaded in float32
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not only_chooses(name):  # rounding could change which expert is chosen
                parameter.data = parameter.data.to(getattr(torch, plan.compute_dtype))
    install_loss_head(base, router_aux_loss_coef=router_aux_loss_coef(recipe, base))
    model.train()
    return model


def _read_model(recipe: Recipe, config: Any, plan: LoadPlan) -> Any:
    """Read the weights, quantised for QLoRA. Raises ``UserError`` as ``build_model`` does."""
    compute = getattr(torch, plan.compute_dtype)
    loader: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.float32 if recipe.method == "full" else compute}
    if plan.device != "cpu" or recipe.method == "qlora":  # 4-bit weights go to a GPU unless they are told not to
        options["device_map"] = {"": plan.device}
    quantise_on = plan.quantise_on or plan.device
    elsewhere = recipe.method == "qlora" and quantise_on != plan.device
    if recipe.method == "qlora":
        options["quantization_config"] = four_bit_config(
            compute, _on_meta(recipe, config, attention_of(recipe, config))
        )
    try:
        with _nothing_unpickled(recipe), made_on(quantise_on) if elsewhere else nullcontext():
            model, loaded = loader.from_pretrained(
                locate_model(recipe.model_name_or_path, recipe.model_revision),
                config=config,
                attn_implementation=attention_of(recipe, config),
                use_safetensors=True,
                output_loading_info=True,
                **options,
                **hub_options(recipe, is_checked=True),
            )
    except (OSError, ImportError, ValueError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error):
            raise
        raise UserError(Problem("model_name_or_path", f"{recipe.model_name_or_path}: {first_line(error)}")) from None
    if hasattr(model, "peft_config"):  # transformers loads an adapter that it finds there
        found = f"{recipe.model_name_or_path} has an adapter beside its weights"
        fix = "take adapter_config.json out; to go on training it, give it as --adapter_name_or_path"
        raise UserError(Problem("model_name_or_path", found, "a model only", fix))
    missing = sorted(loaded["missing_keys"])
    if missing:
        found = f"{len(missing)} weights are not in {recipe.model_name_or_path}: {', '.join(missing[:3])}"
        raise UserError(
            Problem("model_name_or_path", found, "a complete checkpoint: random weights are not trained on")
        )
    return model


@contextmanager
def _nothing_unpickled(recipe: Recipe) -> Iterator[None]:
    """Refuse to unpickle weights in the ``with`` block.

    ``use_safetensors`` only concerns the file that is opened first. An index, a config or an adapter may name pickled
    files.
    """

    def refuse(file: Any, *args: Any, **kwargs: Any) -> None:
        found = f"{recipe.model_name_or_path} names {os.path.basename(str(file))} as weights"
        fix = "convert them: pickled weights are never opened"
        raise UserError(Problem("model_name_or_path", found, "*.safetensors", fix))

    torch_load = torch.load
    torch.load = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = torch_load
