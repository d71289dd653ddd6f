"""ms-swift's YAML and command lines, read from commit 3602360 of 2026-08-22: ``swift/arguments`` and
``swift/trainers/arguments.py``.

Its hub is ModelScope: ids may have another name at Hugging Face's.
"""

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.config import other_kits
from kit.durable import read_small
from kit.tools.convert import trainer
from kit.tools.convert.axolotl_data import put_template
from kit.tools.convert.data import Data, put_data
from kit.tools.convert.draft import Draft, Group, as_list, is_nothing, is_true, number
from kit.tools.convert.modules import put_adapter_type, put_initialisation, put_targets

KIT = "ms-swift"
RENAMES = {
    "model": "model_name_or_path",
    "model_revision": "model_revision",
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "adapters": "adapter_name_or_path",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "num_train_epochs": "num_train_epochs",
    "output_dir": "output_dir",
    "beta": "beta",
    "freeze_parameters": "freeze",
}
_OBJECTIVES = ("dpo", "kto", "orpo", "simpo", "cpo")
_TEMPLATES = {"llama3": "llama3", "chatml": "chatml", "gemma": "gemma"}
_TURNS = {
    **dict.fromkeys("qwen qwen2_5 qwen3 qwen3_thinking qwen3_nothinking qwen3_5".split(), "<|im_start|>"),
    "llama3_2": "<|start_header_id|>",
    "llama4": "<|header_start|>",
    "deepseek_v3": "<｜User｜>",
    "glm4": "<|user|>",
}
_LONGER = {"delete": "drop", "left": "keep_end", "right": "truncate", "split": "split"}
_IMAGES = re.compile(r"(?i)[-_/.](vl|omni|audio|vision|v|ocr)\b|ovis|internvl|llava|janus|pixtral|minicpm-[ov]")
_NAMES = (
    "its rows have {{NAME}} and {{AUTHOR}}, and the file does not say one model_name and one model_author for them; or "
    "its subset adds thoughts to them. Write them to a file with the names, for --dataset FILE"
)
_TOKENISED = "tokenised by ms-swift; give the rows that it was made of, by --dataset FILE or --eval_dataset FILE"
_FAR = 8192  # tokens; without max_length ms-swift takes what the model can


def convert(draft: Draft, path: Path) -> None:
    """Read all keys of the file that have another name or form than here."""
    _refuse_other_training(draft)
    _take_method(draft)
    draft.rename(RENAMES)
    _read_tokens(draft)
    micro = draft.take("micro_batch_size")
    if micro is not None:  # Megatron names the global batch
        total = draft.take("global_batch_size", 16)
        draft.put("global_batch_size", int(number(total)))
        draft.put("per_device_train_batch_size", int(number(micro)))
        draft.rename({"lr_warmup_fraction": "warmup_steps"})
        draft.take("gradient_accumulation_steps")
        _take_floor(draft)
    else:
        each = int(number(draft.given.get("per_device_train_batch_size", 1)))
        trainer.take_batch(draft, 1, max(1, math.ceil(16 / each / draft.num_processes)))
    draft.rename({"attn_impl": "attn_implementation"})
    draft.values.pop("attn_implementation", None)
    deepspeed = draft.given.get("deepspeed")
    draft.given.pop("ENV", None)
    if (optimiser := draft.take("optimizer")) is not None:
        draft.names["optim"] = "optimizer"
        if optimiser == "muon":  # Megatron's
            reason = "Megatron's has another momentum and scale; with --drop, adamw_torch_fused, unless --optim muon"
            draft.drop("optim", optimiser, Group.LEARNS, reason, name="optim")
        elif optimiser != "lorap":  # lorap_lr_ratio says all of it
            draft.given["optim"] = optimiser
    if "swanlab" in as_list(draft.given.get("report_to")):
        trainer.take_tracker(draft, "swanlab", "swanlab_project", "swanlab_exp_name")
    trainer.take_common(draft)
    draft.config = draft.config or ("fsdp" if deepspeed else "")
    _take_data(draft)
    trainer.take_evaluation(draft)
    _take_what_is_learned(draft, is_pretraining=path.name == "pt")
    _put_defaults(draft)


