"""Sample answers to prompts, and keep those that pass rewards as a dataset, with any strategy or from a server.

    accelerate launch recipes/sample.py runs/tiny-grpo-single prompts.jsonl --rewards exact_match \\
        --keep 'exact_match==1' --out new.jsonl
    accelerate launch recipes/sample.py BASE prompts.jsonl --rewards math,overlong:64 -n 16 --pairs --out pairs.jsonl
    accelerate launch recipes/sample.py BASE prompts.jsonl --rewards number --keep 'number>=1' --keep best \\
        --server http://localhost:8000 --server_model TEACHER --out new.jsonl

The rows are prompt and completion for SFT, or with --pairs prompt, chosen and rejected for DPO. The same command
continues a file that was interrupted; a file of another command stays as it is. FILE.manifest.json has settings and
counts.

  --rewards NAMES      reward functions of --objective grpo
  -n N                 answers to each prompt (default: 8), by --rollout_temperature (default: 1), --seed, ...
  --keep CONDITION     NAME>=NUMBER, NAME>NUMBER or NAME==NUMBER, where NAME is a reward, or `reward` for their weighted
                       sum; or `best`: one answer to a prompt. Several, if repeated, must all hold
  --pairs              the best and the worst answer to a prompt, if their sums differ
  --out FILE.jsonl     the new dataset
  --server URL         OpenAI-compatible server that answers; the model here only checks the prompts
  --server_model NAME  its name at the server (default: the model here)
"""

import json
import os
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.system import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # also while the imports below run

from kit import __version__
from kit.config.command_line import read_command_line
from kit.config.launch_flags import Launch
from kit.failures import exits
from kit.run.identity import differences
from kit.strategy.launch import launch
from kit.system import durable, phases
from kit.system.console import Parser, is_main, progress, say
from kit.system.errors import Problem, UserError, listed, raise_if

FIRST = """
model_name_or_path adapter_name_or_path dataset rewards reward_weights max_new_tokens max_length seed
rollout_temperature rollout_top_p per_device_eval_batch_size system_prompt chat_template config num_processes
""".split()
POSITIONAL = ("model_name_or_path", "dataset")
# What answers depend on, beside the flags of this script, the weights and the data.
SETTINGS = """
model_name_or_path adapter_name_or_path rewards reward_weights max_new_tokens seed rollout_temperature rollout_top_p
rollout_top_k rollout_min_p
""".split()
TOTAL, BEST = "reward", "best"  # of --keep
Condition = tuple[str, str, float]
Scored = tuple[dict[str, Any], dict[str, Any]]  # an answer's rewards by their names, and its message


