"""What is learned from, against texts written by hand: ``[[`` and ``]]`` enclose what is supervised."""

import random
import re

import pytest
from data_helpers import CALL, GOLDEN, SPECIAL, WEATHER, byte_level_tokenizer, chat, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kit.data.chat.template import FIXED_DATE, REQUIRED_TOKENS, TODAY, Template, resolve_template
from kit.data.chat.tokens import NEWLINE_ADDED, NO_BOS, UNROLLED, Encoded, encode, encode_all
from kit.data.chat.turns import NO_END_OF_TURN, OTHER_PROMPT
from kit.errors import UserError

SHAPES = sorted(path.stem for path in GOLDEN.glob("*.txt"))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def tokenizer_with_bos():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(scope="module", params=["metaspace", "prepend"])
def sentencepiece(request):
    return sentencepiece_tokenizer(request.param)


@pytest.fixture
def fixed_today(monkeypatch):
    """transformers tells templates the date that the kit tells them."""

    class FixedDate:
        now = staticmethod(lambda: TODAY)

    monkeypatch.setattr(chat_template_utils, "datetime", FixedDate)


def marked(encoded, tokenizer):
    """The tokens as text, with ``[[ ]]`` around supervised runs. Several samples are parted by ``--- and``."""
    if isinstance(encoded, list):
        return "\n--- and\n".join(marked(one, tokenizer) for one in encoded)
    assert len(encoded.input_ids) == len(encoded.weights)
    text, inside = "", False
    for id_, weight in zip(encoded.input_ids, encoded.weights, strict=True):
        text += "[[" * (weight > 0 and not inside) + "]]" * (inside and not weight)
        text += tokenizer.convert_ids_to_tokens(id_)
        inside = weight > 0
    return text.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ").replace("<0x0A>", "\n") + "]]" * inside


def with_keys(sample, **keys):
    """``assistant_1={...}`` puts keys into the second assistant message."""
    messages = [dict(message) for message in sample["messages"]]
    answers = [message for message in messages if message["role"] == "assistant"]
    for name, values in keys.items():
        answers[int(name.removeprefix("assistant_"))].update(values)
    return {**sample, "messages": messages}


def template_of(shape, tokenizer):
    return resolve_template(tokenizer, shape if shape in REQUIRED_TOKENS else str(GOLDEN / f"{shape}.jinja"))


