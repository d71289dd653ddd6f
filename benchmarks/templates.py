"""Encodes conversations of every kind with many chat templates, and checks the result without the kit's own code.

    python benchmarks/templates.py FOLDER [--json OUT]

FOLDER holds templates as ``.jinja`` files. Each gets a small tokenizer that has the tokens that the template
writes. Each pair of a template and a kind of conversation ends in one class:

- exact: the tokens before each learned answer are those of ``apply_chat_template(add_generation_prompt=True)``; the
  answer goes on as the template's own rendering does, holds its reasoning, content and calls, and ends with a token.
- marks: not so, but what is learned are the template's ``{% generation %}`` blocks and the token that ends them.
- open: exact, but the template writes no end-of-turn token, which the run warns of.
- refused: with a reason and a next step.
- unsaid: refused without a next step.
- WRONG: all else.
"""

import argparse
import json
import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kit.data.chat.template import TODAY
from kit.data.chat.tokens import encode
from kit.data.chat.turns import NO_END_OF_TURN
from kit.errors import UserError

ACCEPTED = ("exact", "marks", "open")
OPEN = "the template writes no end of the answer"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "its name"}, "days": {"type": "integer"}},
                "required": ["town"],
            },
        },
    }
]


def _call(town: str, number: int) -> dict[str, Any]:
    function = {"name": "find_weather", "arguments": {"town": town, "days": number}}
    return {"type": "function", "id": f"call0000{number}", "function": function}


U1, U2, U3 = ({"role": "user", "content": f"Question {word}?"} for word in ("alpha", "beta", "gamma"))
A1, A2, A3 = ({"role": "assistant", "content": f"Reply {word}."} for word in ("delta", "epsilon", "zeta"))
SYSTEM = {"role": "system", "content": "Speak plainly."}
R1, R2 = ({"reasoning_content": f"Thinking of {word}."} for word in ("eta", "theta"))
CALL, CALL2 = (
    {"role": "assistant", "content": "", "tool_calls": [_call(town, n)]} for town, n in (("Oslo", 3), ("Lima", 7))
)
RESULT = {"role": "tool", "name": "find_weather", "tool_call_id": "call00003", "content": '{"sky": "clear"}'}
RESULT2 = {**RESULT, "tool_call_id": "call00007", "content": '{"sky": "grey"}'}
TWO_CALLS = {**CALL, "tool_calls": [_call("Oslo", 3), _call("Lima", 7)]}


def _thought(message: dict[str, Any], reasoning: dict[str, str]) -> dict[str, Any]:
    return {**message, "content": f"<think>\n{reasoning['reasoning_content']}\n</think>\n\n{message['content']}"}


# The kinds of conversation: messages, tools, and what is learned.
Kind = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]
KINDS: dict[str, Kind] = {
    "one turn": ([U1, A1], None, "assistant"),
    "turns": ([U1, A1, U2, A2, U3, A3], None, "assistant"),
    "system": ([SYSTEM, U1, A1, U2, A2], None, "assistant"),
    "ends with the user": ([U1, A1, U2], None, "assistant"),
    "reasoning, last": ([U1, A1, U2, A2 | R2], None, "assistant"),
    "reasoning, all": ([U1, A1 | R1, U2, A2 | R2], None, "assistant"),
    "<think> in content": ([U1, _thought(A1, R1), U2, _thought(A2, R2)], None, "assistant"),
    "call": ([U1, CALL, RESULT, A1], TOOLS, "assistant"),
    "call, reasoning": ([U1, CALL | R1, RESULT, A1], TOOLS, "assistant"),
    "call, text": ([U1, {**CALL, "content": "Let me see."}, RESULT, A1], TOOLS, "assistant"),
    "call, reasoning on both": ([U1, CALL | R1, RESULT, A1 | R2], TOOLS, "assistant"),
    "two calls": ([U1, TWO_CALLS, RESULT, RESULT2, A1], TOOLS, "assistant"),
    "calls in turn": ([U1, CALL, RESULT, CALL2, RESULT2, A1, U2, A2], TOOLS, "assistant"),
    "tools, not used": ([U1, A1, U2, A2], TOOLS, "assistant"),
    "train: false": ([U1, A1 | {"weight": 0.0}, U2, A2], None, "assistant"),
    "train: false, call": ([U1, CALL | {"weight": 0.0}, RESULT, A1], TOOLS, "assistant"),
    "last": ([U1, A1, U2, A2], None, "last"),
    "all": ([SYSTEM, U1, A1, U2, A2], None, "all"),
    "all, reasoning": ([U1, A1 | R1, U2, A2 | R2], None, "all"),
    "all, call": ([U1, CALL, RESULT, A1], TOOLS, "all"),
}

