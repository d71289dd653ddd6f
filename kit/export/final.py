"""Write models that plain ``from_pretrained`` opens: ``final/`` of a run, an exported checkpoint, a merged adapter.

A folder has a full model or a PEFT adapter, with tokenizer, chat template and model card. It is written under a
temporary name and then renamed, so it is complete or absent.
"""

import copy
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file

from kit.config.adapter_types import module_adapted_by
from kit.export.card import NO_STOPS, PLACEHOLDER, model_card, serving_section
from kit.export.stop_tokens import describe_stops, new_stops, write_stops
from kit.model.adapters.serving import merge_command, serve_command, why_not_served
from kit.model.pretrained.classes import auto_class
from kit.model.pretrained.dequantise import class_that_dequantises
from kit.model.pretrained.heads import head_of, write_sentence_transformers
from kit.strategy.weights import gather_tensor, gather_trainable, plain_name, rank_and_world, whole_state
from kit.system import durable
from kit.system.console import say
from kit.system.errors import TrainingError, listed
from kit.train.loop_state import LoopState

if TYPE_CHECKING:
    from kit.run.checked import Checked
    from kit.strategy.accelerator import Prepared
    from kit.train.policy import Policy

MAX_SHARD_BYTES = 5 * 10**9  # of a file of weights
Pixels = tuple[int | None, int | None]  # the fewest and the most of an image; None: as the processor has it
_EDGES = ("shortest_edge", "longest_edge")  # under which processors that count pixels have these numbers
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def save_final(policy: "Policy", checked: "Checked", state: LoopState) -> None:
    """Write ``final/`` of a run, with its model card, under every strategy. Called by all ranks.

    Raises:
        TrainingError: on the main process, if the adapter was not trained.
    """
    assert checked.folder is not None
    recipe, config = checked.recipe, checked.config
    stops = new_stops(policy.accelerator.unwrap_model(policy.model), checked.stop_tokens)
    opened_by = auto_class(config).__name__, class_that_dequantises(config)
    card = model_card(recipe, policy.strategy, state, policy.tokenizer, checked.data.text_form, stops, *opened_by)
    pixels = recipe.min_pixels, recipe.max_pixels
    replace_folder(checked.folder.final, policy, policy.tokenizer, card, config.dtype, stops, pixels)


def replace_folder(
    folder: Path,
    prepared: "Prepared",
    tokenizer: Any,
    card: str,
    dtype: torch.dtype | None,
    stops: Mapping[str, int] = NO_STOPS,
    pixels: Pixels = (None, None),
) -> None:
    """Write ``folder`` as ``write_model`` does, and replace it by one rename. Called by all ranks."""
    accelerator, model = prepared.accelerator, prepared.model
    plain = accelerator.unwrap_model(model)
    staging = durable.staging_of(folder)
    try:
        if accelerator.is_main_process:
            durable.make_afresh(staging)
        accelerator.wait_for_everyone()
        state = gather_trainable(accelerator, model) if hasattr(plain, "peft_config") else whole_state(model)
        write_model(staging, plain, state, tokenizer, card, dtype, stops, pixels)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            durable.sync_tree(staging)
            durable.remove(folder)
            os.replace(staging, folder)
    except BaseException:
        if accelerator.is_main_process:
            with suppress(OSError):  # the disk may be full: leave room
                durable.remove(staging)
        raise
    if accelerator.is_main_process:
        durable.sync(folder.parent)
        say(*describe_stops(stops, f"{folder.name}/"), *describe_serving(plain, folder))
    accelerator.wait_for_everyone()


@contextmanager
def _full_disk_known() -> Iterator[None]:
    """Raise ``OSError`` with its number where safetensors hides it, so that a full disk is reported as one."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(number[1]), str(error)) if number else error from None


@_full_disk_known()
def write_model(
    folder: Path,
    model: Any,
    state: dict[str, torch.Tensor],
    tokenizer: Any,
    card: str,
    dtype: torch.dtype | None,
    stops: Mapping[str, int] = NO_STOPS,
    pixels: Pixels = (None, None),
) -> None:
    """Fill ``folder`` with a full model, or with an adapter if ``model`` has one. Called by all ranks.

    Args:
        model: decides what is written. If it has an adapter, its weights are not read, and it may be on meta.
        state: by names in ``model``: of an adapter the whole trainable tensors, on the main process; of a full model
            all parameters and persistent buffers, sharded if it is.
        card: text of the model card.
        dtype: dtype of a full model's weights; None: float32. Adapters stay in float32, in which they were trained.
        stops: the tokens that end answers, with their ids; ``generation_config.json`` gets those that it lacks.
        pixels: the recipe's ``min_pixels`` and ``max_pixels``.

    Raises:
        TrainingError: all second matrices (lora_B) of the adapter are zero, so nothing was trained.
        OSError: a file cannot be written.
    """
    is_main = rank_and_world()[0] == 0
    if not hasattr(model, "peft_config"):
        whole = _gathered(model, state, dtype or torch.float32)
        if is_main:
            model.save_pretrained(folder, state_dict=whole, max_shard_size=MAX_SHARD_BYTES)
            config = copy.deepcopy(model.config)
            config.use_cache = True
            if head_of(config) == "scores":
                config.pad_token_id = tokenizer.pad_token_id
            config.dtype = dtype or torch.float32  # `save_pretrained` put that of the weights in training there
            config.save_pretrained(folder)
            copy_processor(folder, config, pixels)
    elif is_main:
        check_trained(state)
        # Rows that train are in ``state``; peft would look for the base, and add what it takes for more of them.
        twin = _unwrapped_twin(model)
        twin.save_pretrained(folder, state_dict=_with_tied(twin, state), save_embedding_layers=False)
        copy_processor(folder, model.get_base_model().config, pixels)
    if is_main:
        finish_folder(folder, model, tokenizer, card, stops)


def _gathered(model: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What files hold of a full model, whole and in CPU memory, on the main process. Called by all ranks.

    These are frozen weights and persistent buffers too. Weights that are tied come once.

    Args:
        state: by names in ``model``, sharded if it is.
        dtype: of the parameters. Buffers keep theirs: some decide where a token is routed.
    """
    left_out, parameters = set(), set()
    for names in _names_of_parameters(model):
        parameters.update(names)
        derived = [name for name in sorted(names) if name in model.all_tied_weights_keys]
        left_out.update(derived[: len(names) - 1])  # one stays, whatever the model declares
    whole = {}
    for name, tensor in state.items():
        if name not in left_out and (gathered := gather_tensor(tensor)) is not None:
            whole[name] = gathered.detach().to(dtype if name in parameters else gathered.dtype).cpu()
    return whole