def _refuse_other_training(draft: Draft) -> None:
    objective = draft.take("rlhf_type")
    if objective in _OBJECTIVES:
        draft.put("objective", objective)
    elif objective is not None:
        draft.refuse("rlhf_type", objective, other_kits.REWARDS)
    for key in ("reward_model", "reward_funcs", "teacher_model", "num_labels"):
        if (value := draft.take(key)) is not None and objective in (None, *_OBJECTIVES):
            draft.refuse(key, value, other_kits.other_kits_word(key))
    task = draft.take("task_type", "causal_lm")
    if task != "causal_lm":
        draft.refuse("task_type", task, "causal language models only")
    model = str(draft.given.get("model", ""))
    if _IMAGES.search(model):
        reason = (
            "a model of images or sound, and this kit reads only text; if its data are text, name them as --dataset"
        )
        draft.refuse("model", model, reason, "dataset")


def _take_method(draft: Draft) -> None:
    method = draft.take_first("tuner_type", "train_type", "sft_type")
    method = "lora" if method is None else method
    bits, how = draft.take("quant_bits"), draft.take("quant_method", "bnb")
    if method not in ("lora", "full"):
        put_adapter_type(draft, method, "tuner_type")
        method = "lora"
    if bits is not None and how == "bnb" and number(bits) == 4:
        method = "qlora" if method == "lora" else method
    elif bits is not None:
        draft.drop("quant_bits", f"{bits}, {how}", Group.SPEED, "the base stays in bf16: more memory")
    draft.put("method", method)
    targets, expression = draft.take("target_modules", "all-linear"), draft.take("target_regex")
    if method != "full":
        put_targets(draft, expression if expression is not None else targets, "target_modules")
        put_initialisation(draft, draft.take("init_weights"), "init_weights")
    else:
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "modules_to_save"):
            draft.take(key)


def _read_tokens(draft: Draft) -> None:
    """Read the ``.txt`` files among the new tokens, where each word is a token."""
    tokens: list[str] = []
    for each in map(str, as_list(draft.take("new_special_tokens"))):
        if not each.endswith(".txt"):
            tokens.append(each)
        elif os.path.isfile(each):
            tokens += read_small(each).split()
        else:
            reason = f"no such file here; run it where you ran {KIT}, or --new_tokens TOKEN,TOKEN"
            draft.refuse("new_special_tokens", each, reason, "new_tokens")
    if tokens:
        draft.put("new_tokens", tokens)


def _take_floor(draft: Draft) -> None:
    """Megatron's ``min_lr``, where its cosine ends."""
    if (floor := draft.take("min_lr")) is not None and number(floor) > 0:
        draft.put("lr_scheduler_type", "cosine_with_min_lr")
        draft.put("min_lr_rate", number(floor) / number(draft.values.get("learning_rate", 1e-4)), "min_lr by lr")


def _take_data(draft: Draft) -> None:
    names = _names(draft)
    for name, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        given = [str(each) for each in as_list(draft.take(name))]
        if unnamed := [
            each for each in given if "self-cognition" in each and not (names and _data_of(each).config is None)
        ]:
            given = [each for each in given if each not in unnamed]
            if given or ours == "eval_dataset":
                reason = f"{_NAMES}. With --drop, nothing is learned from them"
                draft.drop(name, "self-cognition", Group.LEARNS, reason, ours)
            else:
                draft.refuse(name, "self-cognition", _NAMES, ours)
        if (tokenised := draft.take(f"cached_{name}")) is not None:
            if "dataset" in draft.typed:
                draft.drop(f"cached_{name}", tokenised, Group.NEEDLESS, "of the data that --dataset replaces")
            elif given or ours == "eval_dataset":
                draft.drop(f"cached_{name}", tokenised, Group.LEARNS, f"{_TOKENISED}. With --drop, without them", ours)
            else:
                draft.refuse(f"cached_{name}", tokenised, _TOKENISED, ours)
        if is_true(draft.given.get("streaming")) and any("#" in each for each in given):
            draft.drop(name, ",".join(given), Group.LEARNS, "of a stream, max_steps says how many rows are read")
            given = [each.partition("#")[0] for each in given]
        put_data(draft, ours, [_with_names(_data_of(each), names) for each in given])
        if any("self-cognition#" in each for each in given):
            draft.notes[ours] = (
                "ms-swift repeats the few rows of self-cognition up to its number; here each is used once"
            )
    for key in ("model_name", "model_author"):
        draft.needless(key, "of the rows of self-cognition")
    share = draft.take("split_dataset_ratio", 0)
    if number(share) > 0 and "eval_dataset" not in draft.values:
        draft.put("eval_split_size", share)
    if (columns := draft.take("columns")) is not None and isinstance(columns, dict):
        names = {"query": "instruction", "response": "output"}
        pairs = [f"{theirs}={names.get(str(field), field)}" for theirs, field in columns.items()]
        draft.put("dataset_columns", ",".join(pairs))


