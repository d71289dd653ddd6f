"""Finds the prompt that answers have in common, and the answers without it. Pure.

Data sets of preferences give the prompt in a column of its own, at the beginning of each answer, or in both places; as
text or as messages.

Promises:

- Each answer is the continuation of the same prompt. A row in which the prompts differ is a problem.
- Texts stay texts. They become messages only beside messages, or where the question is called ``instruction``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kit.data.chat.lists import are_printed_messages, explain_string, list_of, listed, system_message
from kit.data.chat.messages import SPEAKERS, Message, check_text, read_messages
from kit.errors import Problem, Problems, kind

# The turns of a conversation written as text, as in Anthropic's hh-rlhf.
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ASSISTANT = "\n\nAssistant:"


def answers_to_one_prompt(
    values: Mapping[str, Any], names: Sequence[str], problems: Problems
) -> dict[str, str | list[Message]]:
    """Return ``prompt``, and each of ``names`` as what follows it: all as lists of messages, or all as text.

    Args:
        values: of the row, by our names. ``instruction`` is a prompt that makes a chat of texts, and ``input`` is more
            text for it.
        names: the answers, such as ``chosen`` and ``rejected``.

    What is wrong is added to ``problems``, and then the result does not count.
    """
    prompt_name = "instruction" if "instruction" in values else "prompt"
    if "instruction" in values and "prompt" in values:
        problems.append(Problem("prompt and instruction", "two prompts", "one of them"))
    system = system_message(values, problems)
    prompt = _given(prompt_name, values.get(prompt_name), problems)
    if prompt_name in values and prompt is None:
        problems.append(Problem(prompt_name, "null", "a prompt in every row, or in none"))
    answers = {name: _given(name, values[name], problems) for name in names}
    if len({isinstance(answer, list) for answer in answers.values()}) > 1:
        found = ", ".join(f"{name} is {kind(answer)}" for name, answer in answers.items())
        problems.append(Problem(names[0], found, "two strings, or two lists of messages"))
    if problems:
        return {}
    are_texts = not isinstance(answers[names[0]], list)
    if are_texts:
        for name, answer in answers.items():
            problems += check_text(name, answer)
    if prompt is not None and not isinstance(prompt, list):
        problems += check_text(prompt_name, prompt)
    prompt = _with_input(prompt, values, problems)
    if problems:
        return {}
    if are_texts and "instruction" not in values and not isinstance(prompt, list):
        if system:
            found = f"given beside {' and '.join(names)} that are strings"
            problems.append(Problem("system", found, "the question in the field instruction, which makes a chat"))
        return _texts(prompt, answers, problems)
    conversations = {}
    for name, answer in answers.items():
        given = [{"role": "assistant", "content": answer}] if are_texts else answer
        conversations[name] = read_messages(name, given, problems, SPEAKERS)
    if isinstance(prompt, list):
        prompt = read_messages(prompt_name, prompt, problems, SPEAKERS, needs_answer=False)
    if problems:
        return {}
    before, conversations = _apart(prompt, conversations, problems)
    if system and before[:1] != system:
        if before and before[0]["role"] == "system":
            problems.append(Problem("system", "another one than the system message of the prompt", "one of them"))
        before = system + before
    return {"prompt": before, **conversations}


def _given(name: str, value: Any, problems: Problems) -> Any:
    """The value of a column: as a list if it is a message, or a JSON string of one or several; else as it is."""
    if isinstance(value, str):
        text = f"[{value}]" if value.lstrip().startswith("{") else value
        items = listed(text)
        if isinstance(items, list) and items and all(map(_is_message, items)):
            return list_of(name, text, problems)
        if are_printed_messages(value):
            problems.append(Problem(name, kind(value), "a string, or a list of messages"))
            explain_string(value, problems)
    return [value] if _is_message(value) else value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def _with_input(prompt: Any, values: Mapping[str, Any], problems: Problems) -> Any:
    """The prompt with the column ``input``, if that has text."""
    more = values.get("input")
    if more is None or more == "":
        return prompt
    problems += check_text("input", more, may_be_empty=True)
    if not isinstance(more, str) or not more.strip():
        return prompt
    if "instruction" not in values or not isinstance(prompt, str):
        found = "given beside an instruction that is a list" if "instruction" in values else "given without instruction"
        problems.append(Problem("input", found, "it as more text for an instruction that is a string"))
        return prompt
    return f"{prompt}\n\n{more}"


def _apart(
    prompt: list[Message] | str | None, conversations: dict[str, list[Message]], problems: Problems
) -> tuple[list[Message], dict[str, list[Message]]]:
    """Part conversations into the prompt and what follows it. ``prompt`` is None if it is only at their beginning."""
    first, *others = conversations.values()
    if isinstance(prompt, str):
        question = next((message["content"] for message in first if message["role"] == "user"), None)
        is_repeated = question is not None and question.strip() == prompt.strip()
        prompt = None if is_repeated else [{"role": "user", "content": prompt}]
    if prompt is None:
        prompt = first[: _num_shared(first, others)]
        if not prompt or prompt[-1]["role"] == "assistant":
            begins = {messages[0]["role"] for messages in conversations.values()}
            found = "the prompts differ" if prompt or begins != {"assistant"} else "no prompt before the answer"
            expected = "conversations that begin with the same prompt, or a column prompt"
            problems.append(Problem(" and ".join(conversations), found, expected))
            return [], conversations
    parted = {}
    for name, messages in conversations.items():
        rest = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
        if not rest or rest[0]["role"] != "assistant":
            at = f"{name}[{len(messages) - len(rest)}]" if rest else name
            found = f"a message of the {rest[0]['role']}: the prompts differ" if rest else "ends with the prompt"
            problems.append(Problem(at, found, "an answer to the prompt"))
        parted[name] = rest
    return prompt, parted


def _num_shared(first: list[Message], others: list[list[Message]]) -> int:
    """The number of messages before the answers: the same in all; of a single conversation, before its last answer."""
    if not others:
        return max(i for i, message in enumerate(first) if message["role"] == "assistant")
    return min(_num_alike(first, *others), *(len(each) - 1 for each in (first, *others)))


def _num_alike(first: Sequence[Any], *others: Sequence[Any]) -> int:
    """The number of items with which all sequences begin."""
    shortest = min(map(len, (first, *others)))
    pairs = (enumerate(zip(first, other, strict=False)) for other in others)
    return min((next((i for i, (one, two) in pair if one != two), shortest) for pair in pairs), default=shortest)


def _texts(prompt: str | None, answers: dict[str, str], problems: Problems) -> dict[str, str | list[Message]]:
    """The prompt and the answers as texts. Without ``prompt``, it is what the texts begin with."""
    if prompt is not None:
        # A transcript is no answer: where the answers begin with that of the prompt, it is there twice.
        repeats = is_transcript(prompt) and all(answer.startswith(prompt) for answer in answers.values())
        end = len(prompt) if repeats else 0
    else:
        first, *others = answers.values()
        shared = first[: _num_alike(first, *others)]
        if _ASSISTANT in shared:
            end = shared.rindex(_ASSISTANT) + len(_ASSISTANT)
        else:  # between two words; a single text shows no border
            end = max(shared.rfind(" "), shared.rfind("\n")) if len(answers) > 1 else 0
        prompt = shared[: max(end, 0)]
        if not prompt.strip():
            found = f"no prompt: {' and '.join(answers)} begin differently"
            if len(answers) == 1:
                found = f"no prompt: it has no turn {_ASSISTANT.strip()!r}"
            problems.append(Problem(" and ".join(answers), found, "a column prompt, or texts that begin with it"))
            return {}
    rest = {name: answer[end:] for name, answer in answers.items()}
    for name, text in rest.items():
        problems += check_text(name, text)
    return {"prompt": prompt, **rest}


def is_transcript(prompt: str) -> bool:
    """Whether a prompt is a conversation written as text, up to the turn of the assistant that is to be written."""
    turn = _TURN.search(prompt)
    return turn is not None and not prompt[: turn.start()].strip() and prompt.rstrip().endswith(_ASSISTANT)


def messages_of(prompt: str, answer: str) -> tuple[list[Message], list[Message]]:
    """Return the messages of a prompt that is a transcript, and those of its answer, which may have several turns.

    The content of a message is empty if the transcript has nothing there.
    """
    _, *parts = _TURN.split(prompt + answer)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(parts[0::2], parts[1::2], strict=True)
    ]
    num_before = len(_TURN.findall(prompt)) - 1  # its last turn is the one to be written
    return messages[:num_before], messages[num_before:]
