"""Scores on tasks of lm-evaluation-harness: ``kit score RUN --tasks NAMES``.

Promises: a score is that of lm-eval's own command on the same model in the same precision, asked in the same way. All
tasks are found and their data read before a weight is. Runs in one process.
"""

import importlib.metadata
import json
import logging
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config.command_line import Request
from kit.config.recipe import Recipe
from kit.console import say, show
from kit.data.chat.template import resolve_template
from kit.errors import Problem, Problems, UserError, did_you_mean, first_line, listed, raise_if
from kit.model.attention import without_cudnn_attention
from kit.run.opening import run_of
from kit.strategy.weights import generating
from kit.tools.opening import Opened, open_models, plan_one_process
from kit.tools.report.data_tables import text_table
from kit.tools.report.run_page import write_report_at_end
from kit.tools.report.task_scores import add_task_scores, scores_in

if TYPE_CHECKING:
    from kit.cli.score_tasks import Asked

_LONGEST_OF_LM_EVAL = 256  # tokens of an answer where a task does not say
_OWN_CODE = re.compile(r"!function\s+\S+|^class\s*:", re.MULTILINE)


def score(request: Request, asked: "Asked") -> None:
    """Score the model, and with ``--base`` its base; print the scores, and keep those of a run in its folder.

    Raises:
        UserError: a task or the model cannot be opened.
    """
    recipe, topology = plan_one_process(request)
    for name in ("lm_eval", "evaluate", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    manager, tasks = _open_tasks(asked)

    def template_of(opened: Recipe, tokenizer: Any) -> Any:
        source = resolve_template(tokenizer, opened.chat_template, opened.chat_template_kwargs)
        if asked.plain or source is None:
            why = "--plain" if asked.plain else f"{opened.model_name_or_path} brings none"
            say(f"chat template: NOT used ({why}); prompts are plain text")
            source = None
        else:
            also = ", with the system prompt" if opened.system_prompt else ""
            say(f"chat template: used{also}; --plain leaves it out")
        _check_lengths(manager, tasks, opened, asked)
        return source

    rows = []
    run_file = run_of(recipe.adapter_name_or_path or recipe.model_name_or_path)
    system_prompt = None
    for model in open_models(recipe, topology, template_of, asked.with_base):
        if not model.is_base and model.template is not None:
            system_prompt = model.recipe.system_prompt
        results = _evaluate(model, manager, tasks, asked, system_prompt)
        row = {
            "step": 0 if model.is_base else _step_of(model.name, run_file),
            "model": model.name,
            "is_base": model.is_base,
            "chat_template": model.template is not None,
            "system_prompt": system_prompt,
            "limit": asked.limit,
            "batch_size": asked.batch_size,
            "mixed_precision": model.prepared.accelerator.mixed_precision,
            "lm_eval": importlib.metadata.version("lm_eval"),
            "time": time.time(),
            "tasks": _task_rows(results),
        }
        rows.append(row)
        show(json.dumps(row))
    show("\n".join(text_table(_table(rows))))
    if run_file:
        try:
            say(f"scores: {add_task_scores(run_file.parent, rows)}")
        except OSError as error:
            say(f"warning: the scores are not kept ({error.strerror or error})")
        else:
            write_report_at_end(run_file.parent)


def _open_tasks(asked: "Asked") -> tuple[Any, list[Any]]:
    """Find the tasks by name, and read their data. Returns lm-eval's index, and its tasks and groups."""
    from lm_eval.tasks import TaskManager

    folder = Path(asked.include_path) if asked.include_path else None
    manager = TaskManager(include_path=folder)
    files = sorted(folder.rglob("*.yaml")) if folder else []
    files += [Path(name) for name in asked.tasks if Path(name).is_file()]
    if with_code := [
        str(path) for path in files if _OWN_CODE.search(path.read_text(encoding="utf-8", errors="replace"))
    ]:
        say(f"these tasks may run Python code beside them, as you who typed their path allow: {listed(with_code)}")
    problems, found = Problems(), []
    for name in asked.tasks:
        with problems.caught():
            for each in manager.match_tasks([name]) or [name]:
                found += _open_task(manager, each, files)
    problems.raise_if_any()
    try:
        tasks = manager.load(found)["tasks"]
    except ValueError as error:  # a task by itself, and in a group
        raise UserError(Problem("--tasks", first_line(error), "each task once")) from None
    for name, task in tasks.items():
        if getattr(task, "MULTIMODAL", False):
            problems.append(Problem("--tasks", f"{name} shows the model pictures or sound", "a task of text"))
        if getattr(task, "UNSAFE_CODE", False) and not asked.runs_unsafe_code:
            what = f"{name} runs code that the model writes, on this machine and with your rights"
            problems.append(Problem("--tasks", what, fix="--confirm_run_unsafe_code, on a machine that may be harmed"))
    problems.raise_if_any()
    return manager, found


def _open_task(manager: Any, name: str, files: Iterable[Path]) -> list[Any]:
    """Return the task or the group of a name, or the tasks of a tag."""
    is_file = Path(name).is_file()
    if name not in manager.task_index and not is_file:
        damaged = [fault for path in files if (fault := _fault_of_yaml(path))]
        fix = did_you_mean(name, manager.all_tasks) or "`lm-eval ls tasks` lists them; --include_path FOLDER has more"
        raise UserError(*damaged, Problem("--tasks", f"lm-eval knows no task {name!r}", fix=fix))
    try:
        loaded = manager.load([name])
    except Exception as error:  # of the network, of the data, or of the task's own code
        kind = type(error).__name__
        found = f"{name} cannot be opened ({kind}: {first_line(error)})"
        fix = "see its YAML file" if is_file or manager.task_index[name].yaml_path in files else ""
        if re.search(
            r"offline|connect|hub|DatasetNotFound|LocalEntryNotFound|resolve", f"{kind} {error}", re.IGNORECASE
        ):
            fix = (
                "its data come from the hub: open it once with a network; or a task on a file of yours: --include_path"
            )
        raise UserError(Problem("--tasks", found, fix=fix)) from None
    inside = {child for group in loaded["groups"].values() for child in group.child_names}
    tops = [*loaded["groups"].items(), *loaded["tasks"].items()]
    return (
        [each for key, each in tops if key not in inside] if name not in loaded["groups"] else [loaded["groups"][name]]
    )


def _fault_of_yaml(path: Path) -> Problem | None:
    """What keeps lm-eval from a task in a YAML file, which it passes over."""
    from lm_eval.tasks._index import TaskIndex

    try:
        TaskIndex.entry_from_path(path)
    except Exception as error:  # of YAML, of its includes, or of its keys
        return Problem(str(path), first_line(error), "the YAML file of a task or a group")
    return None


def _check_lengths(manager: Any, tasks: list[Any], recipe: Recipe, asked: "Asked") -> None:
    """Raise ``UserError`` if answers of a task may be as long as all that the model reads."""
    from kit.model.load import num_positions, open_config

    positions = num_positions(open_config(recipe))
    problems = []
    for name, task in manager.load(tasks)["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until" and positions is not None:
            options = task.config.generation_kwargs or {}
            longest = asked.max_new_tokens or int(options.get("max_gen_toks", _LONGEST_OF_LM_EVAL))
            if longest >= positions:
                found = f"{name} has answers of up to {longest} tokens, and the model reads {positions}"
                problems.append(Problem("--tasks", found, fix=f"--max_new_tokens {positions // 2}"))
    raise_if(problems)


def _evaluate(
    model: Opened, manager: Any, tasks: list[Any], asked: "Asked", system_prompt: str | None
) -> dict[str, Any]:
    """Return lm-eval's results."""
    import lm_eval.evaluator
    from lm_eval.models.huggingface import HFLM

    accelerator = model.prepared.accelerator
    inner: Any = accelerator.unwrap_model(model.prepared.model)
    if inner.generation_config is not None:
        inner.generation_config.eos_token_id = model.stops or None
    if getattr(inner.config.get_text_config(), "output_router_logits", False):
        inner.config.get_text_config().output_router_logits = False  # with one token at a time it would fail
    has_template = model.template is not None
    model.tokenizer.chat_template = model.template
    lm = HFLM(pretrained=inner, backend="causal", tokenizer=model.tokenizer, batch_size=asked.batch_size)
    lm_eval.evaluator.get_git_commit_hash = lambda: None  # it is of the folder where the user stands, and not kept
    with model.aside(), without_cudnn_attention(), generating(accelerator, model.prepared.model):
        results: dict[str, Any] = lm_eval.evaluator.simple_evaluate(
            lm,
            tasks=tasks,
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            batch_size=asked.batch_size,
            log_samples=False,
            system_instruction=system_prompt,
            apply_chat_template=has_template,
            fewshot_as_multiturn=has_template,
            gen_kwargs={"max_gen_toks": asked.max_new_tokens} if asked.max_new_tokens else None,
            task_manager=manager,
            confirm_run_unsafe_code=asked.runs_unsafe_code,
        )
    return results


def _task_rows(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept of lm-eval's results, by task and group."""
    rows = {}
    for name, scores in results["results"].items():
        numbers = {
            key: value
            for key, value in scores.items()
            if "," in key and isinstance(value, int | float) and math.isfinite(value)
        }
        rows[name] = {
            "version": results.get("versions", {}).get(name),
            "num_fewshot": results.get("n-shot", {}).get(name),
            "num_samples": results.get("n-samples", {}).get(name, {}).get("effective"),
            "scores": numbers,
        }
    return rows


def _step_of(model: str, run_file: Path | None) -> int:
    """The number of steps after which a run wrote this model; 0 of a model that is in no run's folder."""
    if run_file is None:
        return 0
    named = re.fullmatch(r"step-(\d+)", Path(model).resolve().name)
    return int(named[1]) if named else int(json.loads(run_file.read_text(encoding="utf-8"))["finished_steps"])


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The scores for a terminal, a line for each metric."""
    lines = []
    for row in rows:
        for task, about in row["tasks"].items():
            for metric, (value, error) in scores_in(about).items():
                shots = about["num_fewshot"]
                lines.append(
                    {
                        "model": "base" if row["is_base"] else Path(row["model"]).name,
                        "task": task,
                        "shots": "" if shots is None else str(shots),
                        "metric": metric,
                        "score": f"{value:.4f}",
                        "± stderr": "" if error is None else f"{error:.4f}",
                    }
                )
    return lines