def _names(draft: Draft) -> dict[str, str] | None:
    """What stands for the placeholders of self-cognition; None unless there is one name, and one author.

    A second one would be that of its English rows.
    """
    given = {key: draft.given.get(f"model_{key.lower()}") for key in ("NAME", "AUTHOR")}
    words = {key: list(map(str, value if isinstance(value, list) else [value])) for key, value in given.items()}
    if any(is_nothing(value) for value in given.values()) or any(len(set(value)) > 1 for value in words.values()):
        return None
    return {f"{{{{{key}}}}}": value[0] for key, value in words.items()}


def _with_names(data: Data, names: dict[str, str] | None) -> Data:
    """A data set, with the columns, the id at Hugging Face's and the names of self-cognition if it is that."""
    if "self-cognition" not in data.path:
        return data
    path = data.path if os.path.exists(data.path) else "modelscope/self-cognition"
    return replace(data, path=path, columns={"query": "instruction", "response": "output"}, replace=names)


def _data_of(given: str) -> Data:
    """``id:subset#500``, of which 500 rows are drawn."""
    given = given.removeprefix("HF::").removeprefix("MS::")
    path, _, rows = given.partition("#")
    path, _, subset = path.partition(":")
    return Data(path, subset.split("/")[0] or None, max_samples=int(rows) if rows.isdigit() else None)


def _take_what_is_learned(draft: Draft, is_pretraining: bool) -> None:
    system, scale = draft.take("system"), draft.take("loss_scale", "all" if is_pretraining else "default")
    if system is not None:
        _put_system(draft, str(system))
    scales = {"default": "assistant", "last_round": "last", "all": "all"}
    if scale not in scales:
        draft.drop("loss_scale", scale, Group.LEARNS, "train_on: assistant, last or all; with --drop, assistant")
    elif scale != "default":
        note = "as swift pt, which puts no chat template around conversations" if is_pretraining else "loss_scale"
        draft.put("train_on", scales[scale], note)
    name = draft.take("template")
    if name is not None:
        put_template(draft, str(name), _TEMPLATES, _TURNS)
    strategy, length = draft.take("truncation_strategy"), draft.take("max_length")
    draft.put("max_length", int(number(length or _FAR)), "" if length else "as far as the model goes")
    draft.put("excess_length_strategy", _LONGER.get(str(strategy), "drop"), "" if strategy else f"the default of {KIT}")
    if is_true(draft.take("enable_dft_loss")):
        draft.put("objective", "dft")


def _put_system(draft: Draft, system: str) -> None:
    """Set ``system_prompt`` from a text, in which \\n is a line break, or from the ``.txt`` file that it names."""
    if not system.endswith(".txt"):
        draft.put("system_prompt", system.replace("\\n", "\n"))
    elif os.path.isfile(system):
        draft.put("system_prompt", read_small(system), f"the text of {system}")
    else:
        draft.drop("system", system, Group.LEARNS, "there is no such file here", "system_prompt")


def _put_defaults(draft: Draft) -> None:
    objective = draft.values.get("objective", "sft")
    defaults: dict[str, Any] = {
        "learning_rate": 1e-5 if draft.values["method"] == "full" else 1e-4,
        "num_train_epochs": 3,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_steps": 0,
        "gradient_checkpointing": True,
        "lr_scheduler_type": "cosine",
    }
    if draft.values["method"] != "full" and "adapter_name_or_path" not in draft.values:
        defaults |= {"lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05}
    if objective == "simpo":
        defaults["simpo_gamma"] = 1
    for name, value in defaults.items():
        draft.default(name, value, KIT)
