"""Tool results as token ids: what is appended to a sampled turn is what one encoding of the whole conversation has."""

import random

import pytest
from data_helpers import HEADER, PROMPT, SPECIAL, TEXTS, byte_level_tokenizer, sentencepiece_tokenizer, template_of

from kit.data.chat.template import Template
from kit.rollouts.tools.tool_calls import ToolCall, result_of
from kit.rollouts.tools.tool_turns import ToolTurns, proven_turns
from kit.system.errors import UserError

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time")]
LISTED = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
)
END = "<|im_end|>\n{% endfor %}" + PROMPT
# One tool turn for each result, as Hermes has it.
APART = LISTED + HEADER + "{{ m.content }}" + CALLS + END
# The token that opens the next turn is what ends one, as in GLM 4.
NEXT = (
    LISTED + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "\nCALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Reasoning is kept in all turns.
THINKS = (
    (LISTED + HEADER + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}")
    + CALLS
    + END
)
# It is kept in the last turn alone.
FORGETS = THINKS.replace("m.reasoning_content %}", "m.reasoning_content and loop.index0 >= messages | length - 2 %}")
# A prompt begins with no reasoning, of which the turn shows nothing later.
OPENS = APART.replace(PROMPT, PROMPT.replace("assistant\n", "assistant\n<think></think>"))
# Results are marked later.
MARKS = APART.replace(
    "{{ m.content }}", "{% if loop.revindex > 2 and m.role == 'tool' %}(old){% endif %}{{ m.content }}"
)
# Calls are numbered over the whole conversation.
NUMBERS = (
    (LISTED + "{% set n = namespace(calls=0) %}" + HEADER + "{{ m.content }}" + CALLS)
    + "{% if m.role == 'tool' %}{{ n.calls }}{% set n.calls = n.calls + 1 %}{% endif %}"
    + END
)
# The last message has no line break after it.
BREAKS = APART.replace("<|im_end|>\n", "<|im_end|>{% if not loop.last %}{{ '\n' }}{% endif %}")
# Ids of calls have nine characters, as Mistral's.
NINE = APART.replace("<tool_call>", "{% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}<tool_call>")
# The name of a call has no space.
NAMED = NINE.replace("c.id | length != 9", "' ' in c.function.name").replace("'ids'", "'name'")
# Results are left out.
DEAF = APART.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")

# By name: the template, the token that ends a turn, and whether it writes several calls in one.
TAKEN = {
    "apart": (APART, "<|im_end|>", True),
    "next": (NEXT, "<|tool|>", True),
    "thinks": (THINKS, "<|im_end|>", True),
    "chatml": ("chatml", "<|im_end|>", True),
    "llama3": ("llama3", "<|eot_id|>", False),
    "qwen25": ("qwen25", "<|im_end|>", True),  # it merges the results of a turn
    "llama31": ("llama31", "<|eot_id|>", False),
    "ids": (NINE, "<|im_end|>", True),
    "granite": ("granite", "<|end_of_text|>", True),
}
# The template, what its generation prompt opens for the one turn only, and what it rewrites.
AS_WRITTEN = {
    "forgets": (FORGETS, "", "a call and reasoning: '<think>Think.</think><tool_call>probe_to' becomes '<tool_"),
    "qwen3": (
        "qwen3",
        "",
        "a call without reasoning: '<think>\\n\\n</think>\\n\\n<tool_call>\\n{\"name\": ' becomes '<tool_",
    ),
    "opens": (OPENS, "<think></think>", "a call: '<think></think><tool_call>probe_tool{}</' becomes '<tool_"),
}
REFUSED = {
    "marks": (MARKS, "it rewrites earlier text once results follow a call: "),
    "numbers": (NUMBERS, "are other tokens where the whole conversation is encoded: '0<|im_end|>"),
    "breaks": (BREAKS, r"it rewrites earlier text once results follow a call: '<|im_end|><|im_start|>assist"),
    "deaf": (DEAF, "the template leaves its text out or changes it"),
    # The system message is part of a question that is the last message.
    "mistral_v3": (
        "mistral_v3",
        "a call after a system message and an answer, messages[4]: the text before the answer differs",
    ),
    "no tools": ("bare", "the template leaves out the tool 'weather'"),
}
TOKENIZERS = {
    "byte level": lambda end: byte_level_tokenizer(eos_token=end, bos_token="<bos>"),
    "metaspace": lambda end: sentencepiece_tokenizer("metaspace", SPECIAL),
    "prepend": lambda end: sentencepiece_tokenizer("prepend", SPECIAL),
}


def opened(template, tokenizer):
    source = template if "{" in template else template_of(template, tokenizer)
    return source, ToolTurns(source, tokenizer, TOOLS)


def result(name, content, call_id="call00000"):
    return result_of(ToolCall(name, {}), call_id, content)


def conversation(draw, takes_several, reasons):
    """A random prompt, and turns with calls, each with its results."""
    system = [{"role": "system", "content": draw.choice(TEXTS)}] * draw.randrange(2)
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * draw.randrange(2)
    turns = []
    for _ in range(draw.randint(1, 4)):
        results = [
            result(draw.choice(["weather", "time"]), draw.choice([*TEXTS, "", "-2.5"]), f"{draw.randrange(10**9):09}")
            for _ in range(draw.randint(1, 3 if takes_several else 1))
        ]
        functions = [{"name": each["name"], "arguments": {"city": draw.choice(TEXTS)}} for each in results]
        pairs = zip(functions, results, strict=True)
        calls = [{"type": "function", "function": f, "id": r["tool_call_id"]} for f, r in pairs]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        turns.append((turn | ({"reasoning_content": "A thought"} if reasons else {}), results))
    return [*system, *earlier, {"role": "user", "content": draw.choice(TEXTS)}], turns


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("shape", TAKEN)
def test_the_ids_of_a_trajectory_are_those_of_the_whole_conversation(shape, kind):
    template, end, takes_several = TAKEN[shape]
    tokenizer = TOKENIZERS[kind](end)
    source, tool_turns = opened(template, tokenizer)
    tool_turns.check()
    assert tool_turns.takes_several == takes_several and not tool_turns.rewrites
    assert tool_turns.end == tokenizer.convert_tokens_to_ids(end)
    draw = random.Random(shape)
    own = Template(source, tokenizer)

    def text_of(messages):
        return own.render(messages, TOOLS, add_generation_prompt=True)

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    for _ in range(60 if kind == "byte level" else 20):
        messages, turns = conversation(draw, takes_several, shape == "thinks" and draw.random() < 0.5)
        ids, prompt = tool_turns.prompt(messages), text_of(messages)
        assert ids == encode(prompt)
        for turn, results in turns:
            messages = [*messages, turn, *results]
            text = text_of(messages)
            written = text[: text.index(end, len(prompt)) + len(end)]  # the prompt, and what a model wrote after it
            before = encode(written)
            assert before + tool_turns.append(before, results) == encode(text)
            # A tokenizer like GPT-2's splits a line break that the prompt ends with otherwise if text follows.
            if text.startswith(prompt) and before[: len(ids)] == ids:
                sampled = before[len(ids) :]
                ids = ids + sampled + tool_turns.append(sampled, results)
                assert ids == encode(text)
            else:
                assert kind == "byte level" and shape in ("llama3", "llama31")
                ids = encode(text)
            prompt = text


@pytest.mark.parametrize("shape", AS_WRITTEN)
def test_turns_that_a_template_rewrites_stay_as_they_were_sampled(shape):
    template, opening, rewrites = AS_WRITTEN[shape]
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    source, tool_turns = opened(template, tokenizer)
    tool_turns.check()
    assert tool_turns.rewrites.startswith(f"once results follow {rewrites}")
    draw, own = random.Random(shape), Template(source, tokenizer)

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    for _ in range(60):
        messages, turns = conversation(draw, tool_turns.takes_several, False)
        ids, written = tool_turns.prompt(messages), []
        for k, (_, results) in enumerate(turns):
            written.append(encode(f"<think>{draw.choice(TEXTS)}</think>{draw.choice(TEXTS)}<|im_end|>"))
            ids = ids + written[k] + tool_turns.append(written[k], results)
            messages.append({"role": "assistant", "content": "TURN"})
            messages += results
        # All that the rendering has beside the turns.
        first, *others, last = own.render(messages, TOOLS, add_generation_prompt=True).split("TURN<|im_end|>")
        expected = encode(first + opening)
        for turn, text in zip(written, [*(each + opening for each in others), last], strict=True):
            expected += turn + encode("<|im_end|>" + text)[1:]
        assert ids == expected


def test_the_same_template_is_proven_once(monkeypatch):
    tokenizer, proofs = byte_level_tokenizer(eos_token="<|im_end|>"), []
    monkeypatch.setattr(ToolTurns, "check", lambda self: proofs.append(self))
    assert proven_turns(APART, tokenizer, TOOLS) is proven_turns(APART, tokenizer, [*TOOLS]) and len(proofs) == 1
    assert proven_turns(APART, tokenizer, TOOLS[:1]) is not proven_turns(THINKS, tokenizer, TOOLS[:1])
    assert len(proofs) == 3


def test_sampled_ids_stay_and_nothing_follows_another_end():
    """They may be other tokens than the tokenizer makes of their text."""
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    _, tool_turns = opened("qwen25", tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    spelled = [tokenizer(letter).input_ids[0] for letter in "Hello"]
    assert spelled != tokenizer("Hello").input_ids
    text = tokenizer.decode(tool_turns.append([*spelled, end], [result("time", "12"), result("time", "<13>")]))
    begin, answer = "\n<|im_start|>user", "<|im_end|>\n<|im_start|>assistant\n"
    results = "".join(f"\n<tool_response>\n{each}\n</tool_response>" for each in ("12", "<13>"))
    assert text == begin + results + answer
    assert tool_turns.append(spelled, [result("time", "12")]) is None  # truncated
    assert tool_turns.append([*spelled, tokenizer.convert_tokens_to_ids("<|eot_id|>")], [result("time", "12")]) is None


def test_a_made_up_name_and_a_result_that_is_no_text_are_appended():
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    _, tool_turns = opened(NAMED, tokenizer)
    name = 'no "tool"\ud800\n'
    ids = tool_turns.append([tool_turns.end], [result(name, "4\ud800")])
    assert ids == tool_turns.append([tool_turns.end], [result("no__tool___", "4?")])


@pytest.mark.parametrize("shape", REFUSED)
def test_a_template_that_would_not_write_the_conversation_as_it_was_is_refused(shape):
    template, found = REFUSED[shape]
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    with pytest.raises(UserError) as caught:
        opened(template, tokenizer)[1].check()
    (problem,) = caught.value.problems
    assert found in problem.found and problem.fix and problem.where == "chat_template"
