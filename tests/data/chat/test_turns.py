"""Loss masks, against texts written by hand: ``[[`` and ``]]`` enclose supervised text."""

import random
import re

import pytest
from data_helpers import (
    CALL,
    CHATS,
    GOLDEN,
    HEADER,
    PROMPT,
    SIMPLE,
    SPECIAL,
    TEXTS,
    WEATHER,
    chat,
    encode,
    marked,
    template_of,
    with_keys,
)
from transformers.utils import chat_template_utils

from kit.data.chat.answer_spans import EMPTY_THINK
from kit.data.chat.shipped import SHIPPED
from kit.data.chat.template import FIXED_DATE, TODAY, resolve_template
from kit.data.chat.tokens import UNROLLED
from kit.data.chat.turns import FORGOTTEN, NO_END_OF_TURN
from kit.system.errors import UserError

SHAPES = sorted(path.stem for path in GOLDEN.glob("*.txt"))


@pytest.fixture
def fixed_today(monkeypatch):
    """transformers gives templates the date that the kit gives them."""

    class FixedDate:
        now = staticmethod(lambda: TODAY)

    monkeypatch.setattr(chat_template_utils, "datetime", FixedDate)


def golden(shape):
    """The expectations of a shape by case: what ``golden/<shape>.txt`` says under ``=== <case>``."""
    _, *parts = re.split(r"^=== (\w+)\n", (GOLDEN / f"{shape}.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_golden(shape, tokenizer_with_bos):
    names = {FIXED_DATE: "FIXED_DATE", UNROLLED: "UNROLLED", NO_END_OF_TURN: "NO_END_OF_TURN"}
    names |= {EMPTY_THINK: "EMPTY_THINK"}
    found = {}
    for case, sample in CHATS.items():
        try:
            encoded = encode(sample, tokenizer_with_bos, template_of(shape, tokenizer_with_bos))
        except UserError as error:
            found[case] = f"refused: {error.problems[0].found}\n"
            continue
        remarks = "".join(f"remark: {names[remark]}\n" for remark in encoded[0].remarks)
        assert not any(one.remarks for one in encoded[1:])
        found[case] = f"{marked(encoded, tokenizer_with_bos)}\n{remarks}"
    assert found == golden(shape) and set(SHAPES) >= set(SHIPPED)


def random_conversation(choose):
    messages = [{"role": "system", "content": choose.choice(TEXTS)}] * choose.randrange(2)
    tools = [WEATHER] if choose.random() < 0.3 else None
    for _ in range(choose.randint(1, 4)):
        messages.append({"role": "user", "content": choose.choice(TEXTS)})
        for _ in range(choose.randrange(3) if tools else 0):
            text = choose.choice(["", "Hi"])
            messages.append({"role": "assistant", "content": text, "tool_calls": [CALL] * choose.randint(1, 2)})
            messages.append({"role": "tool", "content": choose.choice(TEXTS), "tool_call_id": "call00001"})
        messages.append({"role": "assistant", "content": choose.choice(TEXTS)})
        if choose.random() < 0.3:
            messages[-1]["reasoning_content"] = choose.choice(TEXTS)
    return messages, tools


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_answer_is_supervised_once_right_after_the_generation_prompt(shape, tokenizer_with_bos, fixed_today):
    tokenizer, choose = tokenizer_with_bos, random.Random(shape)
    template = template_of(shape, tokenizer)

    def at_inference(messages, **options):
        return tokenizer.apply_chat_template(messages, tools, chat_template=template, return_dict=False, **options)

    num_conversations = num_whole = 0
    for _ in range(60):
        messages, tools = random_conversation(choose)
        train_on = choose.choice(["assistant", "assistant", "last"])
        try:
            encoded = encode({"messages": messages, "tools": tools}, tokenizer, template, train_on=train_on)
        except UserError:
            continue
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        num_conversations += 1
        supervised = []
        for one in encoded:
            ids, weights = one.input_ids, [*one.weights, 0.0]
            is_whole = tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids == ids
            num_whole += is_whole
            starts = [k for k, weight in enumerate(weights) if weight and not weights[k - 1]]
            for start in starts:
                before = tokenizer.decode(ids[:start])
                prompts = {i: at_inference(messages[:i], add_generation_prompt=True) for i in answers}
                [i] = [i for i, prompt in prompts.items() if tokenizer.decode(prompt) == before]
                supervised.append(i)
                if is_whole or start == starts[0]:  # where it had to be cut, an earlier answer keeps its own tokens
                    assert ids[:start] == prompts[i]
                end = weights.index(0.0, start)
                assert at_inference(messages[: i + 1], tokenize=False).startswith(tokenizer.decode(ids[:end]))
                if shape != "plain":
                    assert tokenizer.convert_ids_to_tokens(ids[end - 1]) in {*SPECIAL, "<|endoftext|>"}
        assert supervised == (answers[-1:] if train_on == "last" else answers)
    assert num_conversations > 8 or shape == "deepseek_r1"
    assert num_whole >= num_conversations / 3 or shape in ("llama3", "llama31")  # which this tokenizer always cuts


BLOCKS = HEADER + (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)
CHATML_BYE = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[Bye now<|im_end|>]]\n"


def test_train_on_and_weights_choose_the_supervised_tokens(tokenizer):
    for template in (resolve_template(tokenizer, "chatml"), BLOCKS + PROMPT):  # marked by its author or not
        sample = with_keys(CHATS["multi"], assistant_0={"weight": 0}, assistant_1={"weight": 0.5})
        [encoded] = encode(sample, tokenizer, template)
        assert marked(encoded, tokenizer).endswith("assistant\nHello<|im_end|>\n" + CHATML_BYE)
        assert set(encoded.weights) == {0.0, 0.5} and encoded.remarks == ()
        [last] = encode(CHATS["multi"], tokenizer, template, train_on="last")
        assert marked(last, tokenizer) == marked(encoded, tokenizer)
        assert not any(encode(with_keys(CHATS["single"], assistant_0={"weight": 0}), tokenizer, template)[0].weights)
    [encoded] = encode(with_keys(CHATS["multi"], assistant_0={"weight": 0}), tokenizer, template_of("qwen3", tokenizer))
    assert encoded.remarks == () and marked(encoded, tokenizer).count("[[") == 1
    with pytest.raises(UserError, match="the text before the answer differs from the generation prompt"):
        encode(CHATS["multi"], tokenizer, BLOCKS + PROMPT.replace("assistant", "model"))


def test_train_on_all_supervises_every_token(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    sample = chat("Hi", "Hello", "Bye")
    [encoded] = encode(sample, tokenizer, template, train_on="all")
    assert marked(encoded, tokenizer) == (
        "[[<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n]]"
    )
    [encoded] = encode({"prompt": "Hi?", "completion": " 42"}, tokenizer, None, train_on="all")
    assert marked(encoded, tokenizer) == "[[Hi? 42<|endoftext|>]]"
    [encoded] = encode(CHATS["multi"], tokenizer, template_of("qwen3", tokenizer), train_on="all")
    assert marked(encoded, tokenizer).count("<|im_end|>") == 4 and all(encoded.weights)
    with pytest.raises(UserError, match=r"messages\[1\]: its weight is 0, but --train_on all trains on every token"):
        encode(with_keys(sample, assistant_0={"weight": 0}), tokenizer, template, train_on="all")


# Templates that leave something out of all answers, or of all but the last.
THINKING = HEADER + "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and KEPT }}" + SIMPLE
CUTTING = HEADER + "{{ m.content.split('</think>')[-1] if not KEPT else m.content }}<|im_end|>\n{% endfor %}" + PROMPT
CALLING = HEADER + "{{ m.tool_calls | tojson if m.tool_calls and KEPT }}" + SIMPLE
REASONED = CHATS["thoughts"]
THOUGHT = chat("Hi", "<think>A guest</think>Hello", "Bye", "<think>So soon</think>Bye now")
CALLED = {**CHATS["tools"], "tools": None}


@pytest.mark.parametrize("kept", ["false", "loop.last"])
@pytest.mark.parametrize(("template", "sample"), [(THINKING, REASONED), (CUTTING, THOUGHT), (CALLING, CALLED)])
def test_with_train_on_all_each_answer_is_whole_or_the_row_is_refused(template, sample, kept, tokenizer):
    encode(sample, tokenizer, template.replace("KEPT", "true"), train_on="all")
    with pytest.raises(UserError, match=r"messages\[1\]: the template leaves (the reasoning|out the call)"):
        encode(sample, tokenizer, template.replace("KEPT", kept), train_on="all")


@pytest.mark.parametrize(
    ("template", "sample"), [(THINKING, REASONED), (CUTTING, THOUGHT), (HEADER + SIMPLE, REASONED)]
)
def test_reasoning_of_an_answer_that_is_only_read_may_be_left_out_and_a_remark_says_so(template, sample, tokenizer):
    sample = with_keys(sample, assistant_0={"weight": 0}, assistant_1={"reasoning_content": None, "content": "Bye now"})
    [left_out] = encode(sample, tokenizer, template.replace("KEPT", "loop.last"))
    assert left_out.remarks == (FORGOTTEN,) and "A guest" not in marked(left_out, tokenizer)
    if "KEPT" in template:
        [kept] = encode(sample, tokenizer, template.replace("KEPT", "true"))
        assert kept.remarks == () and "A guest" in marked(kept, tokenizer)


# How templates write reasoning, and why a <think> block in the content is refused then.
OWN_THOUGHT = "a reasoning block of its own before the one"
REASONING_BLOCKS = {
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}": "",
    "{{ '<|channel|>' + m.reasoning_content + '<|end|>' if m.reasoning_content }}": "writes reasoning in another form",
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' }}": OWN_THOUGHT,
    "{{ '[THINK][/THINK]' if m.role == 'assistant' }}": OWN_THOUGHT,
}


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_reasoning_in_the_content_is_refused_where_the_model_would_not_write_it(train_on, tokenizer):
    """As gpt-oss's template, which has a channel for reasoning, and Kimi K2's, which writes an empty one itself."""
    for block, reason in REASONING_BLOCKS.items():
        template = HEADER + block + SIMPLE
        if reason:
            with pytest.raises(UserError, match=rf"messages\[1\]: .*{reason}"):
                encode(THOUGHT, tokenizer, template, train_on=train_on)
            encode(chat("Hi", "It is written <think>so</think>"), tokenizer, template, train_on=train_on)
        else:
            assert "<think>A guest</think>Hello" in marked(encode(THOUGHT, tokenizer, template, train_on), tokenizer)


# Tool calls and values for the template


def test_arguments_are_strings_if_the_template_expects_strings(tokenizer):
    """As DeepSeek's do; and those that would write a Python object."""
    call = "{% for call in m.tool_calls or [] %}{{ call.function.name }}ARGS{% endfor %}"
    for arguments in ("{{ '(' + call.function.arguments + ')' }}", "({{ call.function.arguments }})"):
        body = (
            "{{ m['content'] }}"
            + call.replace("ARGS", arguments)
            + "<|im_end|>\n{% endfor %}{% if tools %}{{ tools }}{% endif %}"
        )
        [encoded] = encode(CHATS["tools"] | {"tools": None}, tokenizer, HEADER + body + PROMPT)
        assert '[[weather({"city": "Oslo"})<|im_end|>]]' in marked(encoded, tokenizer)
    [encoded] = encode(CHATS["tools"] | {"tools": None}, tokenizer, template_of("chatml", tokenizer))
    assert '"arguments": {"city": "Oslo"}' in marked(encoded, tokenizer)
    with pytest.raises(UserError, match=r"messages\[1\]: the template does not use tool_calls"):
        encode(CALLED, tokenizer, HEADER + SIMPLE)
    with pytest.raises(UserError, match="can only concatenate str"):  # neither helps: the first reason is reported
        encode(CHATS["tools"] | {"tools": None}, tokenizer, HEADER + "{{ 'a' + (m.tool_calls or 1) }}{% endfor %}")


def test_the_template_for_tools_is_taken_where_there_are_tools(tokenizer):
    several = {
        "default": HEADER + SIMPLE,
        "tool_use": "{{ tools | tojson }}" + HEADER + "{{ (m.tool_calls or []) | tojson }}" + SIMPLE,
    }
    assert encode(CHATS["single"], tokenizer, several) == encode(CHATS["single"], tokenizer, several["default"])
    assert encode(CHATS["tools"], tokenizer, several) == encode(CHATS["tools"], tokenizer, several["tool_use"])


def test_a_row_may_give_values_to_the_template(tokenizer):
    template = HEADER + SIMPLE + "{{ '/no_think\n' if add_generation_prompt and mode == 'off' }}"
    template = template.replace(
        "{{ m['content'] }}", "{{ '/no_think\n' if m.role == 'assistant' and mode == 'off' }}{{ m['content'] }}"
    )
    off = CHATS["single"] | {"chat_template_kwargs": {"mode": "off", "tools_of_others": []}}  # as in cells of a table
    assert "assistant\n/no_think\n[[Hello" in marked(encode(off, tokenizer, template), tokenizer)
    assert "assistant\n[[Hello" in marked(encode(CHATS["single"], tokenizer, template), tokenizer)
    with pytest.raises(
        UserError, match=r"chat_template_kwargs: the chat template does not use 'node'; expected one of mode"
    ):
        encode(CHATS["single"] | {"chat_template_kwargs": {"node": 1}}, tokenizer, template)


# What is refused


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HEADER + "{{ 'An' if loop.last else 'The' }} answer<|im_end|>\n{% endfor %}", "generation prompt"),
        (HEADER + "an answer<|im_end|>\n{% endfor %}" + PROMPT, r"messages\[1\]: .* leaves part of the answer out"),
        (
            "{% for m in messages if m['role'] == 'assistant' %}<|im_start|>assistant\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}" + PROMPT,
            r"messages\[0\]: the template leaves its text out",
        ),
        (BLOCKS.replace("messages", "messages[1:]") + PROMPT, r"messages\[0\]: the template leaves its text out"),
        ("{{ nowhere.to.be.found }}", "undefined"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}Hi Hello Bye Bye now", "mark nothing"),
    ],
)
def test_a_template_whose_renderings_do_not_fit_together_is_refused(template, reason, tokenizer):
    with pytest.raises(UserError, match=reason):
        encode(chat("Hi", "Hello", "Bye", "Bye now"), tokenizer, template)
