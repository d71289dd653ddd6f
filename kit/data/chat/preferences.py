"""Finds the prompt that answers have in common, and the answers without it. Pure.

Data sets of preferences give the prompt in a column of its own, at the beginning of each answer, or in both places; as
text or as messages.

Promise: each answer is the continuation of the same prompt. A row in which the prompts differ is a problem.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from kit.data.chat.lists import explain_string, list_of, system_message
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
        values: of the row, by our names; ``instruction`` is a prompt that makes a chat of texts, as ``system`` does.
        names: the answers, such as ``chosen`` and ``rejected``.

    What is wrong is added to ``problems``, and then the result does not count.
    """
    system = system_message(values, problems)
    prompt_name = "instruction" if "instruction" in values else "prompt"
    if "prompt" in values and "instruction" in values:
        problems.append(Problem("instruction", "given beside prompt", "one of them: map the other to ignore"))
        return {}
    prompt = _given(prompt_name, values.get(prompt_name), problems)
    answers = {name: _given(name, values[name], problems) for name in names}
    kinds = {name: isinstance(answer, list) for name, answer in answers.items()}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{name} is {kind(answers[name])}" for name in names)
        problems.append(Problem(names[0], found, "two strings, or two lists of messages"))
        return {}
    if prompt_name in values and prompt is None:
        problems.append(Problem(prompt_name, "null", "a prompt in every row, or in none"))
        return {}
    is_chat = prompt_name == "instruction" or bool(system) or isinstance(prompt, list)
    if not any(kinds.values()) and not is_chat:
        return _texts(prompt, answers, problems)
    if not any(kinds.values()):
        for name, answer in answers.items():
            problems += check_text(name, answer)
        conversations = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    else:
        conversations = {name: read_messages(name, given, problems, SPEAKERS) for name, given in answers.items()}
        for given in answers.values():
            explain_string(given, problems)
    before: list[Message] | str | None = prompt
    if isinstance(prompt, list):
        before = read_messages(prompt_name, prompt, problems, SPEAKERS, needs_answer=False)
    elif prompt is not None:
        problems += check_text(prompt_name, prompt)
    if problems:
        return {}
    before, conversations = _apart(before, conversations, problems)
    if system and before[:1] != system:
        if before and before[0]["role"] == "system":
            problems.append(Problem("system", "another one than the system message of the prompt", "one of them"))
        before = system + before
    return {"prompt": before, **conversations}


def _given(name: str, value: Any, problems: Problems) -> Any:
    """The value of a column: a list that a JSON string holds as a list, a single message as a list of one."""
    value = list_of(name, value, problems)
    if isinstance(value, dict) and ("role" in value or "from" in value):
        return [value]
    return value


def _apart(
    before: list[Message] | str | None, conversations: dict[str, list[Message]], problems: Problems
) -> tuple[list[Message], dict[str, list[Message]]]:
    """Part conversations into the prompt and what follows it. ``before``: the prompt where it is known."""
    first, *others = conversations.values()
    if isinstance(before, str):
        num = next((i for i, message in enumerate(first) if message["role"] == "user"), -1)
        is_repeated = num >= 0 and first[num]["content"].strip() == before.strip()
        before = first[: num + 1] if is_repeated else [{"role": "user", "content": before}]
    if before is None:
        if others:
            same = takewhile(lambda turns: all(turn == turns[0] for turn in turns), zip(first, *others, strict=False))
            num = min(sum(1 for _ in same), *(len(each) - 1 for each in (first, *others)))
        else:
            num = max(i for i, message in enumerate(first) if message["role"] == "assistant")
        before = first[:num]
        if not before or before[-1]["role"] == "assistant":
            names = " and ".join(conversations)
            found = "the prompts differ" if others else "no prompt before the answer"
            problems.append(Problem(names, found, "conversations that begin with the same prompt, or a column prompt"))
            return [], conversations
    parted = {}
    for name, messages in conversations.items():
        rest = messages[len(before) :] if messages[: len(before)] == before else messages
        if not rest or rest[0]["role"] != "assistant":
            at = f"{name}[{len(messages) - len(rest)}]" if rest else name
            found = f"a message of the {rest[0]['role']}: the prompts differ" if rest else "ends with the prompt"
            problems.append(Problem(at, found, "an answer to the prompt"))
        parted[name] = rest
    return before, parted


def _texts(prompt: Any, answers: dict[str, Any], problems: Problems) -> dict[str, str | list[Message]]:
    """The same for texts. Without ``prompt`` it is what the texts begin with."""
    for name, answer in answers.items():
        problems += check_text(name, answer)
    if prompt is not None:
        problems += check_text("prompt", prompt)
        return {"prompt": prompt, **answers}
    if problems:
        return {}
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*answers.values(), strict=False))
    shared = "".join(letters[0] for letters in same)
    if _ASSISTANT in shared:
        end = shared.rindex(_ASSISTANT) + len(_ASSISTANT)
    elif len(answers) == 1:
        end = 0
    else:  # between two words
        end = max(shared.rfind(" "), shared.rfind("\n"))
    if end <= 0 or not shared[:end].strip():
        found = "no prompt: " + (
            f"{' and '.join(answers)} begin differently" if len(answers) > 1 else f"no turn {_ASSISTANT.strip()!r}"
        )
        problems.append(Problem(" and ".join(answers), found, "a column prompt, or the same beginning"))
        return {}
    rest = {name: answer[end:] for name, answer in answers.items()}
    for name, text in rest.items():
        problems += check_text(name, text)
    return {"prompt": shared[:end], **rest}


def turns_of(text: str) -> list[Message] | None:
    """Return the messages of a prompt that is a conversation written as text; None if it is none.

    Such a text has a turn after each ``Human:`` and ``Assistant:``, and ends with an empty turn of the assistant.
    """
    head, *parts = _TURN.split(text)
    speakers, contents = parts[0::2], [content.strip() for content in parts[1::2]]
    if head.strip() or not speakers or speakers[-1] != "Assistant" or contents[-1] or not all(contents[:-1]):
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(speakers[:-1], contents[:-1], strict=True)
    return [{"role": roles[speaker], "content": content} for speaker, content in turns]
