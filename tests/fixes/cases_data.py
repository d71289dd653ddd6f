"""Fixes of the data: kit/data and `kit inspect`, `prepare`."""

import json
import re
import shlex
import subprocess
import sys

from fixes.harness import case

DAMAGE = "it is damage, or another machine's"
UNTYPED: dict[str, str] = {
    "kit/stores.py:open_filesystem#1": "installs a package",
    "kit/stores.py:open_filesystem#2": "needs a store: tests/data/read/test_remote.py has such addresses",
    **{
        f"kit/stores.py:problem_of#{i}": "rights, logins and networks: tests/test_stores.py raises each"
        for i in range(1, 6)
    },
    "kit/data/chat/fixes.py:Fixes.added#1": "says that no fix is known",
    "kit/data/chat/fixes.py:Fixes.added#4": "says that no fix is known",
    "kit/data/feed/lanes.py:SubStream._raise_if_bad": "of a run under way: tests/data/feed/test_stream.py types it",
    "kit/data/feed/stream.py:StreamFeed._raise_if_any": "copy the file of another machine",
    "kit/data/read/archives.py:_check_member": "an archive made to do harm is not to be used",
    "kit/data/read/hub.py:_other_commit": "needs the hub: tests/data/read/test_hub.py types it",
    "kit/data/read/hub.py:_choice#1": "needs the hub: tests/data/read/test_hub.py types it",
    "kit/data/read/hub.py:_choice#2": "needs the hub: tests/data/read/test_hub.py types it",
    "kit/data/read/remote.py:Remote._changed": "wait until nothing writes there",
    "kit/data/read/tables.py:num_parquet_rows": "write another file",
    "kit/data/samples/halves.py:joined": "write other rows: tests/data/samples/test_halves.py does",
    "kit/data/samples/tokenise.py:_make": "wait until nothing writes to the file",
    "kit/data/samples/tokenise.py:_encoded_by_workers": "a process that was killed for its memory",
    "kit/data/read/text.py:long_line": "write other rows",
    "kit/data/read/text.py:json_rows": "takes the place of a command that is not known: write the file anew",
    "kit/data/samples/tokenise.py:_Entry.add": "write other weights",
    "kit/data/read/sources.py:_parts_of": "save the document in another program",
    "kit/data/read/sources.py:_in_folder#1": "save the documents in another program",
    "kit/data/open.py:_check_ids": "another model",
    "kit/data/open.py:open_data": "an edit of the model's own files",
}
PAIRS = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(40)]
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHATS = [{"messages": [USER, {"role": "assistant", "content": f"Hello {i}"}]} for i in range(40)]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def rows(world, name, rows):
    world.write(name, *(json.dumps(row, ensure_ascii=False) for row in rows))
    return name


def template(world, text):
    """A model like that of the world, with another chat template; no template if the text is empty."""
    (world.folder / "own").mkdir()
    for path in (world.folder / "model").iterdir():
        if path.name != "chat_template.jinja":
            (world.folder / "own" / path.name).write_bytes(path.read_bytes())
    config = world.folder / "own/tokenizer_config.json"
    values = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
    config.write_text(json.dumps(values | ({"chat_template": text} if text else {})))
    return "--model_name_or_path own --max_length 512"


def shell(world, problem, command):
    """Type the command in backticks, then the flag after it, if there is one."""
    text, _, rest = problem.fix.removeprefix("`").partition("`")
    text = text.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(text, shell=True, check=True, cwd=world.folder)
    if not (flag := re.search(r"--(\w+) (\S+)", rest)):
        return command
    words = shlex.split(command)
    words[words.index(f"--{flag[1]}") + 1] = flag[2]
    return shlex.join(words)


def written(name, old, new):
    """An edit that replaces a text in a file."""

    def edit(world, problem, command):
        path = world.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        return command

    return edit


# --- kit/data/chat/columns.py


@case("kit/data/chat/columns.py:choose_fields#1")
def well_known_columns(world):
    return f"finetune --dataset {rows(world, 'qa.jsonl', PAIRS)}"


@case("kit/data/chat/columns.py:choose_fields#1")
def well_known_columns_beside_another_data_set(world):
    rows(world, "my data, v1.jsonl", PAIRS)
    return "finetune --dataset '[{path: \"my data, v1.jsonl\"}, chats.jsonl]'"


