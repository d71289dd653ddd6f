"""Small tokenizers, chats, and datasets on disk in every kind of file, opened as a run opens them."""

import bz2
import gzip
import json
import lzma
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.config.recipe import Recipe
from kit.data.chat.formats import to_sample
from kit.data.chat.shipped import SHIPPED
from kit.data.chat.template import resolve_template
from kit.data.chat.tokens import encode_all
from kit.data.chat.unused import Unused
from kit.data.kinds.answers import AnswerRows
from kit.data.kinds.columns import choose_fields
from kit.data.kinds.kinds import KINDS, kind_of
from kit.data.open import open_data
from kit.data.read.sources import open_source, read_rows
from kit.data.samples.dataset import open_datasets
from kit.system.errors import Problem, UserError

VOCAB_SIZE = 1000
# Chat templates, and by hand what of their texts is learned.
GOLDEN = Path(__file__).parent / "data/chat/golden"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}, "id": "call00001"}
CORPUS = [
    "Hello there, how are you?\n\n",
    "I am well. Hello Hello Hi Hi",
    "user assistant system\n\n",
    "Bye now Bye now 42 42 42 the answer is 42\n\n",
] * 4
SPECIAL = """
<|im_start|> <|im_end|> <|im_sep|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn>
<|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|> <|tool_call|> <|/tool_call|> <think> </think> <tool_call>
</tool_call> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <|User|>
<|Assistant|> <|end_of_sentence|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|>
<|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|start_of_role|> <|end_of_role|> <|end_of_text|> <|start|>
<|message|> <|channel|> <|return|>
""".split()
TOKENS_OF_TEMPLATES = [
    token for template in SHIPPED.values() for token in template.tokens if not token.endswith("_token")
]
SPECIAL = list(dict.fromkeys([*SPECIAL, *TOKENS_OF_TEMPLATES]))


