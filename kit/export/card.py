"""The model card of ``final/`` and of exported models: ``README.md``.

Promises: the metadata are valid for the Hub, and name only what others can open: no path of this machine, no
credential. Untrusted text is no mark of Markdown and begins no line. The code on the card runs as it stands, apart
from the name of the folder.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.config.settings.data import DataSettings
from kit.config.settings.method import MethodSettings
from kit.config.settings.objective import PLAIN
from kit.data.read.sources import hub_id
from kit.run.record import is_evaluation, metrics_rows
from kit.scoring.own_metric import is_own
from kit.strategy.topology import ActualStrategy
from kit.system.credentials import redacted
from kit.system.errors import UserError, counted
from kit.system.visible import one_line
from kit.train.loop_state import OF_THE_DATA, LoopState

NO_STOPS: Mapping[str, int] = {}
PLACEHOLDER = "path/to/this/folder"
LICENCE_OF_BASE = "- licence of the base: look it up before you publish"
_IN_CACHE = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")  # a folder of the hub's cache
_CODE = re.compile(r"\n```(?:python|bash)\n.*", re.DOTALL)  # how to use the model: the end of a card
_PIPELINES = {"AutoModelForSequenceClassification": "text-classification", "AutoModel": "sentence-similarity"}
_LICENCE = re.compile(r"[\w.+-]{1,80}")


def model_card(
    settings: MethodSettings,
    strategy: ActualStrategy | None,
    state: LoopState,
    tokenizer: Any,
    text_form: str = "chat",
    stops: Mapping[str, int] = NO_STOPS,
    loader: str = "AutoModelForCausalLM",
    dequantised_by: str = "",
    merged: str = "",
) -> str:
    """Return the model card: base, data, training settings, strategy, evaluation, and how to use the model.

    Args:
        settings: the recipe of the run; other settings, which open the base, if the run is not known.
        strategy: of the run; None: not known.
        state: after the last step.
        tokenizer: the one beside the card.
        text_form: of the texts that the model was trained on, see ``kit.data.chat.tokens.FORMS``.
        stops: the tokens that end answers, but for those at which the base stops too, see ``new_stops``.
        loader: the class of transformers that opens the base, see ``kit.model.pretrained.classes``.
        dequantised_by: the class of transformers that opens the files of a quantised base as they were trained on.
        merged: the dtype in which the adapter was merged into its base; empty: it was not, or there is none.
    """
    is_plain = settings.method == "full" or bool(merged)  # a model that needs no other
    base = _base_id(settings.model_name_or_path)
    base_name = (base or Path(os.path.expanduser(settings.model_name_or_path)).name).rpartition("/")[2]
    title, of_run = f"{as_code(base_name)}, fine-tuned", ["- data and training: not known"]
    more: dict[str, Any] = {}
    table: list[str] = []
    if isinstance(settings, Recipe) and strategy is not None:
        how = settings.method if settings.objective == PLAIN else f"{settings.objective}, {settings.method}"
        title = f"{title} ({how})"
        table = _table(state)
        of_run = [*_data_lines(settings), *_training_lines(settings, strategy, state)]
        more = {
            "datasets": list(dict.fromkeys(filter(None, map(_data_id, settings.dataset_entries)))) or None,
            "tags": [settings.objective] if settings.objective != PLAIN else None,
        }
    # Hub ids only: the Hub links what it finds here.
    about = ModelCardData(
        library_name="transformers" if is_plain else "peft",
        pipeline_tag=_PIPELINES.get(loader, "text-generation"),
        base_model=base,
        **more,
    )
    lines = ["---", *about.to_yaml().splitlines(), "---", "", f"# {title}", ""]
    lines += [f"- base: {as_code(base)}" if base else f"- base: a folder named {as_code(base_name)}, not from the Hub"]
    lines += [LICENCE_OF_BASE, *of_run]
    if stops:
        lines += [f"- stop tokens: {', '.join(map(as_code, stops))}"]
    if merged:
        lines += [f"- the adapter is merged into its base, in {merged}: the model needs nothing else"]
        lines += ["- the evaluation was made before the merge"] * bool(table)
    lines += ["", *table]
    code = _code_to_use(settings, is_plain, tokenizer, text_form, bool(stops), loader, dequantised_by)
    return redacted("\n".join([*lines, "```python", *code, "```", ""]))


def converted_card(card: str, tag: str, made: str, lines: Sequence[str], code: str = "") -> str:
    """Return the card of files that were converted from a model.

    Args:
        card: of the model.
        tag: for the Hub: ``gguf``.
        made: how they were made.
        lines: how they were compared with the model.
        code: the block that says how to use them; empty: that of the model.
    """
    model = ModelCard(card)
    about = model.data.to_dict()
    about["tags"] = [*(about.get("tags") or []), tag]
    end = _CODE.search(model.text)
    text = model.text[: end.start()] if end else model.text
    listed = "\n".join(f"- {line.strip()}" for line in lines)
    use = code or (end[0] if end else "")
    return f"---\n{ModelCardData(**about).to_yaml()}\n---\n{text.rstrip()}\n\n{made}\n\n{listed}\n{use}"


def serving_section(command: str, why: str = "To serve it") -> str:
    """Return the end of a card that has the ``command`` of a server, or another one after ``why``."""
    return f"\n{why}:\n\n```bash\n{command}\n```\n"


def state_of(folder: Path) -> LoopState:
    """Return the state after the last step of the run in ``folder``, as far as its ``metrics.jsonl`` says it."""
    state = LoopState()
    for row in metrics_rows(folder):
        state.step = max(state.step, row["step"])
        if is_evaluation(row):
            state.end_evaluation(row["step"], {name: row[name] for name in row if name.startswith("eval_")})
    return state


def _data_lines(settings: DataSettings) -> list[str]:
    lines = []
    for entry in settings.dataset_entries:
        found = _data_id(entry)
        known = f", {as_code(found)}" if found and found != entry.name else ""
        lines += [f"- data: {as_code(entry.name)}{known}", LICENCE_OF_BASE.replace("base", "data")]
    return lines


def _training_lines(recipe: Recipe, strategy: ActualStrategy, state: LoopState) -> list[str]:
    """What was minimised, how long, and where."""
    lines = []
    settings = recipe.objective_settings
    if recipe.objective != PLAIN or any(settings.values()):
        shown = [as_code(f"{name} {_without_folder(value)}") for name, value in settings.items() if value]
        lines += [f"- objective: {', '.join([recipe.objective, *shown])}"]
    lines += [f"- {state.step} steps of {recipe.global_batch_size} {'packs' if recipe.packing else 'samples'}"]
    lines += [f"- peak learning rate {recipe.peak_learning_rate:g}, {recipe.lr_scheduler_type}, seed {recipe.seed}"]
    processes = counted(strategy.num_processes, "process")
    lines += [f"- {strategy.type} on {processes}, mixed_precision {strategy.mixed_precision}"]
    if recipe.qat:
        quantised = f"- quantisation-aware training (QAT) for torchao's {recipe.qat}"
        lines += [f"{quantised}; the evaluation is that of quantised weights"]
    if recipe.system_prompt:
        lines += [f"- system prompt of conversations without one: {as_code(recipe.system_prompt)}"]
    return lines


def _without_folder(value: Any) -> Any:
    """The value of a setting; of a path of this machine the name of the file, with its function if it is code."""
    if isinstance(value, list):
        return [_without_folder(each) for each in value]
    if not isinstance(value, str):
        return value
    file = value.rpartition(":")[0] if is_own(value) else value
    return os.path.basename(value) if os.path.exists(os.path.expanduser(file)) else value


def _base_id(name: str) -> str | None:
    """The hub id of the base; None for a folder that is not from the Hub."""
    folder = os.path.expanduser(name)
    if not os.path.exists(folder):
        return _valid_id(name)
    found = _IN_CACHE.search(f"{os.path.realpath(folder)}/".replace(os.sep, "/"))
    return _valid_id(f"{found[1]}/{found[2]}") if found else None


def _data_id(entry: DatasetEntry) -> str | None:
    """The hub id of a dataset; None for files."""
    with suppress(UserError, OSError):  # an export may come after the files have moved
        found = hub_id(entry.path, entry.split or "", "dataset")
        return _valid_id(found) if found else None
    return None


def _valid_id(name: str) -> str | None:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def licence_in(about: Mapping[str, Any]) -> dict[str, str]:
    """Return what the metadata of a card say of the licence; empty if that is nothing, or in an unknown form."""
    found = {key: about[key] for key in ("license", "license_name", "license_link") if isinstance(about.get(key), str)}
    return found if _LICENCE.fullmatch(found.get("license", "")) else {}


def _table(state: LoopState) -> list[str]:
    """The metrics after the last step, compared with the first evaluation; nothing if it was not evaluated."""
    last, first, since = state.current_evaluation, state.first_evaluation, state.first_evaluated_step
    if not last:
        return []
    columns = {f"after step {state.step}": last}
    if first and since < state.step:
        columns = {f"after step {since}" if since else "before training": first, **columns}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in (name for name in last if not name.startswith(OF_THE_DATA)):
        values = (f"{each[name]:.5g}" if name in each else "" for each in columns.values())
        shown = as_code(name.replace("\\", "\\\\").replace("|", "\\|"))  # else a cell would end there
        lines.append(f"| {shown} | {' | '.join(values)} |")
    return [*lines, ""]


def as_code(text: str) -> str:
    """Untrusted text as a code span of Markdown, on one line: nothing in it is a mark or HTML."""
    text = one_line(text).replace("`", "'")
    return f"`{text}`"


def _code_to_use(
    settings: MethodSettings,
    is_plain: bool,
    tokenizer: Any,
    text_form: str,
    has_stops: bool,
    loader: str,
    dequantised_by: str,
) -> list[str]:
    """Lines of Python that open the model of a card, and generate. The arguments are those of ``model_card``."""
    more = ", trust_remote_code=True" if settings.trust_remote_code else ""
    if loader == "AutoModel":
        return [
            "from sentence_transformers import SentenceTransformer",
            "",
            f'model = SentenceTransformer("{PLACEHOLDER}"{more})',
            'vectors = model.encode(["a question", "an answer to it"])',
            "print(model.similarity(vectors, vectors))",
        ]
    has_head = loader in _PIPELINES
    options = f'dtype="auto", device_map="auto"{more}'
    lines = ["import transformers"] if is_plain else ["import transformers", "from peft import PeftConfig, PeftModel"]
    lines += ["", f'folder = "{PLACEHOLDER}"', f"tokenizer = transformers.AutoTokenizer.from_pretrained(folder{more})"]
    if is_plain:
        lines += [f"model = transformers.{loader}.from_pretrained(folder, {options})"]
    else:
        if dequantised_by:
            options += f", quantization_config=transformers.{dequantised_by}(dequantize=True)"
        lines += ["base = PeftConfig.from_pretrained(folder).base_model_name_or_path"]
        if has_head:
            labels = dict(enumerate(settings.scores if isinstance(settings, Recipe) else ["LABEL_0"]))
            options += f", id2label={labels}, pad_token_id=tokenizer.pad_token_id"
        lines += [f"model = transformers.{loader}.from_pretrained(base, {options})"]
        if settings.new_tokens:
            rows = "max(len(tokenizer), model.get_input_embeddings().num_embeddings)"
            lines += [f"model.resize_token_embeddings({rows})  # for the new tokens"]
        lines += ["model = PeftModel.from_pretrained(model, folder)"]
        if has_stops:  # PEFT opens the base's generation_config.json, not the adapter's
            lines += [
                "model.generation_config = transformers.GenerationConfig.from_pretrained(folder)  # where it stops"
            ]
    if tokenizer.chat_template and text_form == "chat":
        system = settings.system_prompt if isinstance(settings, Recipe) else None
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": "Hello!"}]
        shows_answer = has_head and not (isinstance(settings, Recipe) and settings.declared.rows == "classification")
        messages += [{"role": "assistant", "content": "Hi!"}] if shows_answer else []  # a question with its answer
        lines += [
            f"messages = [{', '.join(map(json.dumps, messages))}]",
            "inputs = tokenizer.apply_chat_template(",
            f'    messages, add_generation_prompt={not has_head}, return_tensors="pt", return_dict=True',
            ").to(model.device)",
        ]
    elif text_form == "ended":
        bos = "tokenizer.bos_token + " if tokenizer.bos_token else ""
        text = '"a question\\nan answer" + tokenizer.eos_token' if has_head else '"Once upon a time"'
        lines += [f'inputs = tokenizer({bos}{text}, add_special_tokens=False, return_tensors="pt").to(model.device)']
    else:
        lines += ['inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)']
    if has_head:
        return [*lines, "print(model(**inputs).logits)"]
    return [
        *lines,
        "output = model.generate(**inputs, max_new_tokens=200)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