def main() -> None:
    """Write the dataset, or continue it: a few prompts at a time, of which the file then has all rows."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--pairs", action="store_true")
    for flag in ("--out", "--server", "--server_model"):
        parser.add_argument(flag, default="")
    own, words = parser.parse_known_args()
    words += ["--objective=grpo", *[f"--vllm_server_base_url={own.server}"] * bool(own.server)]
    request = read_command_line(words, {}, __doc__ or "", FIRST, POSITIONAL, trains=False)
    for number, problem in enumerate(request.problems):
        request.problems[number] = replace(problem, where=problem.where.replace("vllm_server_base_url", "server"))
    if not own.out.endswith(".jsonl"):
        request.problems.append(Problem("--out", f"found {own.out!r}" if own.out else "missing", "a file FILE.jsonl"))
    if own.n < 1:
        request.problems.append(Problem("-n", f"found {own.n}", "a whole number from 1"))
    if request.recipe and request.recipe.has_tools:
        request.problems.append(Problem("--tools", "not supported here yet", fix="leave out --tools and --environment"))
    recipe, topology = launch.resolve(request, trains=False, verb="sampling")
    if own.server and topology.num_processes > 1:
        raise UserError("--server", f"with {topology.num_processes} processes", "one", "--config single")

    import numpy as np

    from kit.data.chat.unused import read_keys, without_keys
    from kit.data.feed.data_ranks import Ranks
    from kit.data.open import pad_id, stop_ids
    from kit.model.build import fingerprint
    from kit.preflight import preflight
    from kit.preflight.rollout_checks import check_references, try_rewards
    from kit.rollouts.chat_server import MAX_REQUESTS, ChatServer
    from kit.rollouts.environment import Environment
    from kit.rollouts.play import play
    from kit.rollouts.sampler import OwnModel, Sampler, sampling_of
    from kit.run.model_source import CHECKPOINT, precision_of, to_open
    from kit.run.record import own_code
    from kit.run.resume import verify_together
    from kit.strategy.precision import supported_precision
    from kit.strategy.processes.rendezvous import from_main
    from kit.system.cache import file_digest
    from kit.train.policy import build_policy
    from kit.train.session import Session

    interrupt.end_imports()

    asked = recipe.adapter_name_or_path or recipe.model_name_or_path
    recipe, weights = to_open(recipe)
    # Each row has one prompt, that of its last answer, and is whole or left out.
    recipe = recipe.model_copy(update={"train_on": "last", "excess_length_strategy": "drop"})
    if not request.launch.config:
        precision = precision_of(asked, topology.mixed_precision)
        topology, lines = supported_precision(replace(topology, mixed_precision=precision))
        say(*lines)
    checked = preflight.check(recipe, topology, launch=Launch(dry_run=request.launch.dry_run or bool(own.server)))
    recipe, data, tokenizer = checked.recipe, checked.data, checked.tokenizer
    prompts, num = data.train, own.n
    if prompts.media_codec or any("input_ids" in dataset.fields for dataset in data.datasets):
        raise UserError("dataset", "rows with images, audio or token ids", "conversations, or prompts of text")
    check_references("--rewards", recipe.rewards, prompts)
    notes = [*checked.notes, *try_rewards(recipe, prompts, tokenizer)]
    starts = prompts.answer_spans[:, 0]
    with_room = np.flatnonzero((starts > 0) & (starts + recipe.max_new_tokens <= recipe.max_length))
    if num_without := len(prompts) - len(with_room):
        found = f"{num_without} of {len(prompts)} rows have no prompt, or leave less than max_new_tokens of max_length"
        if not len(with_room):
            raise UserError("max_length", found, fix="raise --max_length, or lower --max_new_tokens")
        notes.append(f"{found}: left out")
    prompts = prompts.select(with_room, "prompts with room")
    environment = Environment(recipe, prompts, tokenizer, lambda: False)
    names = [*environment.keys, TOTAL]
    conditions = read_conditions(own.keep, names)

    def question(i: int) -> dict[str, Any]:
        """The prompt of sample ``i`` as a row has it, and the columns that the chat template reads."""
        of_row = data.datasets[int(prompts.dataset_ids[i])]
        row = of_row.sample(without_keys(prompts.data_rows([i]).get(i), read_keys(of_row.ignored)))
        assert isinstance(row, dict)
        extras: dict[str, Any] = {key: row[key] for key in ("tools", "chat_template_kwargs") if key in row}
        is_text = isinstance(row.get("prompt"), str) and not data.encoder.prompts_as_chat
        return {"prompt": row["prompt"] if is_text else prompts.prompt_messages(i), **extras}

    adapter_or_checkpoint = weights or recipe.adapter_name_or_path
    files = sorted(Path(adapter_or_checkpoint).expanduser().glob("*.safetensors")) if adapter_or_checkpoint else []
    settings = {
        **vars(own),
        **recipe.model_dump(mode="json", include={*SETTINGS}),
        "per_device_eval_batch_size": recipe.eval_batch_size,  # as the precision, it decides about rounding
        "mixed_precision": topology.mixed_precision,
        "own_code": own_code(recipe.code["rewards"]),
        "data_fingerprint": prompts.fingerprint,
        "model_fingerprint": own.server or " ".join([fingerprint(recipe), *map(file_digest, files)]),
        "is_repeatable": not own.server,
    }
    path, manifest = Path(own.out), Path(own.out).with_suffix(".manifest.json")
    record = begin(path, manifest, settings)
    say(*notes)
    if request.launch.dry_run:
        say(f"Dry run: all checks passed, {len(prompts)} prompts would get {num} answers each; nothing written.")
        return
    sampler: Sampler
    replies: dict[tuple[int, ...], dict[str, Any]] = {}  # of a server
    if own.server:
        if data.text_form != "chat":
            raise UserError("--server", "rows whose prompt is a string", "conversations", "--chat_template NAME")
        sampler = server = ChatServer(recipe, own.server_model or asked, tokenizer, lambda i: as_messages(question(i)))
        replies, ranks, shown, num_at_once = server.replies, Ranks(), progress, MAX_REQUESTS
    else:
        session = Session(recipe, topology, checked.facts())
        if weights:
            faults = verify_together(session.accelerator, weights)
            raise_if(Problem(CHECKPOINT, f"{weights}: {fault}") for fault in faults)
        policy = build_policy(session, recipe, checked.config, tokenizer, weights=weights)
        session.enter(phases.ROLLING_OUT)
        ranks, shown, num_at_once = policy.processes, session.progress, recipe.eval_batch_size * policy.processes.count
        stops = {tokenizer.eos_token_id, *stop_ids(data, tokenizer)} - {None}
        sampler = OwnModel(policy, recipe, sampling_of(recipe), stops, pad_id(tokenizer), None, shown)
    _locked = lock(path) if is_main() else None  # until this process ends
    record = from_main(lambda: begin(path, manifest, settings))  # after an earlier command that held the lock
    say(
        f"{num} answers to {len(prompts)} prompts, {record['num_prompts']} done; if stopped, the same command continues"
    )
    prompts.data_rows(range(len(prompts)))  # reads each file once
    firsts = range(record["num_prompts"], len(prompts), max(1, 4 * num_at_once // num))
    with closing(environment):
        for first in shown(firsts, f"answers to {firsts.step} prompts", len(firsts)):
            batch = range(first, min(first + firsts.step, len(prompts)))
            started = [environment.start((0, i, k)) for i in batch for k in range(num)]
            played = play(environment, sampler, started, recipe.max_new_tokens, lambda i: (), ranks, shown)
            environment.say_failures(played)
            complete: dict[int, list[Scored]] = {i: [] for i in batch}
            for each in played:
                message = replies.pop(each.key, None)
                message = message or {"role": "assistant", "content": environment.attempt(each).answer}
                if each.ended and np.isfinite(each.reward) and message["content"].strip():
                    rewards = dict(zip(names, [*each.rewards, each.reward], strict=True))
                    complete[each.sample].append((rewards, message))
            rows = [
                as_row(question(i), row) | {"origin": prompts.origin(i)}
                for i, answers in complete.items()
                for row in selected(answers, conditions, BEST in own.keep, own.pairs)
            ]
            record["num_prompts"] = batch.stop
            record["num_answers"] += len(played)
            record["num_complete"] += sum(map(len, complete.values()))
            record["num_rows"] += len(rows)
            if is_main():
                record["num_bytes"] = append(path, rows, record["num_bytes"])
                durable.write_text(manifest, json.dumps(record, indent=1) + "\n")
    counts = f"{record['num_rows']} rows; of {record['num_answers']} answers {record['num_complete']} are complete"
    say(f"{own.out}: {counts}", *environment.closing_notes())
    if not record["num_complete"]:
        say("warning: no answer ended, has text and has rewards: --max_new_tokens may be too small")


def as_messages(question: dict[str, Any]) -> dict[str, Any]:
    """Return a question as the server gets it."""
    return {"messages": question.pop("prompt"), **question}


def as_row(question: dict[str, Any], selected: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a question and what ``selected`` returned: all are messages, or all are strings."""
    if isinstance(question["prompt"], str):
        answers = selected.keys() & {"completion", "chosen", "rejected"}
        selected = {**selected, **{key: selected[key][0]["content"] for key in answers}}
    return {**question, **selected}