def finish_folder(folder: Path, model: Any, tokenizer: Any, card: str, stops: Mapping[str, int]) -> None:
    """Write the files other than weights."""
    write_stops(folder, model, stops)
    tokenizer.save_pretrained(folder)
    config = (model.get_base_model() if hasattr(model, "peft_config") else model).config
    if of_texts := getattr(config, "sentence_transformers", None):
        write_sentence_transformers(folder, config.hidden_size, **of_texts)
    why, command = _serving(model, PLACEHOLDER)
    end = serving_section(command, why or "To serve it") if command else ""
    (folder / "README.md").write_text(card + end, encoding="utf-8")
    give_usual_mode(folder)


def describe_serving(model: Any, folder: Path) -> list[str]:
    """Return how to serve ``model``, written to ``folder``: a language model; an adapter only if it must be merged."""
    why, command = _serving(model, folder)
    return [f"{why or 'to serve it'}: {command}"] if command else []


def _serving(model: Any, folder: Path | str) -> tuple[str, str]:
    """Why an adapter must be merged, empty for a model; and the command for it, or that of a server; empty if none."""
    if not hasattr(model, "peft_config"):
        return "", serve_command(folder) if head_of(model.config) == "lm" else ""
    reason = why_not_served(model.peft_config["default"])
    return f"{reason}. Merged, it is a model like any other", merge_command(folder) if reason else ""


def copy_processor(folder: Path, config: Any, pixels: Pixels = (None, None)) -> None:
    """Copy to ``folder`` what says how images and audio become inputs, if the base reads them and has these files.

    The tokenizer and its chat template, the rest of a processor, are written by the caller.

    Args:
        config: of the model, as it was opened.
        pixels: see ``write_model``; None: as the base has it.
    """
    if config.get_text_config() is config:
        return
    for name in _PROCESSOR_FILES:
        with suppress(OSError):  # a hub that cannot be reached must not make the save fail
            options = {"revision": getattr(config, "_commit_hash", None)}
            source = cached_file(config.name_or_path, name, _raise_exceptions_for_missing_entries=False, **options)
            if source is not None:
                shutil.copyfile(source, folder / name)
    if not any(pixels):
        return
    for file in [folder / name for name in _PROCESSOR_FILES[:2] if (folder / name).is_file()]:
        settings = json.loads(durable.read_small(file))
        of_images = settings.get("image_processor", settings)
        for name, edge, value in zip(("min_pixels", "max_pixels"), _EDGES, pixels, strict=True):
            if value and ("size" in of_images or name in of_images):
                of_images.pop(name, None)
                of_images["size"] = {**(of_images.get("size") or {}), edge: value}
        file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def give_usual_mode(folder: Path) -> None:
    """Give weight files the mode of the card beside them; safetensors makes them readable by the owner only."""
    mode = (folder / "README.md").stat().st_mode
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # a disk without modes must not make the save fail
            path.chmod(mode)


def _unwrapped_twin(model: Any) -> Any:
    """The same adapted model on meta and without wrappers, because peft derives the saved names from its modules."""
    from peft import get_peft_model

    with torch.device("meta"):
        base = type(model.get_base_model())(model.get_base_model().config)
    config = copy.deepcopy(model.peft_config["default"])
    config.base_model_name_or_path = None  # peft puts this run's there, and warns of an adapter that named another
    twin = get_peft_model(base, config)
    if os.path.isdir(name := os.path.expanduser(base.name_or_path)):
        config.base_model_name_or_path = os.path.abspath(name)  # found from any folder
    return twin


def _with_tied(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the other names of tied parameters, which peft expects too."""
    same = {name: state[first] for first, *others in _names_of_parameters(model) if first in state for name in others}
    return state | same


def _names_of_parameters(model: Any) -> Iterable[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(plain_name(name))
    return names.values()


def check_trained(state: dict[str, torch.Tensor]) -> None:
    """Name the modules whose adapters were not trained: the matrix that is initialised to zero (lora_B) is still zero.

    Raises:
        TrainingError: all of them are, so nothing was trained or gathered.
    """
    is_trained = {module_adapted_by(name): bool(tensor.any()) for name, tensor in state.items()}
    is_trained.pop("", None)
    still = [module for module, trained in is_trained.items() if not trained]
    if is_trained and len(still) == len(is_trained):
        why = "with grpo, every group had zero reward variance; with fp16, every step overflowed"
        raise TrainingError(f"every lora_B is zero: the adapter was not trained; {why}")
    if still:
        say(
            f"warning: {len(still)} of {len(is_trained)} adapters were not trained (lora_B is zero): {listed(still)}; "
            "no gradient reached them"
        )