# The kit gives templates a fixed date; so the other side gets the same.
chat_template_utils.datetime = type("Fixed", (), {"now": staticmethod(lambda: TODAY)})

_TOKEN = re.compile(
    r"<\|[^\s<>|'\"{}]+\|>|<\uff5c[^\s<>'\"{}]+\uff5c>|</?[a-zA-Z_][\w:]*>|<[a-z_]+\|>|<\|[a-z_\"]+>"
    r"|\[\|[^\s|\[\]]+\|\]|\[e~\[|\]~!?b\[?\]?|\[/?[A-Z_]{3,}\]|\[gMASK\]|\u25c1/?\w+\u25b7|<\]?[a-z_]+\[?>"
)
_NOT_SPECIAL = re.compile(
    r"think|tool|function|param|arg|call|result|response|code|value|name|description|type|require|answer", re.I
)
_BOS = (
    "<|begin_of_text|>",
    "<bos>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<|startoftext|>",
    "<|begin_of_document|>",
    "<BOS_TOKEN>",
    "[gMASK]",
    "<s>",
)
_EOS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]",
    "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|role_end|>", "<|end|>",
    "<|eom_id|>", "</s>", "<|endoftext|>",
)  # fmt: skip


def tokenizer_for(source: str, more: str = "") -> Any:
    """Return a tokenizer that has the tokens in a template, in what it writes, and in ``more``, and BOS and EOS."""
    tokenizer = _tokenizer(source, source + more)
    written = [
        text
        for name in ("system", "call")
        for text in _renderings(tokenizer, source, *KINDS[name][:2], prompt=True, kwargs={})
    ]
    return _tokenizer(source, " ".join([source, more, *written]))


def _tokenizer(source: str, text: str) -> Any:
    words = dict.fromkeys(_TOKEN.findall(text))
    bos = next((word for word in _BOS if word in words), "<s>" if re.search(r"\bbos_token\b", source) else None)
    eos = next((word for word in _EOS if word in words), "</s>" if "im_end" not in source else "<|im_end|>")
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    plain = [word for word in words if re.fullmatch(r"</?[a-zA-Z_:]+>", word) and _NOT_SPECIAL.search(word)]
    backend.add_special_tokens(
        [AddedToken(w, special=True, normalized=False) for w in {*words, bos, eos} - {*plain, None}]
    )
    # Of tags such as <parameter> real tokenizers have only a few.
    inner = [word for word in plain if re.search("think|tool_call|tool_response", word)]
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in inner])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = source
    return tokenizer


def _renderings(tokenizer: Any, source: str, messages: list[Any], tools: Any, prompt: bool, kwargs: Any) -> list[str]:
    """What ``apply_chat_template`` returns, with the arguments of calls as objects and as strings."""
    texts = []
    for as_string in (False, True):
        given = []
        for message in messages:
            message = {key: value for key, value in message.items() if key != "weight" and value is not None}
            if "reasoning_content" in message:
                names = [n for n in ("thinking", "reasoning") if re.search(rf"\b{n}\b", source)]
                message |= {name: message["reasoning_content"] for name in ("thinking", *names)}
            calls = []
            for call in message.get("tool_calls", []):
                function = call["function"]
                arguments = json.dumps(function["arguments"]) if as_string else function["arguments"]
                calls.append({**call, "function": {**function, "arguments": arguments}})
            given.append(message | ({"tool_calls": calls} if calls else {}))
        try:
            texts.append(
                tokenizer.apply_chat_template(
                    given, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=prompt, **kwargs
                )
            )
        except Exception:  # a template is a program
            continue
    return list(dict.fromkeys(texts))