@case("kit/data/chat/columns.py:choose_fields#1")
def well_known_columns_to_evaluate_on(world):
    return f"finetune --dataset chats.jsonl --eval_dataset {rows(world, 'qa.jsonl', PAIRS)}"


@case("kit/data/chat/columns.py:choose_fields#1")
def names_that_say_nothing_and_need_quotes(world):
    renamed = [{"my question, long": row["question"], "it's=so": row["answer"]} for row in PAIRS]
    return f"finetune --dataset {rows(world, 'qa.jsonl', renamed)}"


OF_PAIRS = [{"prompt": row["question"], "chosen": row["answer"], "rejected": f"No. {i}"} for i, row in enumerate(PAIRS)]
OF_LABELS = [
    {"prompt": row["question"], "completion": row["answer"], "label": bool(i % 3)} for i, row in enumerate(PAIRS)
]


def renamed(rows, **names):
    """The rows with other names of columns."""
    return [{names.get(name, name): value for name, value in row.items()} for row in rows]


@case("kit/data/chat/columns.py:choose_fields#1", says="learns from both answers; or .* in better only")
def preferences_under_other_names(world):
    named = renamed(OF_PAIRS, prompt="question", chosen="better", rejected="worse")
    return f"finetune --dataset {rows(world, 'pairs.jsonl', named)}"


@case("kit/data/chat/columns.py:choose_fields#1", says="--objective dpo learns from both answers; or")
def preferences_without_an_objective(world):
    return f"finetune --dataset {rows(world, 'pairs.jsonl', OF_PAIRS)}"


@case("kit/data/chat/columns.py:choose_fields#1", says="as plain text with its question")
def transcripts_without_an_objective(world):
    asked = [f"\n\nHuman: {row['question']}\n\nAssistant:" for row in PAIRS]
    made = [{"chosen": f"{text} {i}", "rejected": f"{text} No."} for i, text in enumerate(asked)]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)}"


@case("kit/data/chat/columns.py:choose_fields#1", says="if response_b is the better one in some rows")
def preferences_whose_winner_stands_in_a_column(world):
    named = [row | {"winner": "a"} for row in renamed(OF_PAIRS, chosen="response_a", rejected="response_b")]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', named)}"


@case(
    "kit/data/chat/columns.py:choose_fields#1",
    says="--dataset_columns question=prompt,better=chosen,worse=rejected joi",
)
def pairs_under_other_names_for_an_objective(world):
    named = renamed(OF_PAIRS, prompt="question", chosen="better", rejected="worse")
    return f"finetune --dataset {rows(world, 'pairs.jsonl', named)} --objective simpo"


@case("kit/data/chat/columns.py:choose_fields#1", says="--objective sft learns the answers")
def conversations_for_an_objective_of_pairs(world):
    return "finetune --dataset chats.jsonl --objective dpo --eval_dataset chats.jsonl"


@case("kit/data/chat/columns.py:choose_fields#1", says="--objective kto learns from answers with a label")
def answers_with_a_label_for_an_objective_of_pairs(world):
    return f"finetune --dataset {rows(world, 'rated.jsonl', OF_LABELS)} --objective orpo"


@case("kit/data/chat/columns.py:choose_fields#1", says="learns from pairs of answers; or --objective sft")
def pairs_for_an_objective_of_labels(world):
    return f"finetune --dataset {rows(world, 'pairs.jsonl', renamed(OF_PAIRS, prompt='query'))} --objective kto"


@case("kit/data/chat/columns.py:choose_fields#1", says="--eval_dataset null --eval_split_size")
def conversations_to_evaluate_pairs_on(world):
    return f"finetune --dataset {rows(world, 'pairs.jsonl', OF_PAIRS)} --objective dpo --eval_dataset chats.jsonl"


@case("kit/data/chat/columns.py:choose_fields#1", says="--eval_dataset '.*learns the answers in chosen only")
def pairs_to_evaluate_conversations_on(world):
    return f"finetune --dataset chats.jsonl --eval_dataset {rows(world, 'pairs.jsonl', OF_PAIRS)}"


