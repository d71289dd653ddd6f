"""The model card of ``final/`` and of exported checkpoints: ``README.md``.

Promises: the metadata are valid for the Hub, and name only what others can open: no path of this machine, no
credential. The code on the card runs as it stands, apart from the name of the folder.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.data.read.sources import hub_id
from kit.durable import read_small
from kit.errors import UserError
from kit.run.record import metrics_rows
from kit.secrets import redacted
from kit.strategy.topology import ActualStrategy
from kit.train.loop_state import OF_THE_DATA, LoopState
from kit.visible import one_line

NO_STOPS: Mapping[str, int] = {}
PLACEHOLDER = "path/to/this/folder"
_IN_CACHE = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")  # a folder of the hub's cache
_ROWS = {"answers": "samples", "pairs": "pairs", "rated": "answers"}
_SERVING = re.compile(r"\n*To serve it:\n\n```bash\n[^`]*```\n")
_LICENCE = re.compile(r"[\w.+-]{1,80}")


def model_card(
    recipe: Recipe,
    strategy: ActualStrategy,
    state: LoopState,
    has_chat_template: bool,
    stops: Mapping[str, int] = NO_STOPS,
    loader: str = "AutoModelForCausalLM",
    dequantised_by: str = "",
    merged: str = "",
) -> str:
    """Return the model card: base, data, training settings, strategy, evaluation, and how to use the model.

    Args:
        state: after the last step.
        has_chat_template: whether the tokenizer beside the card has one.
        stops: the tokens that end answers, but for those at which the base stops too, see ``new_stops``.
        loader: the class of transformers that opens the base, see ``kit.model.classes``.
        dequantised_by: the class of transformers that opens the files of a quantised base as they were trained on.
        merged: the dtype in which the adapter was merged into its base; empty: it was not, or there is none.
    """
    is_plain = recipe.method == "full" or bool(merged)  # a model that needs no other
    base = _base_id(recipe.model_name_or_path)
    base_name = (base or Path(os.path.expanduser(recipe.model_name_or_path)).name).rpartition("/")[2]
    how = recipe.method if recipe.objective == "sft" else f"{recipe.objective}, {recipe.method}"
    title = f"{base_name}, fine-tuned ({how})"
    entries = recipe.dataset_entries
    ids = {entry.name: found for entry in entries if (found := _data_id(entry))}
    licence = _licence_of(recipe.model_name_or_path, "model", recipe.model_revision)
    evaluations = _evaluations(state)
    # Hub ids only: the Hub links what it finds here.
    about = ModelCardData(
        library_name="transformers" if is_plain else "peft",
        pipeline_tag="text-generation",
        base_model=base,
        datasets=list(dict.fromkeys(ids.values())) or None,
        tags=[recipe.objective] if recipe.objective != "sft" else None,
        **licence,
        **_results(title, recipe, evaluations, state.step),
    )
    items = "packs" if recipe.packing else _ROWS[recipe.declared.rows]
    num, precision = strategy.num_processes, strategy.mixed_precision
    lines = [*_heading(about, title), _base_line(base, base_name), licence_line("base", licence)]
    for entry in entries:
        known = f", {_code(ids[entry.name])}" if ids.get(entry.name, entry.name) != entry.name else ""
        data_licence = _licence_of(ids[entry.name], "dataset", entry.revision) if entry.name in ids else {}
        lines += [f"- data: {_code(entry.name)}{known}", licence_line("data", data_licence)]
    lines += _objective_lines(recipe)
    lines += [f"- {state.step} steps of {recipe.global_batch_size} {items}"]
    lines += [f"- peak learning rate {recipe.peak_learning_rate:g}, {recipe.lr_scheduler_type}, seed {recipe.seed}"]
    processes = "1 process" if num == 1 else f"{num} processes"
    lines += [f"- {strategy.type.name} on {processes}, mixed_precision {precision}"]
    if recipe.qat:
        lines += [
            f"- trained for weights that torchao rounds to {recipe.qat}; the evaluation is that of rounded weights"
        ]
    if recipe.new_tokens:
        tokens = ", ".join(map(_code, recipe.new_tokens))
        lines += [f"- new tokens: {tokens}"]
        if not is_plain:
            resize = "base.resize_token_embeddings(len(tokenizer))"
            lines += [
                f"- the class below gives the base their rows; before `PeftModel.from_pretrained`, call `{resize}`"
            ]
    if recipe.system_prompt:
        lines += [f"- system message of conversations that had none: {_code(recipe.system_prompt)}"]
    if stops:
        lines += [f"- answers end with {' or '.join(map(_code, stops))}"]
    if merged:
        lines += [_merged_line(merged)]
        if evaluations:
            lines += ["- the evaluation is that of the adapter on its base, before the merge"]
    lines += ["", *_table(evaluations), *([""] if evaluations else [])]
    system = recipe.system_prompt
    code = _code_to_use(recipe, is_plain, system, has_chat_template, bool(stops), loader, dequantised_by)
    lines += ["```python", *code, "```", ""]
    if not is_plain and not base:
        lines += [
            "The adapter needs its base: `base_model_name_or_path` in `adapter_config.json` is the folder that has it.",
            "",
        ]
    return redacted("\n".join(lines))


def card_without_run(
    settings: MethodSettings, has_chat_template: bool, stops: Mapping[str, int], loader: str, merged: str
) -> str:
    """Return the card of a model whose run is not known: its base with the licence, and how to use it.

    Args:
        settings: open the base. The other arguments are those of ``model_card``; ``merged`` may be empty.
    """
    base = _base_id(settings.model_name_or_path)
    base_name = (base or Path(os.path.expanduser(settings.model_name_or_path)).name).rpartition("/")[2]
    licence = _licence_of(settings.model_name_or_path, "model", settings.model_revision)
    title = f"{base_name}, fine-tuned"
    about = ModelCardData(library_name="transformers", pipeline_tag="text-generation", base_model=base, **licence)
    lines = [*_heading(about, title), _base_line(base, base_name), licence_line("base", licence)]
    lines += ["- data and training: not known, no record of a run was beside it"]
    if stops:
        lines += [f"- answers end with {' or '.join(map(_code, stops))}"]
    lines += [_merged_line(merged), ""] if merged else [""]
    code = _code_to_use(settings, True, None, has_chat_template, bool(stops), loader, "")
    return redacted("\n".join([*lines, "```python", *code, "```", ""]))


def torchao_card(card: str, lines: Sequence[str]) -> str:
    """Return the card of a model whose weights torchao rounds.

    Args:
        card: of the plain model.
        lines: how it was rounded and compared.
    """
    made = ModelCard(card)
    about = made.data.to_dict()
    about["tags"] = [*(about.get("tags") or []), "torchao"]
    text, code, rest = _SERVING.sub("\n", made.text).rpartition("```python")
    added = ["Its weights are rounded by torchao, which opening it needs: `pip install torchao`.", ""]
    added += [f"- {_plain(line.strip())}" for line in lines]
    return f"---\n{ModelCardData(**about).to_yaml()}\n---\n{text}" + "\n".join([*added, "", ""]) + code + rest


def serving_section(command: str) -> str:
    """Return the end of a card that has the ``command`` of a server."""
    return f"\nTo serve it:\n\n```bash\n{command}\n```\n"


def gguf_card(card: str, files: Sequence[str], compared: Sequence[str], has_modelfile: bool) -> str:
    """Return the card of GGUF files.

    Args:
        card: of the model that they were made from.
        compared: lines that say how they were compared with it.
        has_modelfile: whether there is one for Ollama.
    """
    made = ModelCard(card)
    about = made.data.to_dict()
    about["tags"] = [*(about.get("tags") or []), "gguf"]
    about.pop("library_name", None)
    text = re.sub(r"```python\n.*?```\n", "", _SERVING.sub("\n", made.text), flags=re.DOTALL).rstrip()
    lines = ["", "", "Written by llama.cpp's converter, and compared with the model in transformers:", ""]
    lines += [f"- {_plain(line.strip())}" for line in compared]
    lines += ["", "```bash", *(f"llama-server --jinja -m {file}" for file in files)]
    lines += ["ollama create mine -f Modelfile && ollama run mine"] * has_modelfile
    return f"---\n{ModelCardData(**about).to_yaml()}\n---\n{text}" + "\n".join([*lines, "```", ""])


def state_of(folder: Path) -> LoopState:
    """Return the state after the last step of the run in ``folder``, as far as its ``metrics.jsonl`` says it."""
    state = LoopState()
    for row in metrics_rows(folder):
        state.step = max(state.step, row["step"])
        metrics = {name: value for name, value in row.items() if name.startswith("eval_")}
        if "eval_loss" in metrics:
            state.end_evaluation(row["step"], metrics)
    return state


def _heading(about: ModelCardData, title: str) -> list[str]:
    return ["---", *about.to_yaml().splitlines(), "---", "", f"# {_plain(title)}", ""]


def _base_line(base: str | None, base_name: str) -> str:
    return f"- base: {_code(base)}" if base else f"- base: a folder named {_code(base_name)}, not from the Hub"


def _merged_line(dtype: str) -> str:
    return f"- the adapter is merged into its base, in {dtype}: the model needs nothing else"


def _objective_lines(recipe: Recipe) -> list[str]:
    """What was minimised, and on what data; nothing for the cross-entropy of answers."""
    settings = recipe.objective_settings
    if recipe.objective == "sft" and not any(settings.values()):
        return []
    shown = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in settings.items()
        if value or recipe.declared.rows != "answers"
    ]
    lines = [f"- objective: {', '.join([recipe.objective, *shown])}"]
    if recipe.declared.rows == "pairs":
        lines += ["- learned from pairs of a chosen and a rejected answer to the same prompt"]
    elif recipe.declared.rows == "rated":
        lines += ["- learned from answers with a label that says whether they are good"]
    if recipe.declared.has_reference:
        adapter = ", with the adapter from which it began" if recipe.adapter_name_or_path else ""
        lines += [f"- reference: the base{adapter}"]
    return lines


def _base_id(name: str) -> str | None:
    """The hub id of the base; None for a folder that is not from the Hub."""
    folder = os.path.expanduser(name)
    if not os.path.exists(folder):
        return _valid_id(name)
    found = _IN_CACHE.search(f"{os.path.realpath(folder)}/".replace(os.sep, "/"))
    return _valid_id(f"{found[1]}/{found[2]}") if found else None


def _data_id(entry: DatasetEntry) -> str | None:
    """The hub id of a data set; None for files."""
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


def _licence_of(name: str, kind: Literal["model", "dataset"], revision: str | None) -> dict[str, Any]:
    """The licence that the card beside a model or data set names, as metadata; empty if there is none here.

    Makes no request: the card is that of a folder, or one in the hub's cache.
    """
    folder = os.path.expanduser(name)
    path: Any = os.path.join(folder, "README.md")
    if not os.path.isdir(folder):
        path = try_to_load_from_cache(name, "README.md", revision=revision, repo_type=kind) if _valid_id(name) else None
    if not isinstance(path, str):
        return {}
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        about = ModelCard(str(read_small(Path(path))), ignore_metadata_errors=True).data.to_dict()
        return licence_in(about)
    return {}


def licence_in(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the metadata of a card say of the licence; empty if that is nothing, or in an unknown form."""
    found = {key: about[key] for key in ("license", "license_name", "license_link") if key in about}
    is_usual = all(isinstance(value, str) for value in found.values())
    return found if is_usual and _LICENCE.fullmatch(found.get("license", "")) else {}