def _lacks(text: str, message: dict[str, Any]) -> str:
    """What of an answer is not in ``text``; empty if all is."""
    parts = [message.get("reasoning_content") or "", *re.split(r"</?think>|\[/?THINK\]", message["content"])]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    at = 0
    for part in parts:
        at = text.find(part.strip(), at)
        if at < 0:
            return f"lacks {part.strip()!r}"
        at += len(part.strip())
    at = -1
    for call in calls:
        at = text.find(call["name"], at + 1)
        if at < 0:
            return f"lacks a call of {call['name']!r}"
        for name, value in call["arguments"].items():
            if not re.search(rf"{name}\W.{{0,90}}?{value}", text[at:], re.DOTALL):
                return f"lacks argument {name}"
    reasoning = next((part.strip() for part in parts if part.strip()), "") if len(parts) > 2 or parts[0] else ""
    if calls and reasoning and text.find(reasoning) > text.find(calls[0]["name"]):
        return "the thought after the call"
    if "{'" in text:
        return "arguments in the form of Python"
    if re.search(r"(<(\w*think\w*)>|\[THINK\])\s*(</\2>|\[/THINK\])\s*\1", text):
        return "an empty thought before the thought"
    return ""


def check(encoded: list[Any], tokenizer: Any, source: str, sample: dict[str, Any], train_on: str) -> str:
    """Return why what was encoded is not what the model would write; an empty string if it is."""
    messages, tools, kwargs = sample["messages"], sample.get("tools"), sample.get("chat_template_kwargs", {})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "all":
        text = "".join(tokenizer.decode(one.input_ids) for one in encoded)
        text = text[text.find(U1["content"]) :]  # not the list of tools
        if any(weight != 1 for one in encoded for weight in one.weights):
            return "all: a weight is not 1"
        return next(filter(None, (_lacks(text, messages[i]) for i in answers)), "")
    learned = [i for i in answers if messages[i].get("weight") != 0]
    learned = learned[-1:] if train_on == "last" else learned
    runs = []  # of each learned stretch: all ids, start, end
    for one in encoded:
        weights = [0.0, *one.weights, 0.0]
        starts = [k for k in range(len(one.input_ids)) if weights[k + 1] and not weights[k]]
        ends = [k + 1 for k in range(len(one.input_ids)) if weights[k + 1] and not weights[k + 2]]
        runs += [(one.input_ids, start, end) for start, end in zip(starts, ends, strict=True)]
    if len(runs) != len(learned):
        return f"{len(runs)} stretches for {len(learned)} answers"
    prompts: dict[int, dict[tuple[int, ...], str]] = {}  # of each answer: the ids and the text
    for i in learned:
        texts = _renderings(tokenizer, source, messages[:i], tools, True, kwargs)
        prompts[i] = {tuple(tokenizer(text, add_special_tokens=False).input_ids): text for text in texts}
    for ids, start, end in runs:  # of an unrolled conversation, not in the order of the answers
        answer = tokenizer.decode(ids[start:end])
        i = next((i for i in prompts if tuple(ids[:start]) in prompts[i]), -1)
        if i < 0:
            return f"messages[{min(prompts)}]: the tokens before it are not the prompt"
        fitting = [prompts.pop(i)[tuple(ids[:start])]]
        opened = re.search(r"<\w*think\w*>\s*$|\[THINK\]\s*$", fitting[0])
        if missing := _lacks((opened[0] if opened else "") + answer, messages[i]):
            return f"messages[{i}]: {missing}: {answer[:200]!r}"
        wholes = _renderings(tokenizer, source, messages[: i + 1], tools, False, kwargs)
        rests = [whole[len(fitting[0]) :] for whole in wholes if whole.startswith(fitting[0])]
        if rests and not any(rest.startswith(answer) or answer.startswith(rest.rstrip()) for rest in rests):
            return f"messages[{i}]: not what the template writes: {answer[:200]!r}"
        if any(other["content"] in answer for k, other in enumerate(messages) if k != i and other["content"]):
            return f"messages[{i}]: another message is learned"
        last = ids[len(tokenizer(tokenizer.decode(ids[:end]).rstrip(), add_special_tokens=False).input_ids) - 1]
        if last not in tokenizer.added_tokens_decoder:
            return OPEN if NO_END_OF_TURN in encoded[0].remarks else f"messages[{i}]: it has no end: {answer[-80:]!r}"
    for k, message in enumerate(messages[: learned[-1]] if learned else []):
        for call in message.get("tool_calls", []):
            if not any(
                str(call["function"]["arguments"]["town"]) in tokenizer.decode(one.input_ids) for one in encoded
            ):
                return f"messages[{k}]: its call is not in the context"
    return ""


