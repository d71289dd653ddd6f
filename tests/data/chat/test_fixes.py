"""A fix that a message names works on the conversation that was refused; if none does, the message says so."""

import pytest
from data_helpers import CALL, HEADER, PROMPT, SIMPLE, WEATHER, byte_level_tokenizer, chat, marked, with_keys

from kit.data.chat.fixes import MAX_SAME, MAX_TRIALS, Fixes
from kit.data.chat.shipped import SHIPPED
from kit.data.chat.tokens import encode, encode_all
from kit.errors import UserError

ONE, TWO = chat("Hi", "Hello"), chat("Hi", "Hello", "Bye", "Bye now")
REASONED = with_keys(ONE, assistant_0={"reasoning_content": "A guest"})
THOUGHT = chat("Hi", "<think>\nA guest\n</think>\n\nHello")
CALLING = {
    "messages": [ONE["messages"][0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "tools": [WEATHER],
}
PLAIN = HEADER + SIMPLE
STARTS = "{% for m in messages %}<|{{ m.role }}|>"
ANSWERS = "{% if m.role == 'assistant' %}"
WITH_TOOLS = "{{ tools | tojson if tools }}"


def refusal(sample, tokenizer, template, **options):
    with pytest.raises(UserError) as caught:
        encode(sample, tokenizer, template, **options)
    (problem,) = caught.value.problems
    return problem


def with_content(sample, *contents):
    answers = iter(contents)
    return {
        **sample,
        "messages": [
            {"role": "assistant", "content": next(answers)} if message["role"] == "assistant" else message
            for message in sample["messages"]
        ],
    }


# Template, sample, reason, fix, and the sample and options with which it was applied by hand.
FIXED = {
    "a value": (
        PLAIN + "{{ '<think>\n' if add_generation_prompt and enable_thinking is not false }}",
        ONE,
        "differs from the prompt",
        "--chat_template_kwargs enable_thinking=false",
        {**ONE, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "reasoning that it does not know": (
        PLAIN,
        REASONED,
        "knows no reasoning_content",
        "write the reasoning into the content, as <think>...</think>",
        with_content(ONE, "<think>\nA guest\n</think>\n\nHello"),
    ),
    "reasoning in tags of its own": (
        PLAIN + "{# reasoning, in [THINK] and [/THINK] #}",
        REASONED,
        "leaves the reasoning of the answer out",
        "write the reasoning into the content, as [THINK]...[/THINK]",
        with_content(ONE, "[THINK]\nA guest\n[/THINK]\n\nHello"),
    ),
    "reasoning in the content": (
        HEADER + "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}"
        "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}" + PROMPT,
        THOUGHT,
        "writes reasoning in another form",
        "write what is between <think> and </think> into reasoning_content",
        REASONED,
    ),
    "a prompt that opens a thought": (
        HEADER
        + "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}"
        + PROMPT
        + "{{ '<think>\n' if add_generation_prompt }}",
        ONE,
        "differs from the prompt",
        "begin each content that has no thought with <think></think>",
        with_content(ONE, "<think></think>Hello"),
    ),
    "two fixes at once": (
        HEADER + "{{ m.content if thinking or m.role == 'user' else m.content.split('</think>')[-1].strip() }}"
        "<|im_end|>\n{% endfor %}" + PROMPT + "{# <think> reasoning </think> #}",
        REASONED,
        "leaves the reasoning of the answer out",
        "write the reasoning into the content, as <think>...</think>, and add --chat_template_kwargs thinking=true",
        {**with_content(ONE, "<think>\nA guest\n</think>\n\nHello"), "chat_template_kwargs": {"thinking": True}},
    ),
    "an answer that opens": (
        "{{ raise_exception('no question') if messages | selectattr('role', 'eq', 'user') | list == [] }}" + PLAIN,
        {"messages": TWO["messages"][1:]},
        "no question",
        'give the first answer "train": false, and it is only read',
        with_keys({"messages": TWO["messages"][1:]}, assistant_0={"weight": 0}),
    ),
    "tools that no answer calls": (
        STARTS + "{{ m.content }}<|end|>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}",
        {**ONE, "tools": [WEATHER]},
        "knows no tools",
        "leave the tools out, which no answer calls",
        ONE,
    ),
    "reasoning that nothing can write": (
        HEADER + "{{ '<analysis>' + m.thinking + '</analysis>' if m.thinking and m.tool_calls }}"
        "{{ raise_exception('no tags') if '<think>' in m.content }}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
        REASONED,
        "leaves the reasoning of the answer out",
        "leave the reasoning out",
        ONE,
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_a_fix_that_is_named_works(case):
    tokenizer = byte_level_tokenizer()
    if case in ("reasoning in tags of its own", "reasoning that nothing can write"):
        tokenizer = byte_level_tokenizer(("<|im_start|>", "<|im_end|>"))  # not the tags of other templates
    template, sample, reason, fix, fixed = FIXED[case]
    problem = refusal(sample, tokenizer, template)
    assert reason in problem.found and problem.fix == fix
    [text] = [marked(one, tokenizer) for one in encode(fixed, tokenizer, template)]
    assert "[[" in text


# For these only a template of the kit is left, which has the same tokens.
OTHER_TEMPLATE = {
    "tools that it does not know": (PLAIN, CALLING, "knows no tools"),
    "calls that it does not know": (WITH_TOOLS + PLAIN, CALLING, "knows no tool_calls"),
    "a call that it leaves out": (WITH_TOOLS + PLAIN + "{# tool_calls #}", CALLING, "leaves out the call"),
    "arguments in Python's form": (
        WITH_TOOLS + HEADER + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ raise_exception('a string') if c.function.arguments is string }}{{ c.function.arguments }}{% endfor %}"
        "<|im_end|>\n{% endfor %}" + PROMPT,
        CALLING,
        "does not write the arguments",
    ),
    "a tool that it leaves out": (
        "{% if tools and false %}{% endif %}" + PLAIN,
        {**ONE, "tools": [WEATHER]},
        "out the tool",
    ),
    "a text that it leaves out": (PLAIN.replace("in messages", "in messages[1:]"), TWO, "leaves its text out"),
    "marks of nothing": (
        HEADER + "{{ m.content }}<|im_end|>\n{% if m.content == 'x' %}{% generation %}{% endgeneration %}{% endif %}"
        "{% endfor %}" + PROMPT,
        ONE,
        "mark nothing",
    ),
    "a text behind the answer": (
        HEADER + "{{ m.content }}\n{% endfor %}<|im_start|>system\nAnswer<|end|> with an action.<|im_end|>\n" + PROMPT,
        ONE,
        "writes more behind the answer",
    ),
}


@pytest.mark.parametrize("case", OTHER_TEMPLATE)
def test_a_template_of_the_kit_that_is_named_works(case, tokenizer):
    template, sample, reason = OTHER_TEMPLATE[case]
    problem = refusal(sample, tokenizer, template)
    assert reason in problem.found and problem.fix == "--chat_template chatml"
    encode(sample, tokenizer, SHIPPED["chatml"].source)


@pytest.mark.parametrize("case", OTHER_TEMPLATE)
def test_if_nothing_works_the_message_says_so(case):
    tokenizer = byte_level_tokenizer(("<|turn|>", "<|stop|>", "<|end|>"))
    template, sample, _ = OTHER_TEMPLATE[case]
    template = template.replace("<|im_start|>", "<|turn|>").replace("<|im_end|>", "<|stop|>")
    if "tool" in case and "call" not in case and sample is not CALLING:
        sample = CALLING  # without calls the tools could be left out
    problem = refusal(sample, tokenizer, template)
    if "tools" in sample:  # nothing else holds calls
        assert problem.fix.startswith("--chat_template chatml --new_tokens '<|im_start|>,<|im_end|>' (another format")
        return
    assert problem.fix.startswith(("none of these works: ", "no fix is known"))
    assert problem.fix.endswith("; it takes another template, or other rows")


@pytest.mark.parametrize("template", [None, HEADER + SIMPLE])
def test_tokens_that_a_template_of_the_kit_needs_are_added_where_nothing_else_holds_the_calls(template):
    tokenizer = byte_level_tokenizer(("<|end|>",))
    tokenizer.tokens_of_recipe = ["<|mine|>"]  # the flag that is typed replaces the one that was
    fix = refusal(CALLING, tokenizer, template).fix
    assert fix.startswith("--chat_template chatml --new_tokens '<|mine|>,<|im_start|>,<|im_end|>'")
    assert fix.endswith("learns anew)") == (template is not None)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    assert "<|im_end|>" in marked(encode(CALLING, tokenizer, SHIPPED["chatml"].source)[0], tokenizer)
    assert "--new_tokens" not in refusal(ONE, byte_level_tokenizer(("<|end|>",)), None).fix  # one that fits is first


def test_all_turns_may_be_too_many_to_learn_from(tokenizer):
    thought = "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.last }}"
    content = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    template = HEADER + thought + content + PROMPT
    sample = with_keys(TWO, assistant_0={"reasoning_content": "A guest"}, assistant_1={"reasoning_content": "So soon"})
    assert refusal(sample, tokenizer, template, train_on="all").fix == "--train_on assistant"
    assert len(encode(sample, tokenizer, template)) == 2


def test_a_thought_is_not_put_behind_an_empty_one_or_a_call(tokenizer):
    empty = HEADER + ANSWERS + "<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    assert refusal(REASONED, tokenizer, empty).fix == "leave the reasoning out"
    late = (
        WITH_TOOLS
        + HEADER
        + "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content }}<|im_end|>\n{% endfor %}"
        + PROMPT
    )
    sample = with_keys(CALLING, assistant_0={"reasoning_content": "A guest"})
    assert refusal(sample, tokenizer, late).fix == "leave the reasoning out"


def test_a_value_that_helps_one_answer_only_is_not_named(tokenizer):
    template = (
        PLAIN + "{{ '<think>\n' if add_generation_prompt and not (enable_thinking is false and messages[1:] == []) }}"
    )
    encode({**ONE, "chat_template_kwargs": {"enable_thinking": False}}, tokenizer, template)
    assert "--chat_template_kwargs" not in refusal(TWO, tokenizer, template).fix.partition("none")[0]


def test_a_value_that_the_row_gives_is_left_to_it(tokenizer):
    template = FIXED["a value"][0]
    sample = {**ONE, "chat_template_kwargs": {"enable_thinking": True}}
    assert "enable_thinking" not in refusal(sample, tokenizer, template).fix


def test_few_fixes_are_tried_for_each_of_many_rows(tokenizer, monkeypatch):
    tried = []
    works = Fixes._works
    monkeypatch.setattr(Fixes, "_works", lambda self, row, first: tried.append(row) or works(self, row, first))
    fixable = FIXED["a value"][0]
    problems = encode_all([ONE] * 100, tokenizer, fixable)
    assert len({problem.fix for problem in problems}) == 1 and len(tried) == MAX_SAME
    tried.clear()
    hopeless = "{{ raise_exception('no') }}"
    problems = encode_all([ONE] * 100, tokenizer, hopeless)
    assert len({problem.fix for problem in problems}) == 1 and problems[0].fix.startswith("no fix is known")
    assert len(tried) == MAX_TRIALS * len(tried[::MAX_TRIALS])


def test_parameters_of_tools_that_a_template_drops_are_written_as_it_reads_them(tokenizer):
    listed = "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters.properties }}){% endfor %}"
    given = {"city": {"type": "str", "description": "Where"}}
    sample = {**ONE, "tools": [{"type": "function", "function": {"name": "add", "parameters": given}}]}
    fix = refusal(sample, tokenizer, listed + PLAIN).fix
    assert fix.startswith('write the parameters of tools as JSON schemas: {"type": "object", "properties": {...}}')
    sample["tools"][0]["function"]["parameters"] = {"type": "object", "properties": given}
    encode(sample, tokenizer, listed + PLAIN)


def test_a_thought_in_the_content_of_a_template_with_its_own_form_goes_into_reasoning_content(tokenizer):
    """The tag is that of the row: the template knows none."""
    template = HEADER + "{{ '<|channel|>' + m.reasoning_content + '<|end|>' if m.reasoning_content }}" + SIMPLE
    fix = refusal(THOUGHT, tokenizer, template).fix
    assert fix == "write what is between <think> and </think> into reasoning_content"
