"""Samples as token ids: the prompt as at inference, one BOS, one EOS, and no token across a border."""

import re

import pytest
from data_helpers import (
    HEADER,
    SIMPLE,
    TEXTS,
    byte_level_tokenizer,
    chat,
    encode,
    marked,
    sentencepiece_tokenizer,
    template_of,
)
from tokenizers import AddedToken, processors

from kit.data.chat.shipped import fitting
from kit.data.chat.template import Template, resolve_template
from kit.data.chat.tokens import NEWLINE_ADDED, NO_BOS, Encoded, encode_all
from kit.data.samples.rows import as_chat
from kit.system.errors import Problem, UserError


def test_token_ids_are_taken_as_they_are(tokenizer):
    assert encode({"input_ids": [5, 6, 7]}, tokenizer, None) == [Encoded([5, 6, 7], [1.0, 1.0, 1.0])]
    labelled = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}
    assert encode(labelled, tokenizer, None, train_on="all") == [Encoded([5, 6, 7], [0.0, 1.0, 0.0])]


@pytest.mark.parametrize("shape", ["alpaca", "llama2", "zephyr"])
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


def test_prompt_and_completion_become_messages_with_chat_template(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    pair = {"prompt": "Hi", "completion": "Hello"}
    assert encode(as_chat(pair), tokenizer, template) == encode(chat("Hi", "Hello"), tokenizer, template)
    assert marked(encode(pair, tokenizer, template), tokenizer) == "Hi[[\nHello<|endoftext|>]]"


def test_no_template_is_refused_with_those_that_fit(tokenizer):
    with pytest.raises(UserError, match=re.escape(f"--chat_template {' | '.join(fitting(tokenizer))}")):
        encode(chat("Hi", "Hello"), tokenizer, None)


def test_two_bos_are_refused(tokenizer_with_bos):
    with pytest.raises(UserError, match=r"two BOS tokens \(<bos>\) at the start"):
        encode(chat("Hi", "Hello"), tokenizer_with_bos, "{{ bos_token }}<bos>" + HEADER + SIMPLE)
    with pytest.raises(UserError, match=r"two BOS tokens \(<bos>\) at the start"):
        encode(chat("Hi", "Hello", system="<bos>Be kind"), tokenizer_with_bos, template_of("deepseek", None))


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


def test_prompt_and_completion_are_kept_as_they_are(tokenizer, sentencepiece):
    """Also with SentencePiece, which gets one BOS and no spurious spaces."""
    for prompt, completion, expected in PLAIN:
        for one, bos, text in (
            (tokenizer, 0, expected),
            (sentencepiece, 1, "<s> " + expected.replace("<|endoftext|>", "</s>")),
        ):
            [encoded] = encode({"prompt": prompt, "completion": completion}, one, None)
            assert marked(encoded, one) == text
            assert encoded.remarks == ((NEWLINE_ADDED,) if (prompt, completion) == ("Hi?", "Hello") else ())
            alone = one(prompt, add_special_tokens=False).input_ids
            assert encoded.input_ids[bos : bos + len(alone)] == alone


def test_a_token_is_cut_where_it_would_straddle_the_border(sentencepiece):
    """Jointly 'is 42' ends in one token for ' 42'; at inference the prompt has already given the space."""
    [encoded] = encode({"prompt": "is ", "completion": "42"}, sentencepiece, None)
    assert sentencepiece.convert_ids_to_tokens(encoded.input_ids) == ["<s>", "▁is", "▁", "42", "</s>"]


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


def test_bos_and_eos_in_the_text_are_not_doubled(sentencepiece):
    [encoded] = encode({"prompt": "<s>Hi\n", "completion": "42</s>"}, sentencepiece, None)
    assert encoded.input_ids.count(1) == 1 and encoded.input_ids.count(2) == 1
    assert encoded.weights[-1] == 1


def test_samples_are_encoded_alike_together_and_one_by_one(tokenizer):
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


@pytest.mark.parametrize(
    ("shape", "limit"),
    [("qwen3", "turns.MAX_CHARACTERS"), ("qwen3", "conversation.MAX_RENDERED"), ("plain", "tokens.MAX_BEFORE")],
)
def test_a_conversation_that_would_take_too_long_is_refused(shape, limit, tokenizer, monkeypatch):
    sample = chat(*(f"text number {i}" for i in range(40)))
    template = template_of(shape, tokenizer)
    assert not isinstance(encode_all([sample], tokenizer, template)[0], Problem)
    monkeypatch.setattr(f"kit.data.chat.{limit}", 1000)
    (problem,) = encode_all([sample], tokenizer, template)
    assert isinstance(problem, Problem) and problem.fix == "split the conversation into several rows"