def read_conditions(keep: list[str], names: list[str]) -> list[Condition]:
    """Return the conditions of ``--keep``: name, sign and number. Raises ``UserError``."""
    found = []
    for text in keep:
        parts = re.fullmatch(r"(\w+)(>=|>|==)(-?\d+\.?\d*)", text)
        if parts and parts[1] in names:
            found.append((parts[1], parts[2], float(parts[3])))
        elif text != BEST:
            expected = f"{BEST}, or NAME>=NUMBER, NAME>NUMBER, NAME==NUMBER with a NAME of {', '.join(names)}"
            raise UserError("--keep", f"found {text!r}", expected)
    return found


def selected(answers: list[Scored], conditions: list[Condition], only_best: bool, makes_pairs: bool) -> list[Any]:
    """Return the rows of a prompt, without the prompt; the best answer comes first."""

    def passes(rewards: dict[str, Any]) -> bool:
        return all(
            {">=": rewards[name] >= number, ">": rewards[name] > number, "==": rewards[name] == number}[sign]
            for name, sign, number in conditions
        )

    ranked = sorted(answers, key=lambda answer: -answer[0][TOTAL])
    kept = [answer for answer in ranked if passes(answer[0])]
    if not makes_pairs:
        return [{"completion": [message], "rewards": rewards} for rewards, message in kept[: 1 if only_best else None]]
    return [
        {"chosen": [chosen], "rejected": [rejected], "rewards": [high, low]}
        for (high, chosen), (low, rejected) in zip(kept[:1], ranked[-1:], strict=False)
        if high[TOTAL] > low[TOTAL]
    ]