@case("kit/data/chat/columns.py:choose_fields#1", says="leaves it out: one objective learns from all data sets")
def conversations_beside_pairs(world):
    return f"finetune --dataset {rows(world, 'pairs.jsonl', OF_PAIRS)},chats.jsonl --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#1", says="learns the answers in chosen only")
def pairs_beside_conversations(world):
    return f"finetune --dataset chats.jsonl,{rows(world, 'pairs.jsonl', OF_PAIRS)}"


@case("kit/data/chat/columns.py:choose_fields#2")
def a_field_of_another_format(world):
    named = [row | {"more": "Think."} for row in PAIRS]
    mapping = "question=prompt,answer=completion,more=input"
    return f"finetune --dataset {rows(world, 'qa.jsonl', named)} --dataset_columns {mapping}"


@case("kit/data/chat/columns.py:choose_fields#3")
def a_format_that_does_not_fit_its_rows(world):
    made = [{"conversation": [{"input": "Hi", "output": f"Hello {i}"}]} for i in range(40)]
    return f"finetune --dataset {rows(world, 'turns.jsonl', made)} --dataset_columns conversation=messages"


@case("kit/data/chat/columns.py:choose_fields#3", says="--dataset_columns question=instruction")
def a_system_prompt_beside_pairs_of_texts(world):
    made = [row | {"system": "Be brief."} for row in renamed(OF_PAIRS, prompt="question")]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#3", says="takes instruction; or .* takes prompt")
def two_prompts(world):
    made = [row | {"instruction": "Add."} for row in OF_PAIRS]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#3", says="--dataset_columns conversations=prompt")
def single_messages_beside_a_conversation(world):
    made = [
        {"conversations": [USER], "chosen": ANSWER, "rejected": {"role": "assistant", "content": f"No {i}"}}
        for i in range(40)
    ]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#3", says="begin with the prompt: --dataset_columns prompt=ignore")
def a_prompt_in_another_form_beside_conversations(world):
    made = [
        {"prompt": f"user: Hi {i}", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": f"No {i}"}]}
        for i in range(40)
    ]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#4")
def a_question_beside_answers_that_begin_alike(world):
    made = [
        {"question": row["question"], "chosen": f"It is {i}.", "rejected": "It is not."} for i, row in enumerate(PAIRS)
    ]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case("kit/data/chat/columns.py:choose_fields#5")
def a_text_beside_questions(world):
    return f"finetune --dataset {rows(world, 'qa.jsonl', [row | {'text': 'A long text.'} for row in PAIRS])}"


@case("kit/data/chat/columns.py:_problems_of_mapping")
def a_column_and_a_field_with_a_slip(world):
    return f"finetune --dataset {rows(world, 'qa.jsonl', PAIRS)} --dataset_columns Question=prompt,answer=complettion"


@case("kit/data/chat/columns.py:_problems_of_mapping", says="--objective dpo")
def a_mapping_of_pairs_with_slips_that_cannot_be_corrected(world):
    named = renamed(OF_PAIRS, chosen="better", rejected="worse")
    return f"finetune --dataset {rows(world, 'pairs.jsonl', named)} --dataset_columns prompt=instruction,chosen=outptu"


@case("kit/data/chat/columns.py:_problems_of_mapping", says="did you mean")
def a_mapping_of_pairs_with_a_slip(world):
    named = renamed(OF_PAIRS, chosen="better", rejected="worse")
    mapping = "--dataset_columns beter=chosen,worse=rejectd"
    return f"finetune --dataset {rows(world, 'pairs.jsonl', named)} {mapping} --objective cpo"


@case("kit/data/chat/columns.py:_problems_of_mapping")
def a_mapping_the_other_way_round(world):
    return f"finetune --dataset {rows(world, 'qa.jsonl', PAIRS)} --dataset_columns prompt=question,completion=answer"


# --- kit/data/chat/fixes.py, template.py, turns.py, tokens.py


@case("kit/data/chat/fixes.py:Fixes.added#2")
@case("kit/data/chat/fixes.py:Fixes.added#3")
@case("kit/data/chat/fixes.py:Fixes.added#5")
def a_model_without_a_template(world):
    return f"finetune {template(world, '')}"


@case("kit/data/chat/fixes.py:Fixes.added#5", says="--chat_template chatml")
def calls_that_the_template_drops(world):
    made = [{"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": TOOLS} for _ in range(40)]
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    rows(world, "calls.jsonl", made)
    return f"finetune {template(world, plain)} --dataset calls.jsonl --new_tokens '<|x|>'"


@case("kit/data/chat/lists.py:explain_string", edit=lambda world, problem, command: printed_as_json(world, command))
def a_list_as_python_prints_it(world):
    return f"finetune --dataset {rows(world, 'printed.jsonl', [{'messages': str(row['messages'])} for row in CHATS])}"


def printed_as_json(world, command):
    rows(world, "printed.jsonl", [{"messages": json.dumps(row["messages"])} for row in CHATS])
    return command


@case("kit/data/chat/messages.py:_message", edit=written("chats2.jsonl", '"User"', '"user"'))
def a_role_with_a_capital(world):
    made = [{"messages": [USER | {"role": "User"}, ANSWER]} for _ in range(40)]
    return f"finetune --dataset {rows(world, 'chats2.jsonl', made)}"


@case("kit/data/chat/template.py:resolve_template", then="the tokenizer has no chat template")
def values_for_no_template(world):
    return f"finetune {template(world, '')} --chat_template_kwargs enable_thinking=false --dataset chats.jsonl"


@case("kit/data/chat/template.py:check_kwargs")
def a_variable_with_a_slip(world):
    text = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}{{ enable_thinking }}"
    text += "{% if add_generation_prompt %}assistant{% endif %}"
    return f"finetune {template(world, text)} --chat_template_kwargs enable_thinkin=false"


