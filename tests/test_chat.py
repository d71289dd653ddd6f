"""Masks against renderings written by hand: ``[[`` and ``]]`` enclose what is supervised."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.chat import NEWLINE_ADDED, NO_END_OF_TURN, REQUIRED_TOKENS, encode, encode_all, resolve_template
from kit.errors import UserError

CORPUS = [
    "Hello there, how are you?\n\n",
    "I am well. Hello Hello Hi Hi",
    "user assistant system\n\n",
    "Bye now Bye now 42 42 42 the answer is 42\n\n",
] * 4
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"]
SPECIAL += ["<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]"]


def byte_level_tokenizer(special=tuple(SPECIAL), **tokens):
    """Like GPT-2's: no prefix space, no BOS unless given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", *tokens.values(), *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<|endoftext|>", **tokens})


def sentencepiece_tokenizer(kind, special=()):
    """Like Llama 2's: a space is put before the text, at its start only (metaspace) or after special tokens too."""
    names = ["<unk>", "<s>", "</s>"]
    pieces = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "4"), ("4", "2"), ("▁", "42"), ("▁", "H"), ("▁H", "i"), ("H", "i"), ("▁", "i"), ("▁i", "s")]
    pieces += [a + b for a, b in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in [*names, *special]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def tokenizer_with_bos():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(scope="module", params=["metaspace", "prepend"])
def sentencepiece(request):
    return sentencepiece_tokenizer(request.param)


def marked(encoded, tokenizer):
    """The tokens as text, with ``[[ ]]`` around supervised runs."""
    assert len(encoded.input_ids) == len(encoded.mask)
    text, inside = "", 0
    for id_, supervised in zip(encoded.input_ids, encoded.mask, strict=True):
        text += "[[" * (supervised > inside) + "]]" * (inside > supervised)
        text += tokenizer.convert_ids_to_tokens(id_)
        inside = supervised
    return text.replace("Ġ", " ").replace("Ċ", "\n").replace("▁", " ").replace("<0x0A>", "\n") + "]]" * inside


def chat(*contents, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    roles = ["user", "assistant"] * len(contents)
    return {"messages": messages + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


GOLDEN = {
    "chatml": "<|im_start|>system\nBe kind<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello<|im_end|>]]\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[Bye now<|im_end|>]]\n",
    "gemma": "<bos><start_of_turn>user\nBe kind\n\nHi<end_of_turn>\n<start_of_turn>model\n[[Hello<end_of_turn>]]\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n[[Bye now<end_of_turn>]]\n",
    "llama2": "<bos>[INST] <<SYS>>\nBe kind\n<</SYS>>\n\nHi [/INST][[ Hello <|endoftext|>]]"
    "<bos>[INST] Bye [/INST][[ Bye now <|endoftext|>]]",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>\n\nBe kind<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[Bye now<|eot_id|>]]",
    "mistral": "<bos>[INST] Be kind\n\nHi[/INST][[ Hello<|endoftext|>]][INST] Bye[/INST][[ Bye now<|endoftext|>]]",
    "phi3": "<|system|>\nBe kind<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[[Hello<|end|>]]\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n[[Bye now<|end|>]]\n",
    "zephyr": "<|system|>\nBe kind<|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\n[[Hello<|endoftext|>]]\n"
    "<|user|>\nBye<|endoftext|>\n<|assistant|>\n[[Bye now<|endoftext|>]]\n",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_several_turns_with_a_system_message(name, tokenizer_with_bos):
    template = resolve_template(tokenizer_with_bos, name)
    sample = chat("Hi", "Hello", "Bye", "Bye now", system="Be kind")
    encoded = encode(sample, tokenizer_with_bos, template)
    assert marked(encoded, tokenizer_with_bos) == GOLDEN[name]
    assert encoded.remarks == ()


@pytest.mark.parametrize("name", GOLDEN)
def test_the_prompt_is_tokenised_as_at_inference(name, tokenizer_with_bos):
    template = resolve_template(tokenizer_with_bos, name)
    sample = chat("Hi", "42 42", system="Be kind")
    prompt = tokenizer_with_bos.apply_chat_template(
        sample["messages"][:-1], chat_template=template, add_generation_prompt=True, return_dict=False
    )
    encoded = encode(sample, tokenizer_with_bos, template)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_every_named_template_has_its_file_and_a_golden_mask():
    assert set(GOLDEN) == set(REQUIRED_TOKENS)


def test_messages_after_the_last_answer_are_left_out(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    assert encode(chat("Hi", "Hello", "Bye"), tokenizer, template) == encode(chat("Hi", "Hello"), tokenizer, template)


def test_an_answer_that_names_the_end_of_turn_is_supervised_to_its_real_end(tokenizer):
    encoded = encode(chat("Hi", "a<|im_end|>b"), tokenizer, resolve_template(tokenizer, "chatml"))
    assert marked(encoded, tokenizer).endswith("assistant\n[[a<|im_end|>b<|im_end|>]]\n")


def test_of_a_prompt_in_messages_no_answer_is_supervised(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    messages = chat("Hi", "Hello", "Bye", "Bye now")["messages"]
    encoded = encode({"prompt": messages[:3], "completion": messages[3:]}, tokenizer, template)
    assert marked(encoded, tokenizer).count("[[") == 1
    assert marked(encoded, tokenizer).endswith("[[Bye now<|im_end|>]]\n")
    generation = template.replace("{{-", "{%- generation -%}{{-").replace("-}}", "-}}{%- endgeneration -%}")
    encoded = encode({"prompt": messages[:3], "completion": messages[3:]}, tokenizer, generation)
    assert marked(encoded, tokenizer).endswith("[[Bye now<|im_end|>]]\n")
    assert marked(encoded, tokenizer).count("[[") == 1


def test_texts_become_messages_when_a_template_is_asked_for(tokenizer):
    template = resolve_template(tokenizer, "chatml")
    pair = {"prompt": "Hi", "completion": "Hello"}
    assert encode(pair, tokenizer, template, prompts_as_chat=True) == encode(chat("Hi", "Hello"), tokenizer, template)
    assert marked(encode(pair, tokenizer, template), tokenizer) == "Hi[[\nHello<|endoftext|>]]"


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


def test_an_end_marker_of_the_whole_conversation_is_not_part_of_a_turn(tokenizer):
    template = HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT
    template += "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    encoded = encode(chat("Hi", "Hello", "Bye", "42"), tokenizer, template)
    assert marked(encoded, tokenizer).endswith("[[42<|im_end|>]]\n<|endoftext|>")
    assert "[[Hello<|im_end|>]]\n<|im_start|>user" in marked(encoded, tokenizer)


def test_an_answer_that_the_template_rewrites_is_not_looked_for_in_later_messages(tokenizer):
    body = "{{ 'an answer' if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n{% endfor %}"
    encoded = encode(chat("Hi", "Bye", "Bye", "42"), tokenizer, HEADER + body + PROMPT)
    text = marked(encoded, tokenizer)
    assert text.count("assistant\n[[an answer<|im_end|>]]\n") == 2 and text.count("[[") == 2


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages | length }}\n" + HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT, "inference"),
        (
            HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT + "{{ '<think>' if add_generation_prompt }}",
            "think",
        ),
        (HEADER + "{{ 'An' if loop.last else 'The' }} answer<|im_end|>\n{% endfor %}", "inference"),
        (
            HEADER + "{{ ('An' if loop.last else 'The') if m['role'] == 'assistant' else m['content'] }}<|im_end|>\n"
            "{% endfor %}" + PROMPT,
            "rendered differently once more messages follow .'The<.*instead of 'An<",
        ),
        ("{{ raise_exception('no system message, please') }}", "no system message, please"),
        ("{{ nowhere.to.be.found }}", "undefined"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}", "mark nothing"),
    ],
)
def test_a_template_whose_renderings_do_not_fit_together_is_refused(template, reason, tokenizer):
    with pytest.raises(UserError, match=reason):
        encode(chat("Hi", "Hello", "Bye", "Bye now"), tokenizer, template)


def test_a_template_without_an_end_of_turn_is_remarked_on(tokenizer):
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    encoded = encode(chat("Hi", "Hello", "Bye", "42"), tokenizer, template)
    assert encoded.remarks == (NO_END_OF_TURN,)
    assert marked(encoded, tokenizer) == "user: Hi\n\nassistant:[[ Hello\n\n]]user: Bye\n\nassistant:[[ 42\n\n]]"


def test_no_template_is_refused_with_those_that_fit(sentencepiece):
    with pytest.raises(UserError, match=r"--chat_template llama2 \| zephyr, which fit"):
        encode(chat("Hi", "Hello"), sentencepiece, resolve_template(sentencepiece, None))


def test_resolve_template(tmp_path, tokenizer, sentencepiece):
    assert resolve_template(tokenizer, None) is None
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "broken.jinja").write_text("\n{% for %}")
    assert resolve_template(tokenizer, str(tmp_path / "own.jinja")) == "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match=r"broken.jinja:2: not a Jinja template"):
        resolve_template(tokenizer, str(tmp_path / "broken.jinja"))
    with pytest.raises(UserError, match="did you mean 'chatml'"):
        resolve_template(tokenizer, "chatlm")
    with pytest.raises(
        UserError, match=r"'chatml' needs <\|im_start\|>, <\|im_end\|>, which the tokenizer would split"
    ):
        resolve_template(sentencepiece, "chatml")