def begin(path: Path, manifest: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a file that was begun with these settings, or a new record. Raises ``UserError``.

    A record is the manifest: ``num_prompts`` are done, and their rows are the first ``num_bytes`` of the file.
    """
    if not os.access(path.parent, os.W_OK):
        raise UserError("--out", f"{path.parent} is no folder in which you can write", "an existing folder")
    if not (manifest.exists() or (path.exists() and path.stat().st_size)):
        counts = dict.fromkeys(("num_prompts", "num_answers", "num_complete", "num_rows", "num_bytes"), 0)
        return {"kit": __version__, "settings": settings, **counts}
    record = durable.read_object(manifest)
    if not ({"settings", "num_bytes"} <= record.keys() and isinstance(record["settings"], dict)):
        raise UserError("--out", f"{path} exists, and {manifest} is missing or damaged", fix="another file")
    changed = differences(record["settings"], settings)
    if changed or not path.exists() or path.stat().st_size < record["num_bytes"]:
        why = f"of another command ({listed(changed)})" if changed else "changed since it was written"
        fix = f"another file; or the flags in {manifest}, which continue it"
        raise UserError("--out", f"{path} exists, and is {why}", fix=fix)
    return record


def lock(path: Path) -> Any:
    """Return the file, locked as long as it is open: two commands would mix their rows. Raises ``UserError``."""
    import fcntl  # Windows lacks it

    try:
        file = durable.open_to_append(path)
    except OSError as error:
        raise UserError("--out", f"{path} cannot be written ({error.strerror})", "a file, and no link") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError("--out", f"another process writes {path}", fix="another file; or wait for it") from None
    except OSError:  # a disk without locks
        pass
    return file


def append(path: Path, rows: list[dict[str, Any]], num_bytes: int) -> int:
    """Write rows after the first ``num_bytes`` of the file, and return its new size."""
    with durable.open_to_append(path) as file:
        file.truncate(num_bytes)  # what a killed process wrote after its last record
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    durable.sync(path)
    return path.stat().st_size


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