def _follows_marks(encoded: list[Any], tokenizer: Any, source: str, sample: dict[str, Any], train_on: str) -> bool:
    if not re.search(r"\{%-?\s*generation", source) or len(encoded) != 1:
        return False
    try:
        marked = tokenizer.apply_chat_template(
            sample["messages"], tools=sample.get("tools"), chat_template=source, return_assistant_tokens_mask=True,
            return_dict=True, **sample.get("chat_template_kwargs", {}),
        )  # fmt: skip
    except Exception:
        return False
    ids, mask = marked["input_ids"], marked["assistant_masks"]
    one = encoded[0]
    pairs = [(bool(weight), bool(bit)) for weight, bit in zip(one.weights, mask, strict=False)]
    all_learned = train_on == "assistant" and all(message.get("weight") != 0 for message in sample["messages"])
    beyond, missing = pairs.count((True, False)), pairs.count((False, True)) if all_learned else 0
    limit = 2 * len(sample["messages"])  # the ends of answers
    return one.input_ids[: len(ids)] == ids[: len(one.input_ids)] and any(mask) and max(beyond, missing) <= limit


def _outcome(tokenizer: Any, source: str, sample: dict[str, Any], train_on: str) -> tuple[str, str]:
    try:
        encoded = encode(sample, tokenizer, source, train_on=train_on)
    except UserError as error:
        return "refused", str(error.problems[0])
    wrong = check(encoded, tokenizer, source, sample, train_on)
    if wrong and train_on != "all" and _follows_marks(encoded, tokenizer, source, sample, train_on):
        return "marks", "; ".join(encoded[0].remarks)
    return ("open" if wrong == OPEN else "WRONG", wrong) if wrong else ("exact", "")


def classify(path: Path) -> dict[str, tuple[str, str]]:
    """Return the class of each kind of conversation with the template in ``path``, and more about it."""
    source = path.read_text(encoding="utf-8")
    tokenizer = tokenizer_for(source)
    results = {}
    for name, (messages, tools, train_on) in KINDS.items():
        sample = {"messages": messages} | ({"tools": tools} if tools else {})
        outcome, detail = _outcome(tokenizer, source, sample, train_on)
        if outcome == "open" and results.get("one turn", ("open",))[0] != "open":
            outcome = "WRONG"  # other answers have an end
        if outcome == "refused":
            outcome = "refused" if "\n    -> " in detail else "unsaid"
        results[name] = (outcome, detail.replace("\n    -> ", " -> "))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    paths = sorted(options.folder.glob("*.jinja"))
    with ProcessPoolExecutor(options.processes) as pool:
        results = dict(zip([path.stem for path in paths], pool.map(classify, paths, chunksize=4), strict=True))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    classes = [*ACCEPTED, "refused", "unsaid", "WRONG"]
    print("| kind | " + " | ".join(classes) + " |\n|---" * 1 + "|" + "---|" * len(classes))
    for kind in KINDS:
        counts = Counter(result[kind][0] for result in results.values())
        print(f"| {kind} | " + " | ".join(str(counts[name]) for name in classes) + " |")
    counts = Counter(outcome for result in results.values() for outcome, _ in result.values())
    print("| in all | " + " | ".join(str(counts[name]) for name in classes) + " |")
    sys.exit(1 if counts["WRONG"] else 0)


if __name__ == "__main__":
    main()