@pytest.mark.parametrize("value", ["{{ bos_token }}" * 500, "{% for m in messages %}{% endfor %}"])
def test_a_template_given_inline_belongs_in_a_file(value, tokenizer):
    with pytest.raises(UserError, match=r"the template itself; expected a file.*\n.*put the template in a file"):
        resolve_template(tokenizer, value)


def test_a_template_name_longer_than_any_file_name_is_no_template(tokenizer):
    with pytest.raises(UserError, match=r"no template 'xxxx.*; expected a file, or one of chatml") as caught:
        resolve_template(tokenizer, "x" * 5000)
    assert len(str(caught.value)) < 300


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
    encoded = encode({"prompt": prompt, "completion": completion}, tokenizer, None)
    assert marked(encoded, tokenizer) == expected
    assert encoded.remarks == ((NEWLINE_ADDED,) if completion == "Hello" and prompt == "Hi?" else ())
    alone = tokenizer(prompt, add_special_tokens=False).input_ids
    assert encoded.input_ids[: len(alone)] == alone


@pytest.mark.parametrize(("prompt", "completion", "expected"), PLAIN)
def test_sentencepiece_gets_one_bos_and_no_spurious_spaces(prompt, completion, expected, sentencepiece):
    encoded = encode({"prompt": prompt, "completion": completion}, sentencepiece, None)
    expected = "<s> " + expected.replace("<|endoftext|>", "</s>")
    assert marked(encoded, sentencepiece) == expected
    alone = sentencepiece(prompt, add_special_tokens=False).input_ids
    assert encoded.input_ids[1 : len(alone) + 1] == alone


def test_a_token_is_cut_where_it_would_straddle_the_border(sentencepiece):
    """Jointly 'is 42' ends in one token for ' 42'; at inference the prompt has already given the space."""
    ids = encode({"prompt": "is ", "completion": "42"}, sentencepiece, None).input_ids
    assert sentencepiece.convert_ids_to_tokens(ids) == ["<s>", "▁is", "▁", "42", "</s>"]


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
    encoded = encode({"prompt": "<s>Hi\n", "completion": "42</s>"}, sentencepiece, None)
    assert encoded.input_ids.count(1) == 1 and encoded.input_ids.count(2) == 1
    assert encoded.mask[-1] == 1


def test_the_pad_id_of_an_eos_padded_tokenizer_is_still_supervised_at_the_end():
    tokenizer = byte_level_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert encode({"text": "Hi"}, tokenizer, None).mask[-1] == 1


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
    ]
    assert encode_all(samples, tokenizer, template) == [encode(sample, tokenizer, template) for sample in samples]