@case(
    "kit/data/chat/template.py:_find_template#1",
    edit=lambda world, problem, command: f"finetune --chat_template {world.write('chat.jinja', CHATML).name}",
)
def a_template_itself(world):
    return f"finetune --chat_template {shlex.quote(CHATML)}"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@case("kit/data/chat/template.py:_find_template#2")
def a_template_with_a_slip(world):
    return "finetune --chat_template chatm"


@case("kit/data/chat/template.py:_shipped_template")
def a_template_whose_tokens_are_not_there(world):
    return "finetune --chat_template llama3"


@case("kit/data/chat/template.py:_shipped_template")
def a_template_whose_tokens_no_adapter_of_the_run_trains(world):
    return "finetune --method lora --adapter_type oft --chat_template llama3"


@case("kit/data/chat/tokens.py:_Encoder.encode")
def tools_beside_strings(world):
    made = [{"q": row["question"], "a": row["answer"], "tools": TOOLS} for row in PAIRS]
    flags = "--dataset_columns q=prompt,a=completion --model_name_or_path model --max_length 512"
    return f"finetune --dataset {rows(world, 'tools.jsonl', made)} {flags}"


@case("kit/data/samples/rows.py:Encoder.encode#1")
def values_of_rows_that_the_template_never_reads(world):
    made = [row | {"chat_template_kwargs": {"xyzzy": 1}} for row in CHATS]
    return f"finetune --dataset {rows(world, 'kwargs.jsonl', made)}"


# --- kit/data/chat/unused.py


@case("kit/data/chat/unused.py:Unused._problem")
def images_beside_mapped_columns(world):
    made = [row | {"images": ["a.png"]} for row in PAIRS]
    return f"finetune --dataset {rows(world, 'qa.jsonl', made)} --dataset_columns question=instruction,answer=output"


@case("kit/data/chat/unused.py:Unused._problem")
def tools_under_another_name_beside_mapped_messages(world):
    made = [{"chat": row["messages"], "functions": TOOLS} for row in CHATS]
    mapping = "--dataset_columns chat=messages --chat_template chatml --model_name_or_path model --max_length 512"
    return f"finetune --dataset {rows(world, 'tools.jsonl', made)} {mapping}"


@case("kit/data/chat/unused.py:Unused._problem")
def images_in_one_of_two_data_sets(world):
    rows(world, "images.jsonl", [row | {"images": ["a.png"]} for row in CHATS])
    return "finetune --dataset chats.jsonl,images.jsonl"


@case("kit/data/chat/unused.py:Unused._problem", says="--objective kto learns from good and bad answers")
def answers_marked_as_bad(world):
    return f"finetune --dataset {rows(world, 'rated.jsonl', OF_LABELS)}"