def licence_line(what: str, licence: Mapping[str, str]) -> str:
    """Return the line of the card that names ``licence``, see ``licence_in``, or says that there is none here."""
    if not licence:
        return f"- licence of the {what}: not in the files here; look it up before you publish"
    name = licence.get("license_name", licence["license"])
    link = f", {_code(licence['license_link'])}" if "license_link" in licence else ""
    return f"- licence of the {what}: {_code(name)}{link}"


def _evaluations(state: LoopState) -> dict[str, dict[str, float]]:
    """The metrics of the first and the last evaluation, by when they were; empty if the last step had none."""
    found = {}
    if state.current_evaluation:
        if state.first_evaluated_step < state.step and state.first_evaluation:
            first = state.first_evaluated_step
            found["before training" if first == 0 else f"after step {first}"] = state.first_evaluation
        found[f"after step {state.step}"] = state.current_evaluation
    return found


def _results(title: str, recipe: Recipe, evaluations: Mapping[str, Mapping[str, float]], step: int) -> dict[str, Any]:
    """The metrics after the last step as metadata; the Hub shows them beside the card."""
    last = evaluations.get(f"after step {step}", {})
    names = [entry.name for entry in recipe.eval_dataset_entries or recipe.dataset_entries]
    results = []
    for name, value in last.items():
        metric, dataset = name.removeprefix("eval_"), ", ".join(names)
        if metric.startswith("loss/"):  # of one of several data sets
            metric, _, dataset = metric.partition("/")
        if not name.startswith(OF_THE_DATA):
            is_of_objective = metric == "loss" and recipe.declared.rows != "answers"
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type="evaluation data of the run",
                    dataset_name=one_line(dataset),
                    metric_type=metric,
                    metric_name=f"loss of {recipe.objective}" if is_of_objective else None,
                    metric_value=float(f"{value:.6g}"),
                )
            )
    return {"model_name": one_line(title), "eval_results": results} if results else {}


