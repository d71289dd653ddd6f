"""Open, check, load and quantise a causal language model, classifier or embedding model, and attach adapters.

The dtypes are the same under every strategy:

- Trainable weights are float32 (the optimiser's master copy), or all bfloat16 with ``optim: adamw_bf16``.
- Frozen weights have the compute dtype of the topology, that of its ``mixed_precision``. With method ``full`` they are
  written again, and float32 stays where another would round what the files hold.
- 4-bit weights are NF4 with double quantisation. Their storage dtype is the compute dtype, because sharding silently
  corrupts any other storage.

A base whose files are quantised is read as plain weights, see ``kit.model.pretrained.dequantise``.

Nothing is unpickled. Code that comes with a model runs only with ``trust_remote_code``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from kit.config.settings.method import MethodSettings
from kit.config.settings.model import ModelSettings
from kit.config.settings.objective import ObjectiveSettings
from kit.model.adapters.adapter import attach_adapter, check_adapter
from kit.model.adapters.freeze import check_freeze, trained_encoders
from kit.model.adapters.qat import install_qat
from kit.model.adapters.reach import belongs_to_selector, freeze_unreached_parts
from kit.model.adapters.token_rows import add_rows
from kit.model.experts.packed import is_experts
from kit.model.four_bit import four_bit_config, packed_on_meta
from kit.model.layers.activation_offload import install_activation_offload
from kit.model.layers.attention import (
    NOT_CAUSAL,
    VARLEN,
    attention_by_part,
    longest_pack,
    register_varlen,
    supports_sdpa,
    turn_off_cudnn_if_masked,
    why_not_varlen,
)
from kit.model.layers.checkpointing import enable_checkpointing
from kit.model.layers.fp8_linear import install_fp8_linear
from kit.model.layers.loss_head import install_loss_head
from kit.model.layers.tiled_mlp import check_tiled_mlp, install_tiled_mlp
from kit.model.layers.trained_linear import install_shared_casts, install_trained_linear
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.classes import auto_class
from kit.model.pretrained.dequantise import dequantising, in_mxfp4, is_read_plain, plain_config, quantisation_of
from kit.model.pretrained.heads import check_head, draw_head, head_of, show_head, silent_about_head, with_head
from kit.model.pretrained.locate import check_weight_files, commit_of, hint_trust, hub_options, locate_model
from kit.model.summary import aux_loss_coef, check_parts
from kit.system.errors import Problem, UserError, first_line, out_of_memory

MAX_MODULES = 200_000  # about twice those of the largest models whose experts are modules
_FINGERPRINT_BYTES = 1 << 20  # read at the beginning and at the end of each weight file


def open_config(settings: ModelSettings) -> Any:
    """Open the model's config, with the head that the objective of a recipe trains.

    Raises ``UserError`` if the folder or hub id has none that can be read, or the model cannot have that head.
    """
    config = open_base_config(settings)
    if isinstance(settings, ObjectiveSettings):
        return with_head(config, settings, settings.model_name_or_path, getattr(settings, "max_length", 0))
    return config


def open_base_config(settings: ModelSettings) -> Any:
    """Open the model's config as it is. Raises ``UserError`` if the folder or hub id has none that can be read."""
    name = locate_model(settings.model_name_or_path, settings.model_revision)
    try:
        return AutoConfig.from_pretrained(name, **hub_options(settings))
    except Exception as error:
        found = f"{settings.model_name_or_path}: {first_line(error)}"
        raise UserError("model_name_or_path", found, fix=hint_trust(error)) from None