@case("kit/data/chat/unused.py:Unused._problem", says="--objective kto --dataset_columns")
def conversations_marked_as_bad(world):
    made = [row | {"label": i > 3} for i, row in enumerate(CHATS)]
    return f"finetune --dataset {rows(world, 'rated.jsonl', made)}"


@case("kit/data/chat/unused.py:Unused._problem", says="--objective kto --dataset_columns .*completion=completion")
def answers_marked_as_bad_beside_mapped_columns(world):
    mapping = "--dataset_columns prompt=instruction,completion=output"
    return f"finetune --dataset {rows(world, 'rated.jsonl', OF_LABELS)} {mapping}"


@case("kit/data/chat/unused.py:Unused._problem", says="--dataset_columns prompt=instruction,context=input")
def more_text_beside_the_prompt_of_pairs(world):
    made = [row | {"context": "Numbers add up."} for row in OF_PAIRS]
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} --objective dpo"


@case(
    "kit/data/chat/unused.py:Unused._problem",
    edit=lambda world, problem, command: command + " " + problem.fix.rpartition("ignore it, ")[2],
)
def a_file_beside_a_question(world):
    made = [{"messages": [USER | {"file": "a.py"}, ANSWER]} for _ in range(40)]
    return f"finetune --dataset {rows(world, 'files.jsonl', made)}"


# --- kit/data/feed/subsets.py, kit/data/open.py, kit/data/samples


@case("kit/data/feed/subsets.py:without_repeats", edit=lambda world, problem, command: "finetune --dedup true")
def the_same_data_set_twice(world):
    world.write("b.jsonl", (world.folder / "chats.jsonl").read_text().rstrip())
    return "finetune --dataset chats.jsonl,b.jsonl --dedup true"


@case("kit/data/feed/subsets.py:limited_training", edit=lambda world, problem, command: with_value(problem, command))
def too_few_samples_for_three_data_sets(world):
    for name in "ab":
        rows(world, f"{name}.jsonl", CHATS[:2])
    return "finetune --dataset a.jsonl,chats.jsonl,b.jsonl --max_train_samples 1"


def with_value(problem, command):
    flag, value = re.search(r"--(\w+) (\d+)", problem.fix).groups()
    return re.sub(rf"--{flag} \S+", f"--{flag} {value}", command)


@case(
    "kit/data/feed/subsets.py:hold_out#1",
    edit=lambda world, problem, command: command.replace("--eval_split_size 0.5", "--eval_dataset chats.jsonl"),
)
def a_single_row_to_split(world):
    return f"finetune --dataset {rows(world, 'one.jsonl', CHATS[:1])} --eval_split_size 0.5"


@case("kit/data/feed/subsets.py:hold_out#2")
def a_share_of_few_rows(world):
    return f"finetune --dataset {rows(world, 'few.jsonl', CHATS[:20])} --eval_split_size 0.01"


@case("kit/data/feed/subsets.py:hold_out#3")
def a_share_that_takes_all_of_a_small_data_set(world):
    rows(world, "a.jsonl", CHATS[:1])
    return "finetune --dataset a.jsonl,chats.jsonl --eval_split_size 60"


@case("kit/data/open.py:_wording_problems")
def instructions_to_evaluate_on_in_other_words(world):
    for name in ("a.jsonl", "b.jsonl"):
        rows(world, name, [{"instruction": f"{name} {i}", "output": "an answer"} for i in range(9)])
    return "finetune --eval_dataset b.jsonl --dataset '[{path: a.jsonl, prompt_format: \"Q: {instruction}\"}]'"


@case("kit/data/open.py:_system_problems#1")
def a_system_prompt_before_text(world):
    rows(world, "a.jsonl", [{"text": "some text to learn"}] * 9)
    return "finetune --model_name_or_path model --dataset a.jsonl --system_prompt brief"