def _table(evaluations: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not evaluations:
        return []
    *_, last = evaluations.values()
    lines = [f"| | {' | '.join(evaluations)} |", "|---" * (1 + len(evaluations)) + "|"]
    for name in last:
        if not name.startswith(OF_THE_DATA):
            values = (_number(each[name]) if name in each else "" for each in evaluations.values())
            lines.append(f"| {_plain(name)} | {' | '.join(values)} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e5 else f"{value:.5g}"


def _code(text: str) -> str:
    """Text of strangers as a code span of Markdown, on one line: nothing in it is a mark or HTML."""
    text = one_line(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    space = " " if longest else ""  # else a mark at the end would belong to the fence
    return f"{'`' * (longest + 1)}{space}{text}{space}{'`' * (longest + 1)}"


def _plain(name: str) -> str:
    """A name for running text of Markdown; as code if it has other characters than names usually have."""
    return name if re.fullmatch(r"[\w./(), -]+", name) else _code(name)


def _code_to_use(
    settings: MethodSettings,
    is_plain: bool,
    system: str | None,
    has_chat_template: bool,
    has_stops: bool,
    loader: str,
    dequantised_by: str,
) -> list[str]:
    """Lines of Python that open the model of a card, and generate.

    Args:
        settings: open the base.
        is_plain: whether the model is one without an adapter.
        system: the system message of the conversation.
        has_stops: whether there are tokens that end answers, at which the base does not stop.
        loader: the class that opens the base.
        dequantised_by: the class of the settings that open a quantised base as plain weights; else empty.
    """
    by_peft = (
        loader == "AutoModelForCausalLM" and not is_plain
    )  # PEFT's own classes open no model that reads images too
    class_name = "AutoPeftModelForCausalLM" if by_peft else loader
    opens_stops = has_stops and not is_plain  # PEFT opens the base's generation_config.json, not the adapter's
    own = ([] if by_peft else [loader]) + (["GenerationConfig"] if opens_stops else [])
    if is_plain:
        dequantised_by = ""
    own += [dequantised_by] if dequantised_by else []
    lines = [] if is_plain else [f"from peft import {class_name if by_peft else 'PeftModel'}"]
    lines += [f"from transformers import {', '.join(sorted([*own, 'AutoTokenizer']))}", ""]
    more = ", trust_remote_code=True" if settings.trust_remote_code else ""
    as_trained = f", quantization_config={dequantised_by}(dequantize=True)" if dequantised_by else ""
    opened = (
        "folder" if is_plain or by_peft else json.dumps(_base_id(settings.model_name_or_path) or "path/to/the/base")
    )
    lines += [
        f'folder = "{PLACEHOLDER}"',
        f"tokenizer = AutoTokenizer.from_pretrained(folder{more})",
        f'model = {class_name}.from_pretrained({opened}, dtype="auto", device_map="auto"{more}{as_trained})',
    ]
    if opened != "folder":
        lines += ["model = PeftModel.from_pretrained(model, folder)"]
    if opens_stops:
        lines += ["model.generation_config = GenerationConfig.from_pretrained(folder)  # where it stops"]
    if has_chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": "Hello!"}]
        lines += [
            f"messages = [{', '.join(map(json.dumps, messages))}]",
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ").to(model.device)",
        ]
    else:
        lines += ['inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)']
    return [
        *lines,
        "output = model.generate(**inputs, max_new_tokens=200)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
