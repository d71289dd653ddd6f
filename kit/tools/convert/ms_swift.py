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
from kit.tools.convert.draft import Draft, Group, as_list, number

_SELF = "its rows have {{NAME}} and {{AUTHOR}}: write the names into a copy of the file, and give that"


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    draft.put("method", "full" if "micro_batch_size" in draft.given else "lora")  # the default of its Megatron
    draft.read("tuner_type", "train_type", "quant_bits", "rlhf_type", "task_type")
    micro = int(number(draft.given.get("per_device_train_batch_size", draft.given.get("micro_batch_size", 1))))
    take_batch(draft, 1, max(1, math.ceil(16 / micro / draft.num_processes)))
    take_training(draft)
    for name, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        data = [str(each) for each in as_list(draft.take(name))]
        for each in [each for each in data if "self-cognition" in each]:
            draft.leave(name, each, Group.LEARNS, f"{_SELF}; with --drop, it is left out")
        put_data(draft, ours, [part for each in data if "self-cognition" not in each for part in _entries(each)])
    take_evaluation(draft)
    take_template(draft, "template")
    for key in ("system", "new_special_tokens"):
        if any(str(each).endswith(".txt") for each in as_list(draft.given.get(key))):
            draft.leave(key, draft.take(key), Group.LEARNS, "it stands in a file; give its text by hand")
        elif key == "system" and key in draft.given:
            draft.put("system_prompt", str(draft.take(key)).replace("\\n", "\n"))
    draft.given.setdefault("target_modules", "all-linear")
    if "max_length" not in draft.given:
        draft.put("max_length", FAR, "ms-swift takes what the model can; raise it if a sample is longer")
        draft.put("excess_length_strategy", "error")
    if draft.objective == "distil":
        if (temperature := draft.given.get("temperature")) is not None:
            draft.put("distil_temperature", temperature)
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
