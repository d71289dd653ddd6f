"""Answers of `kit score` beside transformers' own ``generate``: the same prompts, the same greedy tokens, less time.

    python benchmarks/generation.py recipes/tiny/model recipes/tiny/eval.jsonl --max_length 256
    python benchmarks/generation.py FOLDER questions.jsonl

The dataset has `messages`, or `question` and `answer`. Three sides alternate in one process, by one thread:

- `generate` on batches in the order of the file, as one would write it in ten lines;
- the same on prompts sorted by length;
- the evaluation of `recipes/score.py --predict_with_generate`, with its metrics of the answers.

Seconds are those of the processor, from the first prompt to the last answer. All sides have float32 weights, the same
batch size, ids of the prompts and ids that end an answer. The first round is left out. That the tokens are the same is
checked.
"""

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import against_trl
import torch

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("order of the file", "sorted", "the kit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a causal language model with its tokenizer")
    parser.add_argument("dataset", type=Path, help="JSON Lines")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(map(json.loads, args.dataset.read_text().splitlines()[: args.rows]))
        if "messages" not in rows[0]:
            rows = [{"prompt": f"{each['question']}\n", "completion": each["answer"]} for each in rows]
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(each) + "\n" for each in rows))
        seconds, answers = score(str(data), args)
    ratios = [[row[2] / other for other in row[:2]] for row in seconds]
    cells = [f"{statistics.mean(len(ids) for _, ids in answers):.1f}"]
    cells += [f"{statistics.median(side):.2f}" for side in zip(*seconds, strict=True)]
    cells += [
        f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*ratios, strict=True)
    ]
    title = against_trl.title()[0].replace("beside TRL", "answers beside `generate`")
    heads = ["tokens of an answer", *(f"{side}, s" for side in SIDES), "the kit's to the first", "to sorted"]
    print(f"{title}\n\n`{command}`\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n| {' | '.join(cells)} |")


def score(data: str, args: argparse.Namespace) -> tuple[list[list[float]], Any]:
    """Run ``recipes/score.py``, in which the sides alternate.

    Returns:
        Seconds of each round, of each side; and the answers, a pair of the prompt's ids and the answer's for each.
    """
    import kit.evaluate
    from kit.system.console import say

    evaluate, generate = kit.evaluate.evaluate, kit.evaluate.generate_answers
    answers, times, seconds, calls = [], [], [], []

    def recorded(model: Any, requests: Any, *, stops: Any, **more: Any) -> Any:
        times.append(time.process_time())
        completions = generate(model, requests, stops=stops, **more)
        answers.extend([(list(r.ids), c.ids) for r, c in zip(requests, completions, strict=True)])
        times.append(time.process_time())
        calls.append(sorted(stops))
        return completions

    def alternating(policy: Any, objective: Any, samples: Any, recipe: Any, *_: Any) -> Any:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        prompts = [list(samples.evaluation.prompt(i).ids) for i in range(len(samples.evaluation))]
        for _ in range(1 + args.rounds):
            answers.clear()
            times.clear()
            result = evaluate(policy, objective, samples, recipe)
            plain = partial(answered_plainly, model, tokenizer, stops=calls[0], args=args)
            in_order, found = plain(prompts)
            in_length, sorted_found = plain(sorted(prompts, key=len))
            assert sorted(answers) == sorted(found) == sorted(sorted_found), "the answers differ"
            seconds.append([in_order, in_length, times[-1] - times[0]])
            say(str(seconds[-1]))
        return result

    kit.evaluate.evaluate, kit.evaluate.generate_answers = alternating, recorded
    flags = {
        "max_length": args.max_length,
        "max_new_tokens": args.max_new_tokens,
        "per_device_eval_batch_size": args.batch_size,
        "predict_with_generate": "true",
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    sys.argv = ["score.py", args.model, data, *words]
    runpy.run_path(str(ROOT / "recipes/score.py"), run_name="__main__")
    return seconds[1:], answers


def answered_plainly(
    model: Any, tokenizer: Any, prompts: list[list[int]], *, stops: list[int], args: argparse.Namespace
) -> tuple[float, Any]:
    """Return the seconds and the answers of transformers' side."""
    began, answers = time.process_time(), []
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "eos_token_id": stops}
    for start in range(0, len(prompts), args.batch_size):
        batch = prompts[start : start + args.batch_size]
        inputs = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        sequences = model.generate(**inputs, **options, pad_token_id=tokenizer.pad_token_id)
        for prompt, ids in zip(batch, sequences[:, length:].tolist(), strict=True):
            end = next((i + 1 for i, token_id in enumerate(ids) if token_id in stops), len(ids))
            answers.append((prompt, ids[:end]))
            tokenizer.decode(ids[:end], skip_special_tokens=True)
    return time.process_time() - began, answers


if __name__ == "__main__":
    main()