def fingerprint(settings: ModelSettings) -> str:
    """Return a string that identifies the base model.

    For a hub id it is the commit. For a folder it is ``folder_fingerprint``; hashing whole weight files would take
    minutes.
    """
    commit = commit_of(settings.model_name_or_path, settings.model_revision)
    if commit:
        return commit
    return folder_fingerprint(Path(os.path.expanduser(settings.model_name_or_path)), "config.json")


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
    """Return the model's ``max_position_embeddings``; None if its config sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def build_meta_model(settings: MethodSettings, config: Any, packing: bool = False) -> Any:
    """Build the model on the meta device: modules and shapes, without weights, for checks.

    Args:
        packing: whether its batches will be packed, see ``attention_of``.

    Raises:
        UserError: it is not a causal language model, or does not support the attention kernel.
    """
    found = f"{settings.model_name_or_path} is not a causal language model"
    reason = _why_not_causal(config)
    if reason:
        raise UserError("model_name_or_path", f"{found}: {reason}")
    attention = attention_of(settings, config, packing)
    try:
        model = on_meta(config, attention, settings.trust_remote_code)
    except Exception as error:  # the code of any family, also of the hub
        field = "attn_implementation" if "attention implementation" in str(error) else "model_name_or_path"
        found = f"{settings.model_name_or_path} cannot be built: {first_line(error)}"
        fix = "--attn_implementation auto" if field == "attn_implementation" else ""
        raise UserError(field, found, fix=fix) from None
    add_rows(model, settings)
    return model


def _why_not_causal(config: Any) -> str:
    """Why a model with this ``config`` is not a causal language model; empty if the config does not show one."""
    # Some encoders can be opened as causal models, but would see the token that they must predict.
    encoders = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"}
    if config.model_type in encoders and not getattr(config, "is_decoder", False):
        return f"{config.model_type} is an encoder"
    if getattr(config, "is_encoder_decoder", False):
        return f"{config.model_type} is an encoder and a decoder"
    if config.model_type in NOT_CAUSAL:
        return f"{config.model_type} attends to later tokens"
    return ""


def attention_of(settings: ModelSettings, config: Any, packing: bool) -> str:
    """Return the attention kernel to use, by its name in transformers. Registers ``VARLEN``.

    Args:
        packing: whether batches are packed; then ``auto`` is ``VARLEN`` where the model can use it.
    """
    register_varlen()
    if settings.attn_implementation == "auto":
        if not supports_sdpa(config):
            return "eager"
        return VARLEN if packing and not why_not_varlen(config) else "sdpa"
    return VARLEN if settings.attn_implementation == "varlen" else settings.attn_implementation


def on_meta(config: Any, attention: str | None = None, trust_remote_code: bool = False) -> Any:
    """Build the model of ``config`` on meta as it is. Raises ``ValueError`` if it has more than ``MAX_MODULES``."""
    num_modules = 0

    def count(*_: Any) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MAX_MODULES:
            raise ValueError(f"its config asks for more than {MAX_MODULES} modules")

    with torch.device("meta"), register_module_module_registration_hook(count):
        model = auto_class(config).from_config(
            plain_config(config),
            attn_implementation=attention and attention_by_part(config, attention),
            trust_remote_code=trust_remote_code,
        )
    model.requires_grad_(True)  # as weights that are loaded do, also where the code that builds them freezes some
    show_head(model)
    return model


def check_model(
    settings: MethodSettings,
    config: Any,
    meta_model: Any,
    *,
    max_length: int | None = None,
    packing: bool = False,
    sequences_per_sample: int = 1,
    router_aux_loss_coef: float | None = None,
    needs_weights: bool = True,
    trains: bool = True,
) -> Iterator[Problem]:
    """Check the settings against the model's config and shapes, before any weight is read.

    Args:
        max_length: tokens of the longest sequence; None: not known.
        packing: whether batches are packed.
        sequences_per_sample: a pack has as many times ``max_length`` tokens.
        router_aux_loss_coef: of the recipe; None: not set.
        needs_weights: whether a folder without weights is a problem; one with pickled weights only always is.
        trains: whether anything of it does; nothing of a teacher.
    """
    yield from check_weight_files(settings, needs_weights)
    quantised = quantisation_of(config)
    if quantised and not is_read_plain(config):
        how = quantised.get("quant_method") if isinstance(quantised, dict) else ""
        fix = "use the model that it was made from; --method qlora (of a teacher: --teacher_in_4bit true) quantises it"
        yield Problem("model_name_or_path", f"a quantised checkpoint ({how})", "plain weights", fix)
    if settings.attn_implementation == "varlen" and (reason := why_not_varlen(config)):
        yield Problem("attn_implementation", f"varlen, but {reason}", "auto or sdpa")
    positions = num_positions(config)
    if positions and max_length is not None and max_length > positions:
        found = f"{max_length} tokens, more than max_position_embeddings {positions}"
        fix = f"--max_length {positions}; or docs/models.md#context-extension-rope-scaling"
        yield Problem("max_length", found, fix=fix)
    limit = longest_pack(config) if packing else None
    pack_length = (max_length or 0) * sequences_per_sample
    if limit and pack_length > limit[0]:
        found = (
            f"packs of {pack_length} tokens, with {limit[1]}: in longer packs the loss of a sample depends on others"
        )
        expected = "the loss that a sample has alone"
        fix = f"--packing false; or --max_length {limit[0] // sequences_per_sample}"
        yield Problem("packing", found, expected, fix)
    yield from check_head(meta_model)
    if meta_model.get_output_embeddings() is None and head_of(config) == "lm":
        yield Problem("model_name_or_path", f"{type(meta_model).__name__} has no output head", "a causal LM")
    if not trains:
        return
    if settings.experts_implementation != "auto" and not any(map(is_experts, meta_model.modules())):
        found = f"{settings.experts_implementation}, and {type(meta_model).__name__} has no experts that it applies to"
        yield Problem("experts_implementation", found, "auto")
    if settings.qat and is_read_plain(config):
        found = f"{settings.qat}, and the files of {settings.model_name_or_path} hold {quantised['quant_method']}"
        fix = "leave it out; or use the model that the files were made from"
        yield Problem("qat", found, "a base that is not quantised", fix)
    if settings.tiled_mlp:
        yield from check_tiled_mlp(meta_model)
    yield from check_parts(settings, meta_model, router_aux_loss_coef)
    problems = check_freeze(settings, meta_model)
    yield from problems
    if settings.method != "full" and not problems:
        yield from check_adapter(settings, meta_model)


def build_model(
    settings: MethodSettings,
    config: Any,
    plan: LoadPlan,
    *,
    packing: bool = False,
    seed: int = 0,
    router_aux_loss_coef: float | None = None,
    compiler: Any = None,
) -> torch.nn.Module:
    """Load the weights, quantise them, attach adapters, and install the loss head.

    Ranks that read no weights have them on meta, adapters too, and so has their optimiser, until ``prepare`` sends what
    rank 0 has (``kit.strategy.sending``). Where all read, all make the same adapters from ``seed``.

    Args:
        packing: whether batches are packed, see ``attention_of``.
        seed: of the initial values of new adapters.
        router_aux_loss_coef: weight of the routers' auxiliary loss in training; None: the model's own.
        compiler: a ``Compiler`` for the loss head's passes over the logits; None: they are not compiled.

    Raises:
        UserError: weights are missing, or do not fit the config.
    """
    attention = attention_of(settings, config, packing or plan.sequence_group is not None)
    model = base = _base(settings, config, plan, attention, seed)
    add_rows(model, settings)
    if settings.qat:
        install_qat(model, settings)
    model = attach_adapter(model, settings, seed)
    enable_checkpointing(base, settings.gradient_checkpointing)
    if settings.activation_offload and settings.gradient_checkpointing:
        install_activation_offload(base)
    if settings.tiled_mlp:
        install_tiled_mlp(base)
    towers = freeze_unreached_parts(base, trained_encoders(base, settings))
    if settings.method == "full":  # everything was loaded in float32
        _cast_frozen(model, getattr(torch, plan.compute_dtype), towers, config.dtype or torch.float32)
        _cast_trained(model, getattr(torch, plan.trained_dtype))
        if plan.compute_dtype != "float32":  # else nothing is cast
            install_shared_casts(model)
            if not settings.gradient_checkpointing:  # with it there are the copies of one layer at a time
                install_trained_linear(model)
    if settings.fp8:
        install_fp8_linear(base)
    router_coef = aux_loss_coef(base, router_aux_loss_coef) if head_of(config) == "lm" else 0.0
    install_loss_head(
        base,
        router_aux_loss_coef=router_coef,
        device_memory=plan.device_memory,
        compiler=compiler,
        sequence_group=plan.sequence_group,
        always_encodes=plan.is_sharded or bool(trained_encoders(base, settings)),
    )
    turn_off_cudnn_if_masked(config, attention, packing, router_loss=router_coef > 0)
    model.train()
    return model


def build_teacher(settings: MethodSettings, config: Any, plan: LoadPlan, packing: bool) -> torch.nn.Module:
    """Load a frozen model (the teacher). A call with targets returns the hidden states [S, h] that predict them.

    Args:
        settings: of ``kit.model.teacher.teacher_settings``.
        packing: whether batches are packed, see ``attention_of``.

    Raises:
        UserError: as ``build_model``.
    """
    attention = attention_of(settings, config, packing or plan.sequence_group is not None)
    model = _base(settings, config, plan, attention)
    model.requires_grad_(False)
    install_loss_head(
        model,
        device_memory=plan.device_memory,
        gives_states=True,
        sequence_group=plan.sequence_group,
        always_encodes=plan.is_sharded,
    )
    return model.eval()


def _base(settings: MethodSettings, config: Any, plan: LoadPlan, attention: str, seed: int = 0) -> Any:
    """The model itself, quantised for QLoRA; on meta, on a rank that reads no weights."""
    if plan.reads_weights:
        model = _read_model(settings, config, plan, attention, seed)
    else:
        model = on_meta(config, attention, settings.trust_remote_code)
        if settings.method == "qlora":
            model = packed_on_meta(model, getattr(torch, plan.compute_dtype), in_mxfp4(config))
    model.config.use_cache = False
    if settings.experts_implementation != "auto":  # given by name to transformers, parts without experts refuse it
        for experts in filter(is_experts, model.modules()):
            experts.config._experts_implementation = settings.experts_implementation
    # Else bitsandbytes repacks 4-bit weights on a CPU at the first evaluation: that would change bits, and not every
    # shape supports it.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _cast_frozen(model: Any, dtype: torch.dtype, towers: tuple[str, ...], stored: torch.dtype) -> None:
    """Cast the frozen weights to the dtype of the model's files, or leave them in float32: they keep their bits.

    Those that select experts stay in float32: rounding what they compute could change which one is selected.

    Args:
        dtype: that of the topology. Files of another are not rounded to it, but computed with in float32.
        towers: prefixes of the names of what no text reaches. It does not train, and is written again as it was read.
        stored: the dtype of the model's files.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not belongs_to_selector(name):
            is_exact = f"{name}.".startswith(towers) or dtype == stored
            parameter.data = parameter.data.to(stored if is_exact else torch.float32)


