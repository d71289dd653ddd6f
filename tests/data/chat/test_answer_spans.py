"""Where an answer stands: after the prompt at inference, to where generation would stop."""

import pytest
from data_helpers import CALL, HEADER, PROMPT, SIMPLE, byte_level_tokenizer, chat, encode, marked, with_keys

from kit.data.chat.answer_spans import CLOSED, MOVED
from kit.data.chat.template import AS_CONTENT
from kit.data.chat.tokens import UNROLLED
from kit.data.chat.turns import NO_END_OF_TURN
from kit.system.errors import UserError

ONE, TWO = chat("Hi", "Hello"), chat("Hi", "Hello", "Bye", "Bye now")


def supervised(sample, tokenizer, template, **options):
    """The supervised text of each sample with 20 characters before it, and the remarks."""
    encoded = encode(sample, tokenizer, template, **options)
    return [marked(one, tokenizer) for one in encoded], encoded[0].remarks


def refusal(sample, tokenizer, template):
    with pytest.raises(UserError) as caught:
        encode(sample, tokenizer, template)
    (problem,) = caught.value.problems
    return problem


# Templates that always open the next turn

# As Command R7B and Command A do, and some with a header in plain text.
OPENING = [
    (
        "<|END_OF_TURN_TOKEN|>",
        "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else 'USER' }}_TOKEN|>"
        "{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    (
        "<|im_end|>",
        HEADER + "{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}",
        "<|im_start|>assistant\n",
    ),
    (
        "<|end|>",
        "{% for m in messages %}## {{ m.role }}:\n{{ m.content }}<|end|>\n{% endfor %}{{ '## assistant:\n' }}",
        "##",
    ),
    (
        "<|end|>",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
        "<|assistant|>",
    ),
]


@pytest.mark.parametrize(("eos", "template", "header"), OPENING)
def test_the_header_of_the_next_turn_is_masked(eos, template, header):
    tokenizer = byte_level_tokenizer(eos_token=eos)
    [whole], remarks = supervised(TWO, tokenizer, template)
    assert f"[[Hello{eos}]]" in whole and f"[[Bye now{eos}]]" in whole and remarks == ()
    assert header in whole.rpartition("]]")[2] and header not in whole.rpartition("[[")[2].partition("]]")[0]
    [everything], _ = supervised(TWO, tokenizer, template, train_on="all")
    assert everything.endswith(f"Bye now{eos}]]")
    [named], _ = supervised(chat("Hi", f"a{eos}b"), tokenizer, template)
    assert f"[[a{eos}b{eos}]]" in named


@pytest.mark.parametrize("template", [template for _, template, _ in OPENING[:3]])
def test_a_template_that_always_opens_the_next_turn_and_writes_no_eos_is_refused(template, tokenizer):
    problem = refusal(ONE, tokenizer, template)
    assert problem.found.startswith("messages[1]: the template opens the next turn after every answer")
    assert problem.fix.startswith("set eos_token in tokenizer_config.json")


def test_an_answer_of_several_turns_is_refused(tokenizer):
    """As Nemotron Nano 2's template makes of a text and a call: at inference only the first is written."""
    ended = byte_level_tokenizer(eos_token="<|im_end|>")
    template = HEADER + "{{ m.content }}<|im_end|>\n"
    template += "{% if m.tool_calls %}<|im_start|>assistant\n{{ m.tool_calls | tojson }}<|im_end|>\n{% endif %}"
    template += "{% endfor %}" + PROMPT
    sample = {"messages": [*TWO["messages"][:1], {"role": "assistant", "content": "One moment", "tool_calls": [CALL]}]}
    found = refusal(sample, ended, template).found
    assert found == "messages[1]: the template writes <|im_end|> inside the answer, where generation stops"
    supervised(sample, tokenizer, template)  # here it is not where generation stops
    supervised(chat("Hi", "a<|im_end|>b"), ended, template)
    thinking = "{{ '<think>' + m.thinking + '<|im_end|>\n<|im_start|>assistant\n' if m.thinking }}{{ m.content }}"
    thinking = template.replace("{{ m.content }}", thinking, 1)
    [text], _ = supervised(with_keys(ONE, assistant_0={"reasoning_content": "Hm"}), ended, thinking)
    assert text.count("<|im_end|>") == 3 and text.endswith("Hello<|im_end|>]]\n")


# Answers that a template leaves open

GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def test_a_last_answer_is_closed_by_what_would_come_next(tokenizer):
    [text], remarks = supervised(TWO, tokenizer, GLM)
    assert text.endswith("<|assistant|>[[\nBye now<|user|>]]") and "[[\nHello<|user|>]]\nBye" in text
    assert remarks == (CLOSED,)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    [text], remarks = supervised({"messages": [TWO["messages"][0], calling]}, tokenizer, GLM)
    assert text.endswith("<|tool|>]]") and remarks == (CLOSED,)


