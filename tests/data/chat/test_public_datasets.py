"""Public data sets: rows in their documented columns work as they are or with a mapping.

The rows are our own; columns, keys and types are those of the data sets on the hub. Of each the test knows what is
learned from.
"""

import json
import re
from dataclasses import dataclass

import pytest
from data_helpers import byte_level_tokenizer, marked, open_all, write_table

from kit.data.chat.shipped import SHIPPED
from kit.data.chat.tokens import Encoded
from kit.errors import UserError

END = "<|im_end|>"
# As SmolLM3's: what other templates take from messages and tools comes in variables of its own.
WITH_VARIABLES = (
    "{% if custom_instructions %}<|im_start|>system\n{{ custom_instructions }}<|im_end|>\n{% endif %}"
    "{% for tool in (xml_tools or []) + (python_tools or []) %}{{ tool }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
QUESTION, ANSWER, LONGER_ANSWER = "What is 2 + 2?", "Four.", "Two and two are four."
THOUGHT = "Two twos. Let me count them with my fingers."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
CALL_AS_TEXT = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def role(name, content, **more):
    return {"role": name, "content": content, **more}


def said(speaker, value, **more):
    return {"from": speaker, "value": value, **more}


WRONG = "Five."
CONVERSATION = [said("human", QUESTION), said("gpt", ANSWER)]


@dataclass
class Case:
    """A data set.

    Attributes:
        rows: one to three of its rows.
        learned: of each sample, the texts that are learned, without the end of turn.
        shows: what the first sample has besides.
        flag: what to type as ``--dataset_columns``, without which it is refused; empty if it works as it is.
        objective: what is typed as ``--objective``. Of a pair, the rejected answer is learned from behind the chosen.
        template: its Jinja text.
    """

    rows: list
    learned: tuple = ((ANSWER,),)
    shows: tuple = (f"user\n{QUESTION}",)
    flag: str = ""
    objective: str = "sft"
    template: str = SHIPPED["chatml"].source


PAIR = ((ANSWER, WRONG),)
BRIEF = ("system\nBe brief.", f"user\n{QUESTION}")
OF_ORCA = {"system": "Be brief.", "question": QUESTION, "chosen": ANSWER, "rejected": WRONG}
CASES = {
    "databricks/databricks-dolly-15k": Case(
        [
            {"instruction": "Sum up.", "context": LONGER_ANSWER, "response": ANSWER, "category": "summarization"},
            {"instruction": QUESTION, "context": "", "response": ANSWER, "category": "open_qa"},
        ],
        learned=((ANSWER,), (ANSWER,)),
        shows=(f"user\nSum up.\n\n{LONGER_ANSWER}",),
        flag="instruction=instruction,context=input,response=output",
    ),
    "Intel/orca_dpo_pairs, pairs": Case(
        [OF_ORCA, {**OF_ORCA, "system": ""}],
        PAIR * 2,
        shows=BRIEF,
        flag="question=instruction",
        objective="dpo",
    ),
    "LLaMA-Factory's dpo_en_demo, pairs": Case(
        [
            *[{"conversations": CONVERSATION[:1], "chosen": said("gpt", ANSWER), "rejected": said("gpt", WRONG)}] * 2,
            {
                "conversations": [*CONVERSATION, said("human", "And 3 + 3?")],
                "chosen": said("gpt", "Six."),
                "rejected": said("gpt", "Seven."),
            },
        ],
        (*PAIR, *PAIR, ("Six.", "Seven.")),
        flag="conversations=prompt",
        objective="dpo",
    ),
    "HuggingFaceTB/smoltalk2": Case(
        [
            {
                "messages": [role("user", QUESTION), role("assistant", f"<think>\n{THOUGHT}\n</think>\n{ANSWER}")],
                "chat_template_kwargs": {
                    "custom_instructions": "Be brief.",
                    "enable_thinking": True,
                    "python_tools": [],
                    "xml_tools": [json.dumps(ADD)],
                },
                "source": "OpenThoughts3",
            }
        ],
        learned=((f"<think>\n{THOUGHT}\n</think>\n{ANSWER}",),),
        shows=("system\nBe brief.", "Adds two numbers.", f"user\n{QUESTION}"),
        template=WITH_VARIABLES,
    ),
    "Salesforce/APIGen-MT-5k": Case(
        [
            {
                "conversations": [
                    said("human", QUESTION),
                    said("function_call", json.dumps(CALL)),
                    said("observation", '{"sum": 4}'),
                    said("gpt", ANSWER),
                ],
                "tools": json.dumps([ADD]),
                "system": "Be brief.",
            }
        ],
        learned=((CALL_AS_TEXT, ANSWER),),
        shows=("system\nBe brief.", '"name": "add", "description"', f"user\n{QUESTION}", '{"sum": 4}'),
    ),
}


def read(train, i, tokenizer):
    """The texts of sample ``i`` that are learned, and all others as one string."""
    ids, weights = train[i]
    text = marked(Encoded(ids.tolist(), weights.tolist()), tokenizer)
    return re.findall(r"\[\[(.*?)\]\](?!\])", text, re.DOTALL), re.sub(r"\[\[.*?\]\](?!\])", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", CASES)
def test_a_public_data_set_is_read_as_it_is_or_with_its_mapping(name, tmp_path):
    case, tokenizer = CASES[name], byte_level_tokenizer()
    tokenizer.chat_template = case.template
    write_table(tmp_path / "train.parquet", case.rows)
    settings = {"dataset": "train.parquet", "max_length": 2000, "objective": case.objective}
    if case.flag:
        with pytest.raises(UserError):
            open_all(tokenizer, **settings)
        settings["dataset_columns"] = dict(pair.split("=") for pair in case.flag.split(","))
    data = open_all(tokenizer, **settings)
    samples = [read(data.train, i, tokenizer) for i in range(len(data.train))]
    learned = tuple(tuple(text.removesuffix(END) for text in texts) for texts, _ in samples)
    assert learned == case.learned
    assert all(text.endswith(END) for texts, _ in samples for text in texts)
    at = 0
    for text in case.shows:
        assert text in samples[0][1][at:]
        at = samples[0][1].index(text, at)