def _cast_trained(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the trained weights. ``AdamWBF16`` reads them as flat tensors, so a cast one is contiguous."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype, memory_format=torch.contiguous_format)
    # Frozen layers in float32 give their states to trained norms in half precision, which a CPU does not compute.
    for module in model.modules() if dtype != torch.float32 else ():
        if isinstance(module, torch.nn.LayerNorm) and module.weight is not None and module.weight.requires_grad:
            module.register_forward_pre_hook(lambda norm, args: (args[0].to(norm.weight.dtype), *args[1:]))


def _read_model(settings: MethodSettings, config: Any, plan: LoadPlan, attention: str, seed: int) -> Any:
    """Read the weights, quantised for QLoRA. Raises ``UserError`` as ``build_model`` does."""
    compute = getattr(torch, plan.compute_dtype)
    options: dict[str, Any] = {"dtype": torch.float32 if settings.method == "full" else compute}
    if plan.device != "cpu" or settings.method == "qlora":  # without a map, transformers puts 4-bit weights on a GPU
        options["device_map"] = {"": plan.device}
    if settings.method == "qlora":
        elsewhere = plan.quantise_on if plan.quantise_on != plan.device else None
        options["quantization_config"] = four_bit_config(
            compute, on_meta(config, attention, settings.trust_remote_code), elsewhere
        )
    plain_files = dequantising(config, settings.method) if quantisation_of(config) else nullcontext()
    try:
        with _nothing_unpickled(settings), plain_files, silent_about_head(config):
            model, loaded = auto_class(config).from_pretrained(
                locate_model(settings.model_name_or_path, settings.model_revision),
                config=plain_config(config),
                attn_implementation=attention_by_part(config, attention),
                use_safetensors=True,
                output_loading_info=True,
                **options,
                **hub_options(settings, is_checked=True),
            )
    except UserError:
        raise
    except Exception as error:  # the files may hold anything
        if out_of_memory(error):
            raise
        raise UserError("model_name_or_path", f"{settings.model_name_or_path}: {first_line(error)}") from None
    if hasattr(model, "peft_config"):  # transformers loads an adapter that it finds there
        found = f"{settings.model_name_or_path} contains an adapter too"
        fix = "move adapter_config.json out; to continue training the adapter, pass it as --adapter_name_or_path"
        raise UserError("model_name_or_path", found, "a model only", fix)
    show_head(model)
    missing = draw_head(model, sorted(loaded["missing_keys"]), seed)
    if missing:
        found = f"{len(missing)} weights are missing from {settings.model_name_or_path}: {', '.join(missing[:3])}"
        expected = "a complete checkpoint"
        raise UserError("model_name_or_path", found, expected)
    return model


@contextmanager
def _nothing_unpickled(settings: ModelSettings) -> Iterator[None]:
    """In the ``with`` block, raise ``UserError`` instead of unpickling weights.

    ``use_safetensors`` only concerns the file that is opened first. An index, a config or an adapter may name pickled
    files.
    """

    def refuse(file: Any, *args: Any, **kwargs: Any) -> None:
        found = f"{settings.model_name_or_path} names {os.path.basename(str(file))} as weights"
        fix = "convert them: pickled weights are never opened"
        raise UserError("model_name_or_path", found, "*.safetensors", fix)

    torch_load = torch.load
    torch.load = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = torch_load