@case("kit/data/open.py:_system_problems#2")
def a_system_prompt_that_the_template_does_not_show(world):
    world.write(
        "mine.jinja",
        "{% for m in messages if m.role != 'system' %}{{ '<' + m.role + '>' }}{{ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    return "finetune --chat_template mine.jinja --system_prompt brief"


@case("kit/data/open.py:_check_masks", edit=lambda world, problem, command: f"{command} --train_on all")
def a_template_without_prompts(world):  # the template that the fix speaks of is the user's
    text = "{% for m in messages if m.role == 'assistant' %}{{ m.content + eos_token }}{% endfor %}"
    made = [{"messages": [ANSWER, {"role": "assistant", "content": f"Bye {i}"}]} for i in range(40)]
    rows(world, "answers.jsonl", made)
    return f"finetune {template(world, text)} --dataset answers.jsonl"


@case("kit/data/open.py:_other_columns")
def a_folder_of_two_formats(world):
    rows(world, "two/a.jsonl", CHATS)
    world.write("two/b 1.csv", "question,answer", *(f"{row['question']},{row['answer']}" for row in PAIRS))
    return "finetune --dataset two"


@case("kit/data/samples/dataset.py:_open_dataset#2")
def a_wording_of_rows_without_an_instruction(world):
    wording = '[{path: chats.jsonl, prompt_format: "{instruction}"}]'
    return f"finetune --model_name_or_path model --max_length 512 --dataset {shlex.quote(wording)}"


@case("kit/data/samples/dataset.py:Dataset.problems_of_texts")
def a_text_to_replace_that_is_mistyped(world):
    texts = '[{path: chats.jsonl, replace: {"{{NAM}}": Rob, Hi: Hello}}]'
    return f"finetune --model_name_or_path model --max_length 512 --dataset {shlex.quote(texts)}"


@case("kit/data/samples/dataset.py:_open_dataset#1", edit=shell)
def rows_inside_of_an_object(world):
    chats = [{"prompt": row["question"], "completion": row["answer"]} for row in PAIRS]
    world.write("wrapped.json", json.dumps({"version": 1, "data": chats}))
    return "finetune --dataset wrapped.json"


@case("kit/data/samples/rows.py:Encoder.encode#2")
def samples_that_are_too_long(world):
    long = {"messages": [USER, {"role": "assistant", "content": "word " * 90}]}
    rows(world, "a.jsonl", [*CHATS, long])
    return "finetune --model_name_or_path model --dataset a.jsonl --max_length 64 --excess_length_strategy error"


@case("kit/data/open.py:_format_problems")
def conversations_that_would_be_split(world):
    return "finetune --model_name_or_path model --max_length 256 --excess_length_strategy split"


@case("kit/data/samples/rows.py:Encoder.encode#1", says="learns the rows without it")
def tools_beside_pairs_of_texts(world):
    made = [row | {"tools": TOOLS} for row in OF_PAIRS]
    flags = "--model_name_or_path model --max_length 512 --objective dpo"
    return f"finetune --dataset {rows(world, 'pairs.jsonl', made)} {flags}"


@case("kit/data/samples/rows.py:Encoder.encode#2")
def pairs_that_are_too_long(world):
    rows(world, "a.jsonl", [*OF_PAIRS, {"prompt": "word " * 90, "chosen": "a", "rejected": "b"}])
    flags = "--max_length 64 --excess_length_strategy error --objective dpo"
    return f"finetune --model_name_or_path model --dataset a.jsonl {flags}"


@case("kit/data/samples/tokenise.py:_Entry._problems_without_samples", says="leave room for a prompt within max_length")
def a_length_that_holds_no_pair(world):
    made = [row | {"chosen": "word " * 20} for row in OF_PAIRS]
    flags = "--max_length 16 --objective dpo"
    return f"finetune --model_name_or_path model --dataset {rows(world, 'pairs.jsonl', made)} {flags}"


@case("kit/data/samples/tokenise.py:_Entry._problems_without_samples", says="max_length")
def a_length_that_holds_no_answer(world):
    return "finetune --model_name_or_path model --max_length 8"


# --- kit/data/read


@case("kit/data/read/cells.py:csv_rows", edit=shell)
def lines_of_an_old_mac(world):
    (world.folder / "a b.csv").write_bytes(b"prompt,completion\r" + b"Hi,Hello\r" * 9)
    return "finetune --dataset 'a b.csv'"


@case("kit/data/read/cells.py:_check_header#1", edit=written("a.csv", "My table,,\n", ""))
def a_title_above_the_header(world):
    world.write("a.csv", "My table,,", "prompt,completion,id", *["Hi,Hello,3"] * 9)
    return "finetune --dataset a.csv"


@case("kit/data/read/cells.py:_check_header#2", edit=shell)
def two_columns_with_one_name(world):
    world.write("a.csv", "prompt,completion,id,id", *["Hi,Hello,3,4"] * 9)
    return "finetune --dataset a.csv"


@case("kit/data/read/hub.py:_no_split")
def a_saved_data_set_with_other_splits(world):
    import datasets

    saved = datasets.Dataset.from_list(CHATS)
    datasets.DatasetDict(training=saved, test=saved).save_to_disk(str(world.folder / "saved"))
    return "finetune --dataset saved"


@case("kit/data/read/sources.py:open_source#1")
def a_revision_of_a_file(world):
    return "finetune --dataset chats.jsonl --dataset_revision main"


@case("kit/data/read/sources.py:open_source#2")
def a_slice_of_a_stream(world):
    return "finetune --dataset chats.jsonl --streaming --max_steps 5 --dataset_split 'train[:10]'"


@case(
    "kit/data/read/sources.py:_one_config",
    then="openai/gsm8k",  # there is no hub here
    edit=lambda world, problem, command: command.replace("gsm8k:main", "gsm8k"),
)
def two_configs(world):
    return "finetune --dataset openai/gsm8k:main --dataset_config socratic"


@case("kit/data/read/sources.py:_find_files")
def a_file_with_a_slip(world):
    return "finetune --dataset chat.jsonl"


@case(
    "kit/data/read/sources.py:_in_folder#2",
    edit=lambda world, problem, _: "finetune --dataset " + shlex.quote(re.search('"(.*?)"', problem.fix)[1]),
)
def files_of_which_some_name_a_split(world):
    rows(world, "data/train.jsonl", CHATS)
    rows(world, "data/more.jsonl", CHATS)
    return "finetune --dataset data"


@case("kit/data/read/sources.py:_in_folder#3")
def a_folder_without_that_split(world):
    rows(world, "data/training.jsonl", CHATS)
    rows(world, "data/test.jsonl", CHATS)
    return "finetune --dataset data"


@case(
    "kit/data/read/sources.py:_check_links",
    edit=lambda world, problem, _: "finetune --dataset " + shlex.quote(re.search('"(.*?)"', problem.fix)[1]),
)
def a_link_out_of_a_folder(world):
    rows(world, "data/a.jsonl", CHATS)
    (world.folder / "data/b.jsonl").symlink_to(world.folder / "chats.jsonl")
    return "finetune --dataset data"


@case("kit/data/read/sources.py:_part", edit=shell)
def a_table_in_utf16(world):
    cells = "prompt\tcompletion\n" + "Hi größer\tHello\n" * 9
    (world.folder / "a.csv").write_bytes(cells.encode("utf-16"))
    return "finetune --dataset a.csv"


@case("kit/data/read/sources.py:_columns", edit=shell)
def objects_over_several_lines(world):
    world.write("a.json", *(json.dumps(row, indent=2) for row in CHATS))
    return "finetune --dataset a.json"


@case("kit/data/read/sources.py:shown#1", edit=written("a.json", "]]", "]"))
def a_json_array_with_a_mistake(world):
    world.write("a.json", json.dumps(CHATS) + "]")
    return "finetune --dataset a.json"


@case("kit/data/read/sources.py:shown#2", edit=shell)
def a_table_with_semicolons_in_latin_1(world):
    cells = "prompt;completion\n" + "größer;ja, schöner\n" * 30
    (world.folder / "a.csv").write_bytes(cells.encode("cp1252"))
    return "finetune --dataset a.csv"


@case("kit/data/read/sources.py:shown#3", says="on_bad_row skip")
def some_bad_lines_of_many(world):
    world.write("a.jsonl", *[json.dumps(row) for row in CHATS * 4], *["}"] * 12)
    return "finetune --dataset a.jsonl"


@case("kit/data/read/sources.py:shown#4", says="on_bad_row skip")
def one_bad_line(world):
    world.write("a.jsonl", *[json.dumps(row) for row in CHATS], "}")
    return "finetune --dataset a.jsonl"
