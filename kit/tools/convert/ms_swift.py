"""Files of ms-swift: what ``kits/ms_swift.yaml`` cannot say.

Its hub is ModelScope: ids may have another name at Hugging Face's.
"""

import math

from kit.config.dataset_entry import DatasetEntry
from kit.tools.convert.common import entry, put_data, take_batch, take_evaluation, take_template, take_training
from kit.tools.convert.draft import Draft, Group, as_list, number

_FAR = 8192  # tokens; without max_length ms-swift takes what the model can
_SELF = "its rows have {{NAME}} and {{AUTHOR}}: write the names into a copy of the file, and give that"


def convert(draft: Draft) -> None:
    """Read the keys that a table cannot explain."""
    draft.put("method", "lora")
    draft.read("tuner_type", "train_type", "quant_bits", "rlhf_type")
    micro = int(number(draft.given.get("per_device_train_batch_size", 1)))
    take_batch(draft, 1, max(1, math.ceil(16 / micro / draft.num_processes)))
    take_training(draft)
    for name, ours in (("dataset", "dataset"), ("val_dataset", "eval_dataset")):
        data = [str(each) for each in as_list(draft.take(name))]
        for each in [each for each in data if "self-cognition" in each]:
            draft.leave(name, each, Group.LEARNS, f"{_SELF}; with --drop, it is left out")
        put_data(draft, ours, [_entry(each) for each in data if "self-cognition" not in each])
    take_evaluation(draft)
    take_template(draft, "template")
    for key in ("system", "new_special_tokens"):
        if any(str(each).endswith(".txt") for each in as_list(draft.given.get(key))):
            draft.leave(key, draft.take(key), Group.LEARNS, "it stands in a file; give its text by hand")
        elif key == "system" and key in draft.given:
            draft.put("system_prompt", str(draft.take(key)).replace("\\n", "\n"))
    draft.given.setdefault("target_modules", "all-linear")
    draft.given.setdefault("max_length", _FAR)
    if draft.values.get("objective") == "simpo":
        draft.given.setdefault("simpo_gamma", 1)
    draft.default("learning_rate", 1e-5 if draft.values["method"] == "full" else 1e-4)


def _entry(given: str) -> DatasetEntry:
    """``id:subset#500``, of which 500 rows are drawn."""
    path, _, rows = given.removeprefix("HF::").removeprefix("MS::").partition("#")
    path, _, subset = path.partition(":")
    return entry(path, config=subset.split("/")[0] or None, max_samples=int(rows) if rows.isdigit() else None)