# What a template that drops earlier reasoning writes between the header and the content.
THOUGHTS = {
    "reasoning": "{{ '<think>' + (m.reasoning_content or '' if loop.last else '') + '</think>' if LEARNED }}",
    "content": "{{ m.content.split('</think>')[0] + '</think>' if LEARNED and loop.last and '</think>' in m.content }}",
}


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("text", ["4", "think", "user"])
def test_an_answer_whose_reasoning_disappears_is_closed_by_what_would_come_next(thought, text, tokenizer):
    """As with GLM 4.5's templates and later ones: the continued rendering does not begin with the answer."""
    template = GLM.replace("|>\n{{ m.content }}", "|>" + THOUGHTS[thought] + "{{ m.content.split('</think>')[-1] }}")
    template = template.replace("LEARNED", "m.role == 'assistant'")
    if thought == "reasoning":
        sample = with_keys(chat("Hi", text), assistant_0={"reasoning_content": "A " + text})
    else:
        sample = chat("Hi", f"<think>A {text}</think>{text}")
    [whole], remarks = supervised(sample, tokenizer, template)
    assert whole.endswith(f"<|assistant|>[[<think>A {text}</think>{text}<|user|>]]") and remarks == (CLOSED,)
    [everything], remarks = supervised(sample, tokenizer, template, train_on="all")
    assert everything.endswith(f"{text}<|user|>]]") and remarks == (CLOSED,)


def test_an_answer_that_nothing_closes_is_remarked_on(tokenizer):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    [text], remarks = supervised(ONE, tokenizer, template + "{{ 'assistant:' if add_generation_prompt }}")
    assert text.endswith("assistant:[[ Hello\n\n]]") and remarks == (NO_END_OF_TURN,)
    assert supervised(ONE, tokenizer, GLM + "{{ raise_exception('no') if messages[2:] }}")[1] == (NO_END_OF_TURN,)


# Prompts that the rendering of the answer does not begin with

EMPTY = "<think>\n\n</think>\n\n"


def prompting(thought):
    """A template whose generation prompt ends with ``thought``, which no answer has."""
    return HEADER + SIMPLE.replace("assistant\n", "assistant\n" + thought)


def test_an_empty_think_block_in_the_prompt_is_masked(tokenizer):
    texts, remarks = supervised(TWO, tokenizer, prompting(EMPTY))
    assert [text.partition("[[")[2] for text in texts] == ["Hello<|im_end|>]]\n", "Bye now<|im_end|>]]\n"]
    assert all(text.partition("[[")[0].endswith("<|im_start|>assistant\n" + EMPTY) for text in texts)
    assert "assistant\nHello<|im_end|>\n" in texts[1] and remarks == (UNROLLED, MOVED)
    blocks = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    blocks += "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    assert supervised(TWO, tokenizer, prompting(EMPTY).replace("{{ m['content'] }}<|im_end|>\n", blocks)) == (
        texts,
        remarks,
    )


def test_a_think_block_that_the_answer_never_closes_is_refused_with_a_fix(tokenizer):
    problem = refusal(ONE, tokenizer, prompting("<think>\n"))
    assert problem.found.endswith("differs from the generation prompt ('Hello<|im_end|>\\n' instead of '<think>\\n')")
    assert problem.fix == AS_CONTENT  # as in the next test


def test_reasoning_in_the_content_continues_the_prompt(tokenizer):
    """As DeepSeek R1's and QwQ's templates do, which forget it."""
    template = HEADER + "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}" + PROMPT
    template += "{{ '<think>\n' if add_generation_prompt }}"
    sample = chat("Hi", "<think>\nA guest\n</think>\n\nHello", "Bye", "<think>\nSo soon\n</think>\n\nBye now")
    texts, remarks = supervised(sample, tokenizer, template)
    assert [text.rpartition("<think>")[2] for text in texts] == [
        "\n[[A guest\n</think>\n\nHello<|im_end|>]]\n",
        "\n[[So soon\n</think>\n\nBye now<|im_end|>]]\n",
    ]
    assert "assistant\nHello<|im_end|>\n" in texts[1] and remarks == (UNROLLED, MOVED)


def test_a_call_is_not_put_after_the_header_of_another_channel(tokenizer):
    """As in a template of gpt-oss whose prompt opens the channel of final answers: a call has another header."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    template = "{% for m in messages %}<|im_start|>{{ m.role }}"
    template += "{{ ' to=f<|channel|>call' if m.tool_calls else '<|channel|>final' }}<|message|>"
    template += "{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|im_end|>\n{% endfor %}"
    template += "{{ '<|im_start|>assistant<|channel|>final<|message|>' if add_generation_prompt }}"
    texts, _ = supervised(ONE, tokenizer, template)
    assert texts[0].endswith("<|im_start|>assistant<|channel|>final<|message|>[[Hello<|im_end|>]]\n")
    problem = refusal({"messages": [ONE["messages"][0], calling]}, tokenizer, template)
    assert "differs from the generation prompt" in problem.found


# A conversation that the assistant opens


@pytest.mark.parametrize("first", ["", "{% if messages[0].role == 'system' %}{% endif %}"])
def test_the_assistant_may_open_a_conversation(first, tokenizer):
    sample = {"messages": TWO["messages"][1:]}
    [text], remarks = supervised(sample, tokenizer, first + "<|system|>" + HEADER + SIMPLE)
    assert text.startswith("<|system|><|im_start|>assistant\n[[Hello<|im_end|>]]\n<|im_start|>user") and remarks == ()
