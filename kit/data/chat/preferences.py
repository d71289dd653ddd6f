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

from kit.data.chat.messages import (
    SPEAKERS,
    Message,
    are_messages,
    check_text,
    is_message,
    parsed,
    read_messages,
    system_message,
)
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

    What is wrong is added to ``problems``, and then the result does not count; or it is a ``UserError``.
    """
    asked = [name for name in ("prompt", "instruction") if name in values]
    if len(asked) > 1:
        problems.append(Problem("prompt and instruction", "two prompts", "one of them"))
        return {}
    system = system_message(values, problems)
    prompt = _prompt(values, asked[0], problems) if asked else None
    answers = {name: _listed(name, values[name]) for name in names}
    are_texts = not isinstance(answers[names[0]], list)
    if any(isinstance(answer, list) is are_texts for answer in answers.values()):
        found = ", ".join(f"{name} is {kind(answer)}" for name, answer in answers.items())
        problems.append(Problem(names[0], found, "two strings, or two lists of messages"))
    elif are_texts:
        for name, answer in answers.items():
            problems += check_text(name, answer)
    if problems:
        return {}
    if are_texts and "instruction" not in values and not isinstance(prompt, list):
        if system:
            problems.append(Problem("system", "given beside texts", "the question as instruction, which makes a chat"))
        return _texts(prompt, answers, problems)
    conversations = {}
    for name, answer in answers.items():
        given = [{"role": "assistant", "content": answer}] if are_texts else answer
        conversations[name] = read_messages(name, given, problems, SPEAKERS)
    if isinstance(prompt, list):
        prompt = read_messages(asked[0], prompt, problems, SPEAKERS, needs_answer=False)
    if problems:
        return {}
    before, conversations = _apart(prompt, conversations, problems)
    if system and before[:1] != system:
        if before and before[0]["role"] == "system":
            problems.append(Problem("system", "another one than the system message of the prompt", "one of them"))
        before = system + before
    return {"prompt": before, **conversations}


def _listed(name: str, value: Any) -> Any:
    """The value of a column: as a list if it is a message, or a JSON string of messages; else as it is.

    Raises ``UserError`` if a key of such an object is there twice.
    """
    text = f"[{value}]" if isinstance(value, str) and value.lstrip().startswith("{") else value
    if isinstance(text, str) and are_messages(text):
        return parsed(name, text)
    return [value] if is_message(value) else value


def _prompt(values: Mapping[str, Any], name: str, problems: Problems) -> Any:
    """The prompt, a text or a list, with the column ``input`` if that has text."""
    prompt, more = _listed(name, values[name]), values.get("input")
    if prompt is None:
        problems.append(Problem(name, "null", "a prompt in every row, or in none"))
    elif not isinstance(prompt, list):
        problems += check_text(name, prompt)
    if more is None or more == "":
        return prompt
    problems += check_text("input", more, may_be_empty=True)
    if name != "instruction" or not isinstance(prompt, str):
        problems.append(Problem("input", "given without an instruction", "it beside an instruction that is a string"))
    return f"{prompt}\n\n{more}" if isinstance(more, str) and more.strip() else prompt


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
        if others:
            num_shared = min(_num_alike(first, *others), *(len(each) - 1 for each in (first, *others)))
        else:  # of a single conversation the last answer is rated
            num_shared = max(i for i, message in enumerate(first) if message["role"] == "assistant")
        prompt = first[:num_shared]
        if not prompt or prompt[-1]["role"] == "assistant":
            expected = "conversations that begin with the same prompt, or a column prompt"
            problems.append(Problem(" and ".join(conversations), "no prompt, or prompts that differ", expected))
            return [], conversations
    parted = {}
    for name, messages in conversations.items():
        rest = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
        if not rest or rest[0]["role"] != "assistant":
            found = f"a message of the {rest[0]['role']}: the prompts differ" if rest else "ends with the prompt"
            at = f"{name}[{len(messages) - len(rest)}]" if rest else name
            problems.append(Problem(at, found, "an answer to the prompt"))
        parted[name] = rest
    return prompt, parted


def _num_alike(first: Sequence[Any], *others: Sequence[Any]) -> int:
    """The number of items with which all sequences begin."""
    shortest = min(map(len, (first, *others)))
    return next((i for i in range(shortest) if any(other[i] != first[i] for other in others)), shortest)


def _texts(prompt: str | None, answers: dict[str, str], problems: Problems) -> dict[str, str | list[Message]]:
    """The prompt and the answers as texts. Without ``prompt``, it is that of the transcripts that they are."""
    if prompt is not None:
        # A transcript is no answer: where the answers begin with that of the prompt, it is there twice.
        repeats = is_transcript(prompt) and all(answer.startswith(prompt) for answer in answers.values())
        end = len(prompt) if repeats else 0
    else:
        first, *others = answers.values()
        shared = first[: _num_alike(first, *others)]
        end = shared.rfind(_ASSISTANT) + len(_ASSISTANT)
        if _ASSISTANT not in shared:
            expected = f"a column prompt, or texts that begin with the same turns up to {_ASSISTANT.strip()!r}"
            problems.append(Problem(" and ".join(answers), "no prompt", expected))
            return {}
        prompt = shared[:end]
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