def byte_level_tokenizer(special=tuple(SPECIAL), **tokens):
    """Like GPT-2's: no prefix space, no BOS unless given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", *tokens.values(), *special]
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(names),
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
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


def chat(*contents, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    roles = ["user", "assistant"] * len(contents)
    return {"messages": messages + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def recipe(**changes):
    # One process: threads of feeds that other tests have left may hold locks, which a forked process would wait for.
    return Recipe(**{"model_name_or_path": "model", "dataset": "train.jsonl", "dataset_num_proc": 1, **changes})


def open_all(tokenizer, vocab_size=VOCAB_SIZE, tools=(), **changes):
    return open_recipe_data(recipe(**changes), tokenizer, vocab_size, tools=tools)


def open_recipe_datasets(settings):
    return open_datasets(
        settings.dataset_entries, settings.eval_dataset_entries, settings.streaming, KINDS[settings.declared.rows]
    )


def open_recipe_data(settings, tokenizer, vocab_size=VOCAB_SIZE, datasets=None, tools=()):
    """The data of a whole recipe, of ``datasets`` that were opened before, or else now."""
    return open_data(
        settings,
        open_recipe_datasets(settings) if datasets is None else datasets,
        tokenizer,
        vocab_size,
        eval_settings=settings,
        seed=settings.seed,
        global_batch_size=settings.global_batch_size // settings.answers_per_prompt,
        kind=kind_of(settings),
        rollout_steps=settings.num_iterations if settings.rolls_out else 0,
        tools=tools,
    )


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def pairs(num, word="a"):
    """Of ever different length."""
    return [{"prompt": f"Q{i} ", "completion": f"{word} " * (1 + i * 7 % 11) + str(i)} for i in range(num)]


def preference_pairs(num, word="a"):
    """Pairs of answers of ever different length; now the chosen one is longer, now the rejected one."""
    rows = []
    for i in range(num):
        short, long = f"{i}", f"{word} " * (1 + i * 7 % 11) + str(i)
        chosen, rejected = (long, short) if i % 2 else (short, long)
        rows.append({"prompt": f"Q{i} ", "chosen": f"{chosen} good", "rejected": f"{rejected} bad"})
    return rows


def rated_answers(num):
    """Answers with a label, of ever different length; every third one is bad."""
    return [
        {"prompt": f"Q{i} " * (1 + i % 3), "completion": f"A{i}" + " a" * (i * 7 % 11), "label": i % 3 > 0}
        for i in range(num)
    ]


ROWS = {"sft": pairs, "dpo": preference_pairs, "kto": rated_answers}  # by objective


def source_of(name, split="train", **options):
    """The dataset called ``name``, opened."""
    return open_source(str(name), split, "dataset", **options)


def rows_of(source, columns=None):
    """(number, content) of every row; the content is a dict, a Problem, or None for a blank line."""
    return [(number, row) for _, number, row in read_rows(source.parts, columns)]


def contents(source, columns=None):
    """Every row, without its number."""
    return [row for _, row in rows_of(source, columns)]


def problems(source):
    """The problems of the rows that cannot be used, as strings."""
    return [str(row) for row in contents(source) if isinstance(row, Problem)]


def refused(name, split="train", **options):
    """The message with which ``name`` cannot be opened."""
    with pytest.raises(UserError) as caught:
        source_of(name, split, **options)
    return str(caught.value)


def text_rows(num, first=0):
    return [{"text": f"ü {i}", "n": i} for i in range(first, first + num)]


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def cells(rows, delimiter=","):
    return "".join(f"{delimiter.join(map(str, row))}\n" for row in rows).encode()


def zst(content):
    import pyarrow

    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zst}


def write_table(path, rows):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        make = pyarrow.ipc.new_file if "file" in path.stem else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table)


def write_any(name, rows):
    """Write ``rows`` as the kind of file that ``name`` says."""
    path = Path(name)
    if path.suffix in (".parquet", ".arrow"):
        write_table(path, rows)
    else:
        kind = path.suffixes[0]
        if kind == ".json":
            content = json.dumps(rows, indent=2).encode()
        elif kind in (".csv", ".tsv"):
            delimiter = "," if kind == ".csv" else "\t"
            content = cells([("text", "n"), *((row["text"], row["n"]) for row in rows)], delimiter)
        else:
            content = json_lines(rows)
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))


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


def encode(sample, tokenizer, template, train_on="assistant"):
    """What one sample becomes. Raises ``UserError`` if it must be refused."""
    (result,) = encode_all([sample], tokenizer, template, train_on)
    if isinstance(result, Problem):
        raise UserError(result)
    return result


def template_of(shape, tokenizer):
    return resolve_template(tokenizer, shape if shape in SHIPPED else str(GOLDEN / f"{shape}.jinja"))


# Conversations that every chat template is tried with.
CHATS = {
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


# Contents of messages that tokenizers and templates may trip over.
TEXTS = ["Hi", "42", " Hello\n", "\n\nBye now", "é ∑", "a  b", "{}", 'say "x"', "Hello there, how are you?", "1.", "-"]


# Parts of chat templates.
HEADER = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SIMPLE = "{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
# A user's tool, and calls as chatml writes them.
ADDER = '''
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''
WRITTEN = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
ADD, COUNT = WRITTEN.format("add", '{"a": 1, "b": 2}'), WRITTEN.format("count", "{}")


def sample_of(row, **mapping):
    """The sample that ``row`` becomes, or its problems. ``mapping``: our field to their column."""
    return made(row, {theirs: ours for ours, theirs in mapping.items()})


def made(row, mapping=None, kind=AnswerRows):
    """The sample that ``row`` becomes with a mapping, their column to our field."""
    return converted(row, choose_fields(row, mapping or {}, "train.jsonl", kind=kind), kind=kind)


def converted(row, fields, *prompt_format, kind=AnswerRows):
    """The sample that ``row`` becomes, or its problems, with ``fields`` that were chosen for its dataset."""
    return to_sample(row, fields, kind.format_of(fields), *prompt_format)


def unused_of(row, mapping, kind=AnswerRows):
    """The columns and keys of rows that no format reads."""
    fields = choose_fields(row, mapping, "train.jsonl", kind=kind)
    ignored = [theirs for theirs, ours in mapping.items() if ours == "ignore"]
    return Unused(kind.format_of(fields), fields, ignored, kind.is_demonstration)


def problems_of(row):
    """The problems of a row, as one string."""
    problems = sample_of(row)
    assert isinstance(problems, list), f"taken for {problems}"
    return "\n".join(map(str, problems))