CASES = {
    "single": chat("Hi", "Hello"),
    "multi": chat("Hi", "Hello", "Bye", "Bye now"),
    "system": chat("Hi", "Hello", "Bye", "Bye now", system="Be kind"),
    "thoughts": with_keys(
        chat("Hi", "Hello", "Bye", "Bye now"),
        assistant_0={"reasoning_content": "A guest"},
        assistant_1={"reasoning_content": "So soon"},
    ),
    "tools": {
        "messages": [
            {"role": "user", "content": "Cold?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"degrees": 4}', "tool_call_id": "call00001", "name": "weather"},
            {"role": "assistant", "content": "Yes"},
        ],
        "tools": [WEATHER],
    },
}


def golden(shape):
    """The expectations of a shape by case: what ``golden/<shape>.txt`` says under ``=== <case>``."""
    _, *parts = re.split(r"^=== (\w+)\n", (GOLDEN / f"{shape}.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_golden(shape, case, tokenizer_with_bos):
    try:
        encoded = encode(CASES[case], tokenizer_with_bos, template_of(shape, tokenizer_with_bos))
    except UserError as error:
        found = f"refused: {error.problems[0].found}\n"
    else:
        names = {FIXED_DATE: "FIXED_DATE", UNROLLED: "UNROLLED", NO_END_OF_TURN: "NO_END_OF_TURN"}
        remarks = "".join(f"remark: {names[remark]}\n" for remark in encoded[0].remarks)
        assert not any(one.remarks for one in encoded[1:])
        found = f"{marked(encoded, tokenizer_with_bos)}\n{remarks}"
    assert found == golden(shape)[case]


def test_every_named_template_and_every_file_has_golden_texts_for_every_case():
    assert set(SHAPES) == {*REQUIRED_TOKENS, *(path.stem for path in GOLDEN.glob("*.jinja"))}
    assert all(list(golden(shape)) == list(CASES) for shape in SHAPES)


TEXTS = ["Hi", "42", " Hello\n", "\n\nBye now", "é ∑", "a  b", "{}", 'say "x"', "Hello there, how are you?", "1.", "-"]


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


@pytest.mark.parametrize("shape", SHAPES)
def test_every_answer_is_learned_once_right_after_the_prompt_at_inference(shape, tokenizer_with_bos, fixed_today):
    tokenizer, choose = tokenizer_with_bos, random.Random(shape)
    template = template_of(shape, tokenizer)

    def at_inference(messages, **options):
        return tokenizer.apply_chat_template(messages, tools, chat_template=template, return_dict=False, **options)

    num_conversations = num_whole = 0
    for _ in range(150):
        messages, tools = random_conversation(choose)
        train_on = choose.choice(["assistant", "assistant", "last"])
        try:
            encoded = encode({"messages": messages, "tools": tools}, tokenizer, template, train_on=train_on)
        except UserError:
            continue
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        num_conversations += 1
        learned = []
        for one in encoded:
            ids, weights = one.input_ids, [*one.weights, 0.0]
            is_whole = tokenizer(tokenizer.decode(ids), add_special_tokens=False).input_ids == ids
            num_whole += is_whole
            starts = [k for k, weight in enumerate(weights) if weight and not weights[k - 1]]
            for start in starts:
                before = tokenizer.decode(ids[:start])
                prompts = {i: at_inference(messages[:i], add_generation_prompt=True) for i in answers}
                [i] = [i for i, prompt in prompts.items() if tokenizer.decode(prompt) == before]
                learned.append(i)
                if is_whole or start == starts[0]:  # where it had to be cut, an earlier answer keeps its own tokens
                    assert ids[:start] == prompts[i]
                end = weights.index(0.0, start)
                assert at_inference(messages[: i + 1], tokenize=False).startswith(tokenizer.decode(ids[:end]))
                if shape != "plain":
                    assert tokenizer.convert_ids_to_tokens(ids[end - 1]) in {*SPECIAL, "<|endoftext|>"}
        assert learned == (answers[-1:] if train_on == "last" else answers)
    assert num_conversations > 20 or shape == "deepseek_r1"
    assert num_whole >= num_conversations / 3 or shape in ("llama3", "llama31")  # which this tokenizer always cuts


@pytest.mark.parametrize("shape", ["alpaca", "llama2", "tulu", "vicuna", "zephyr"])
def test_the_prompt_is_tokenised_as_at_inference_by_sentencepiece_too(shape, sentencepiece):
    template = resolve_template(sentencepiece, shape)
    for text in TEXTS:
        messages = chat("Hi", text, system="Be kind")["messages"]
        [encoded] = encode({"messages": messages}, sentencepiece, template)
        prompt = sentencepiece.apply_chat_template(
            messages[:-1], chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert encoded.input_ids[: len(prompt)] == prompt
        assert encoded.weights[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_only_what_is_asked_for_is_learned(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    sample = with_keys(chat("Hi", "Hello", "Bye", "Bye now"), assistant_0={"weight": 0}, assistant_1={"weight": 2.5})
    [encoded] = encode(sample, tokenizer, template)
    assert marked(encoded, tokenizer).endswith("assistant\nHello<|im_end|>\n" + CHATML_BYE)
    assert set(encoded.weights) == {0.0, 2.5}
    [last] = encode(chat("Hi", "Hello", "Bye", "Bye now"), tokenizer, template, train_on="last")
    assert marked(last, tokenizer) == marked(encoded, tokenizer)
    assert encode(with_keys(CASES["multi"], assistant_0={"weight": None}), tokenizer, template) == encode(
        CASES["multi"], tokenizer, template
    )
    [encoded] = encode(with_keys(CASES["multi"], assistant_0={"weight": 0}), tokenizer, template_of("qwen3", tokenizer))
    assert encoded.remarks == () and marked(encoded, tokenizer).count("[[") == 1
    nothing = with_keys(chat("Hi", "Hello"), assistant_0={"weight": 0})
    assert not any(encode(nothing, tokenizer, template)[0].weights)


CHATML_BYE = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[Bye now<|im_end|>]]\n"


def test_all_learns_every_token_but_turns_with_no_weight(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    sample = chat("Hi", "Hello", "Bye")
    [encoded] = encode(sample, tokenizer, template, train_on="all")
    assert marked(encoded, tokenizer) == (
        "[[<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n]]"
    )
    [encoded] = encode(with_keys(sample, assistant_0={"weight": 0}), tokenizer, template, train_on="all")
    assert marked(encoded, tokenizer) == (
        "[[<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n]]Hello<|im_end|>"
        "[[\n<|im_start|>user\nBye<|im_end|>\n]]"
    )
    [encoded] = encode(with_keys(sample, assistant_0={"weight": 2}), tokenizer, template, train_on="all")
    assert encoded.weights.count(2.0) == len(tokenizer("Hello<|im_end|>").input_ids) and set(encoded.weights) == {1, 2}
    [encoded] = encode({"prompt": "Hi?", "completion": " 42"}, tokenizer, None, train_on="all")
    assert marked(encoded, tokenizer) == "[[Hi? 42<|endoftext|>]]"
    rewriting = template_of("qwen3", tokenizer)
    [encoded] = encode(CASES["multi"], tokenizer, rewriting, train_on="all")
    assert marked(encoded, tokenizer).count("<|im_end|>") == 4 and all(encoded.weights)
    weighed = with_keys(CASES["multi"], assistant_0={"weight": 0})
    with pytest.raises(UserError, match=r"messages\[1\]: it has a weight, but is rendered differently"):
        encode(weighed, tokenizer, rewriting, train_on="all")


def test_a_template_does_not_see_weights(tokenizer):
    template = HEADER + "{{ raise_exception('seen') if 'weight' in m }}" + SIMPLE
    assert encode(with_keys(CASES["single"], assistant_0={"weight": 0.5}), tokenizer, template)[0].weights.count(0.5)


def test_token_ids_are_taken_as_they_are(tokenizer):
    assert encode({"input_ids": [5, 6, 7]}, tokenizer, None) == [Encoded([5, 6, 7], [1.0, 1.0, 1.0])]
    labelled = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}
    assert encode(labelled, tokenizer, None, train_on="all") == [Encoded([5, 6, 7], [0.0, 1.0, 0.0])]
    with pytest.raises(UserError, match=r"labels: labels\[0\] is 6, input_ids\[0\] is 5; expected the same, or -100"):
        encode({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, tokenizer, None)


def test_messages_after_the_last_answer_are_left_out(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    assert encode(chat("Hi", "Hello", "Bye"), tokenizer, template) == encode(chat("Hi", "Hello"), tokenizer, template)


def test_an_answer_that_names_the_end_of_turn_is_supervised_to_its_real_end(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    for text in ("a<|im_end|>b", "a<|im_end|>", "<|im_end|> <|im_end|>"):
        encoded = encode(chat("Hi", text), tokenizer, template)
        assert marked(encoded, tokenizer).endswith(f"assistant\n[[{text}<|im_end|>]]\n")


def test_of_a_prompt_in_messages_no_answer_is_supervised(tokenizer):
    messages = chat("Hi", "Hello", "Bye", "Bye now")["messages"]
    for shape in ("chatml", "marked"):
        sample = {"prompt": messages[:3], "completion": messages[3:]}
        [encoded] = encode(sample, tokenizer, template_of(shape, tokenizer))
        assert marked(encoded, tokenizer).count("[[") == 1
        assert marked(encoded, tokenizer).endswith(CHATML_BYE)


def test_texts_become_messages_when_a_template_is_asked_for(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    pair = {"prompt": "Hi", "completion": "Hello"}
    assert encode(pair, tokenizer, template, prompts_as_chat=True) == encode(chat("Hi", "Hello"), tokenizer, template)
    assert marked(encode(pair, tokenizer, template), tokenizer) == "Hi[[\nHello<|endoftext|>]]"


def test_tools_go_with_a_prompt_and_a_completion(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    whole = CASES["tools"]
    parts = {"prompt": whole["messages"][:1], "completion": whole["messages"][1:], "tools": whole["tools"]}
    assert encode(parts, tokenizer, template) == encode(whole, tokenizer, template)


def test_a_rewriting_template_unrolls_only_the_answers_that_it_rewrites(tokenizer):
    """Here thoughts after the last question are kept, so its answers share one sample."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Look it up"}
    result = {"role": "tool", "content": "4"}
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "4 is cold"}
    question = {"role": "user", "content": "Cold?"}
    template = template_of("qwen3", tokenizer)
    one = encode({"messages": [question, calling, result, answer]}, tokenizer, template)
    assert [marked(sample, tokenizer).count("[[") for sample in one] == [2] and one[0].remarks == ()
    two = encode({"messages": [question, calling, result, answer] * 2}, tokenizer, template)
    assert [marked(sample, tokenizer).count("[[") for sample in two] == [2, 2]
    assert two[0] == Encoded(one[0].input_ids, one[0].weights, (UNROLLED,)) and two[1].remarks == ()
    assert marked(two[1], tokenizer).count("<think>") == 2
    last = encode({"messages": [question, calling, result, answer] * 2}, tokenizer, template, train_on="last")
    assert len(last) == 1 and last[0].input_ids == two[1].input_ids


HEADER = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "body",
    [
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}",
        # the end of turn, or more than it, on the wrong side of the block's border
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
        "{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}",
    ],
)
def test_generation_blocks_are_followed_to_the_end_of_turn(body, tokenizer):
    sample = chat("Hi", "Hello", "Bye", "Bye now")
    expected = encode(sample, tokenizer, resolve_template(tokenizer, "chatml"))
    assert encode(sample, tokenizer, HEADER + body + PROMPT) == expected


def test_a_header_inside_a_generation_block_is_not_supervised(tokenizer):
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>user\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}" + PROMPT
    )
    sample = chat("Hi", "Hello", "Bye", "Bye now")
    assert encode(sample, tokenizer, template) == encode(sample, tokenizer, resolve_template(tokenizer, "chatml"))


# Blocks by position, and by their order where the prompts are no prefixes of the whole.
BLOCKS = HEADER + (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)


@pytest.mark.parametrize("prefix", ["", "{{ messages | length }}"])
def test_generation_blocks_belong_to_answers(prefix, tokenizer):
    sample = with_keys(chat("Hi", "Hello", "Bye", "Bye now"), assistant_0={"weight": 0}, assistant_1={"weight": 0.5})
    [encoded] = encode(sample, tokenizer, prefix + BLOCKS + PROMPT)
    assert marked(encoded, tokenizer).endswith("Hello<|im_end|>\n" + CHATML_BYE)
    assert set(encoded.weights) == {0.0, 0.5}
    assert encoded.remarks == (OTHER_PROMPT,) * bool(prefix)
    [last] = encode(chat("Hi", "Hello", "Bye", "Bye now"), tokenizer, prefix + BLOCKS + PROMPT, train_on="last")
    assert marked(last, tokenizer) == marked(encoded, tokenizer)


def test_generation_blocks_that_belong_to_no_answer_are_refused_where_it_matters(tokenizer):
    split = "{{ messages | length }}" + BLOCKS.replace(
        "{{ m['content'] }}<|im_end|>{% end", "{{ m['content'] }}{% endgeneration %}{% generation %}<|im_end|>{% end", 1
    )
    sample = chat("Hi", "Hello", "Bye", "Bye now")
    [encoded] = encode(sample, tokenizer, split + PROMPT)
    assert marked(encoded, tokenizer).count("[[") == 2
    with pytest.raises(UserError, match=r"4 {% generation %} blocks for 2 answers: which is whose cannot be told"):
        encode(sample, tokenizer, split + PROMPT, train_on="last")


def test_an_end_marker_of_the_whole_conversation_is_not_part_of_a_turn(tokenizer):
    template = HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT
    template += "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    [encoded] = encode(chat("Hi", "Hello", "Bye", "42"), tokenizer, template)
    assert marked(encoded, tokenizer).endswith("[[42<|im_end|>]]\n<|endoftext|>")
    assert "[[Hello<|im_end|>]]\n<|im_start|>user" in marked(encoded, tokenizer)


def test_the_token_that_opens_the_next_turn_may_end_an_answer(tokenizer):
    """As GLM's do."""
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    template += "{{ '<|assistant|>' if add_generation_prompt }}"
    [encoded] = encode(chat("Hi", "Hello", "Bye", "42"), tokenizer, template)
    assert marked(encoded, tokenizer) == "<|user|>Hi<|assistant|>[[Hello<|user|>]]Bye<|assistant|>[[42]]"
    assert encoded.remarks == (NO_END_OF_TURN,)
    parting = byte_level_tokenizer(["<|user|>", "<|assistant|>"])
    parting.add_tokens(["</call>"])
    [encoded] = encode(chat("Hi", "Hello</call>", "Bye", "42"), parting, template)
    assert marked(encoded, parting) == "<|user|>Hi<|assistant|>[[Hello</call><|user|>]]Bye<|assistant|>[[42]]"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages | length }}\n" + HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT, "inference"),
        (
            HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT + "{{ '<think>' if add_generation_prompt }}",
            r"messages\[1\]: the text before the answer differs .*\('Hello.* instead of '<think>'",
        ),
        (HEADER + "{{ 'An' if loop.last else 'The' }} answer<|im_end|>\n{% endfor %}", "inference"),
        (HEADER + "an answer<|im_end|>\n{% endfor %}" + PROMPT, r"messages\[1\]: .* leaves part of the answer out"),
        (
            "{% for m in messages if m['role'] == 'assistant' %}<|im_start|>assistant\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}" + PROMPT,
            r"messages\[0\]: the template leaves its text out",
        ),
        (BLOCKS.replace("messages", "messages[1:]") + PROMPT, r"messages\[0\]: the template leaves its text out"),
        ("{{ raise_exception('no system message, please') }}", "no system message, please"),
        ("{{ nowhere.to.be.found }}", "undefined"),
        ("{% for %}", r"not a Jinja template \(line 1"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}Hi Hello Bye Bye now", "mark nothing"),
    ],
)
def test_a_template_whose_renderings_do_not_fit_together_is_refused(template, reason, tokenizer):
    with pytest.raises(UserError, match=reason):
        encode(chat("Hi", "Hello", "Bye", "Bye now"), tokenizer, template)


def test_no_template_is_refused_with_those_that_fit(sentencepiece):
    with pytest.raises(UserError, match=r"--chat_template alpaca \| llama2 \| tulu \| vicuna \| zephyr, which fit"):
        encode(chat("Hi", "Hello"), sentencepiece, resolve_template(sentencepiece, None))


def test_two_bos_are_refused(tokenizer_with_bos):
    with pytest.raises(UserError, match=r"two BOS tokens \(<bos>\) at the start"):
        encode(chat("Hi", "Hello"), tokenizer_with_bos, "{{ bos_token }}<bos>" + HEADER + SIMPLE)
    with pytest.raises(UserError, match=r"two BOS tokens \(<bos>\) at the start"):
        encode(chat("Hi", "Hello", system="<bos>Be kind"), tokenizer_with_bos, template_of("deepseek", None))


SIMPLE = "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT


def test_a_template_without_the_bos_that_the_tokenizer_adds_is_remarked_on():
    tokenizer = byte_level_tokenizer(bos_token="<bos>")
    template = resolve_template(tokenizer, "chatml")
    assert encode(chat("Hi", "Hello"), tokenizer, template)[0].remarks == ()
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    assert encode(chat("Hi", "Hello"), tokenizer, template)[0].remarks == (NO_BOS,)
    assert encode(chat("Hi", "Hello"), tokenizer, "{{ bos_token }}" + HEADER + SIMPLE)[0].remarks == ()


def test_tokens_that_the_tokenizer_splits_are_remarked_on():
    tokenizer = byte_level_tokenizer(["<|im_end|>"])
    template = "{# <|comment|> #}{% if false %}<|never|>{% endif %}[INST]" + HEADER + SIMPLE
    remarks = encode(chat("Hi", "Hello"), tokenizer, template)[0].remarks
    split = "the chat template writes {}, which the tokenizer splits into pieces"
    assert remarks == (split.format("<|im_start|>"), split.format("[INST]"))
    zephyr = resolve_template(tokenizer, "zephyr")
    assert encode(chat("Hi", "Hello"), tokenizer, zephyr)[0].remarks == ()


def test_a_token_that_swallows_whitespace_after_it_does_so_as_at_inference():
    """As Phi-3's do: of ``<|end|>`` and a newline one token is left."""
    tokenizer = byte_level_tokenizer(())
    tokens = ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(token, rstrip=True, special=True, normalized=False) for token in tokens]}
    )
    template = resolve_template(tokenizer, "phi3")
    [encoded] = encode(chat("Hi", "Hello", "Bye", "\n\n42"), tokenizer, template)
    assert marked(encoded, tokenizer) == (
        "<|user|>Hi<|end|><|assistant|>[[Hello<|end|>]]<|user|>Bye<|end|><|assistant|>[[42<|end|>]]"
    )


PLAIN = [
    # prompt, completion, expected in a byte-level tokenizer without BOS
    ("Hi?", "Hello", "Hi?[[\nHello<|endoftext|>]]"),
    ("Hi? ", "42", "Hi? [[42<|endoftext|>]]"),
    ("Hi?", " 42", "Hi?[[ 42<|endoftext|>]]"),
    ("Hi?\n\n", "Hello", "Hi?\n\n[[Hello<|endoftext|>]]"),
    ("Hi?\n", "\nHello", "Hi?\n[[\nHello<|endoftext|>]]"),
]


@pytest.mark.parametrize(("prompt", "completion", "expected"), PLAIN)
def test_prompt_and_completion_are_kept_as_they_are(prompt, completion, expected, tokenizer):
    [encoded] = encode({"prompt": prompt, "completion": completion}, tokenizer, None)
    assert marked(encoded, tokenizer) == expected
    assert encoded.remarks == ((NEWLINE_ADDED,) if completion == "Hello" and prompt == "Hi?" else ())
    alone = tokenizer(prompt, add_special_tokens=False).input_ids
    assert encoded.input_ids[: len(alone)] == alone


@pytest.mark.parametrize(("prompt", "completion", "expected"), PLAIN)
def test_sentencepiece_gets_one_bos_and_no_spurious_spaces(prompt, completion, expected, sentencepiece):
    [encoded] = encode({"prompt": prompt, "completion": completion}, sentencepiece, None)
    expected = "<s> " + expected.replace("<|endoftext|>", "</s>")
    assert marked(encoded, sentencepiece) == expected
    alone = sentencepiece(prompt, add_special_tokens=False).input_ids
    assert encoded.input_ids[1 : len(alone) + 1] == alone


def test_a_token_is_cut_where_it_would_straddle_the_border(sentencepiece):
    """Jointly 'is 42' ends in one token for ' 42'; at inference the prompt has already given the space."""
    [encoded] = encode({"prompt": "is ", "completion": "42"}, sentencepiece, None)
    assert sentencepiece.convert_ids_to_tokens(encoded.input_ids) == ["<s>", "▁is", "▁", "42", "</s>"]


def test_a_completion_is_not_merged_with_what_it_is_tokenised_after():
    vocab = {text: i for i, text in enumerate(["H", "i", "4", "2", "\n", "a", "\n4", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "4")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    [encoded] = encode({"prompt": "Hi\n", "completion": "42"}, tokenizer, None)
    assert tokenizer.convert_ids_to_tokens(encoded.input_ids) == ["H", "i", "\n", "4", "2", "</s>"]


def test_added_tokens_that_are_normalised_do_not_part_a_text():
    """Such as older conversions of Llama's have: a space is put before the text around them, not after them."""
    tokenizer = sentencepiece_tokenizer("prepend")
    tokenizer.add_tokens([AddedToken("<|end|>", normalized=True)])
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    template += "{{ 'assistant:' if add_generation_prompt }}"
    messages = chat("Hi", "42", "Hi", "Hi")["messages"]
    [encoded] = encode({"messages": messages}, tokenizer, template)
    text = Template(template, tokenizer).render(messages, None)
    assert encoded.input_ids == tokenizer(text, add_special_tokens=False).input_ids
    assert marked(encoded, tokenizer) == " user:Hi<|end|>assistant:[[42<|end|>]]user:Hi<|end|>assistant:[[Hi<|end|>]]"


def test_a_completion_after_a_special_token_is_tokenised_like_the_whole(sentencepiece):
    [encoded] = encode({"prompt": "Hi</s>", "completion": " 42"}, sentencepiece, None)
    whole = sentencepiece("Hi</s> 42", add_special_tokens=False).input_ids
    assert encoded.input_ids[1:-1] == whole


def test_a_cut_in_one_turn_leaves_the_others_whole(sentencepiece):
    template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}a: {% endif %}"
    encoded = encode(chat("Hi", "42", "Hi", "Hi"), sentencepiece, template)
    text = marked(encoded, sentencepiece)
    space = " " if sentencepiece.backend_tokenizer.normalizer else ""  # which it puts after special tokens
    assert text == f" u: Hi</s>{space}a: [[42</s>]]{space}u: Hi</s>{space}a: [[Hi</s>]]"


def test_text_is_supervised_whole(tokenizer, sentencepiece):
    assert marked(encode({"text": "Hello there"}, tokenizer, None), tokenizer) == "[[Hello there<|endoftext|>]]"
    assert marked(encode({"text": "Hi"}, sentencepiece, None), sentencepiece) == "<s>[[ Hi</s>]]"


def test_bos_and_eos_in_the_text_are_not_doubled(sentencepiece):
    [encoded] = encode({"prompt": "<s>Hi\n", "completion": "42</s>"}, sentencepiece, None)
    assert encoded.input_ids.count(1) == 1 and encoded.input_ids.count(2) == 1
    assert encoded.weights[-1] == 1


def test_the_pad_id_of_an_eos_padded_tokenizer_is_still_supervised_at_the_end():
    tokenizer = byte_level_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert encode({"text": "Hi"}, tokenizer, None)[0].weights[-1] == 1


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="could not learn to stop"):
        encode({"text": "Hi"}, tokenizer, None)


def test_many_at_a_time_are_encoded_like_one_by_one(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    samples = [
        chat("Hi", "Hello"),
        {"text": "Hi"},
        chat("Hi", "42", "Bye", "Bye now"),
        {"prompt": "a ", "completion": "b"},
        {"input_ids": [1, 2]},
        chat("Hi", "Hello"),
    ]
    assert encode_all(samples, tokenizer, template) == [encode(sample, tokenizer, template) for sample in samples]


def test_a_refused_sample_leaves_the_others(tokenizer):
    results = encode_all([CASES["thoughts"], CASES["single"]], tokenizer, resolve_template(tokenizer, "chatml"))
    assert "reasoning_content" in results[0].found
    assert results[1] == encode(CASES["single"], tokenizer, resolve_template(tokenizer, "chatml"))


def test_the_date_is_the_same_on_every_day(tokenizer):
    template = template_of("granite", tokenizer)
    [encoded] = encode(CASES["single"], tokenizer, template)
    assert "Today is July 26, 2024." in marked(encoded, tokenizer) and encoded.remarks == (FIXED_DATE,)
    both = encode_all([CASES["single"], CASES["system"]], tokenizer, template)
    assert [[one.remarks for one in encoded] for encoded in both] == [[(FIXED_DATE,)], [()]]
