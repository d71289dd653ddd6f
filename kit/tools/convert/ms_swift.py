"""Files of ms-swift: what ``kits/ms_swift.yaml`` cannot say.

Its hub is ModelScope: ids may have another name at Hugging Face's.
"""

import math

from kit.config.dataset_entry import DatasetEntry
from kit.tools.convert.common import (
    FAR,
    entry,
    put_data,
    take_answers,
    take_batch,
    take_evaluation,
    take_template,
    take_training,
)
from kit.tools.convert.draft import Draft, as_list, number

_SELF = "its rows have {{NAME}} and {{AUTHOR}}: replace them in a copy of the file, and use that"


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    given = draft.given
    draft.keeps_dropout = "micro_batch_size" in given  # its Megatron
    draft.put("method", "full" if draft.keeps_dropout else "lora")
    given.update((name.lower(), value) for name, value in draft.take("ENV", {}).items())
    draft.read("tuner_type", "train_type", "quant_bits", "rlhf_type", "task_type")
    micro = int(number(given.get("per_device_train_batch_size", given.get("micro_batch_size", 1))))
    take_batch(draft, 1, max(1, math.ceil(16 / micro / draft.num_processes)))
    take_training(draft)
    for name, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        data = [str(each) for each in as_list(draft.take(name))]
        for each in [each for each in data if "self-cognition" in each]:
            draft.leave(name, each, f"{_SELF}; with --drop, it is left out")
        put_data(draft, ours, [part for each in data if "self-cognition" not in each for part in _entries(each)])
    draft.notes["dataset"] = "check rows: ms-swift reads other columns and subsets, and has code for some ids"
    given.setdefault("eval_strategy", given.get("save_strategy"))
    given.setdefault("eval_steps", given.get("save_steps", 500))
    take_evaluation(draft)
    take_template(draft, "template")
    for key in ("system", "new_special_tokens"):
        if any(str(each).endswith(".txt") for each in as_list(given.get(key))):
            draft.leave(key, draft.take(key), "it is in a file; copy its text")
        elif key == "system" and key in given:
            draft.put("system_prompt", str(draft.take(key)).replace("\\n", "\n"))
    if "max_length" not in given and draft.objective != "grpo":
        draft.put("max_length", FAR, "ms-swift uses the model's limit; raise it if a sample is longer")
        draft.put("excess_length_strategy", "error")
    if draft.objective == "distil":
        given.setdefault("distil_temperature", given.get("temperature"))
        take_answers(draft)


def _entries(given: str) -> list[DatasetEntry]:
    """``id:subset/subset#500``, of which 500 rows are drawn."""
    path, _, rows = given.removeprefix("HF::").removeprefix("MS::").partition("#")
    path, _, subsets = path.partition(":")
    drawn = int(rows) if rows.isdigit() else None
    wording = "{instruction}[\n{input}]" if "alpaca" in path.lower() else None
    return [
        entry(path, config=subset or None, max_samples=drawn, prompt_format=wording) for subset in subsets.split("/")
    ]
