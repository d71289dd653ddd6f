"""Splits preference rows into the shared prompt and the answers. Pure.

Preference data have an explicit prompt in a column of its own, or an implicit one, as messages at the beginning of each
answer, or both.

Promises:

- Each answer is the continuation of the same prompt. A row in which the prompts differ is a problem.
- Texts stay texts. They become messages only together with messages, or where the question is called ``instruction``.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from kit.data.chat.messages import (
    SPEAKERS,
    Message,
    after_system,
    are_messages,
    check_no_system,
    check_text,
    is_message,
    parsed,
    read_messages,
)
from kit.system.errors import UserError, kind


def answers_to_one_prompt(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return ``prompt``, and each of ``names`` as what follows it: all as lists of messages, or all as text.

    Args:
        values: of the row, by our names. ``instruction`` is a prompt that makes a chat of texts.
        names: the answers, such as ``chosen`` and ``rejected``.

    Raises ``UserError`` with the first thing that is wrong.
    """
    asked = [name for name in ("prompt", "instruction") if name in values]
    if len(asked) > 1:
        raise UserError("prompt and instruction", "two prompts", "one of them")
    prompt = _listed(asked[0], values[asked[0]]) if asked else None
    if asked and prompt is None:
        raise UserError(asked[0], "null", "a prompt in every row, or in none")
    if asked and not isinstance(prompt, list):
        check_text(asked[0], prompt)
    answers = {name: _listed(name, values[name]) for name in names}
    are_texts = not isinstance(answers[names[0]], list)
    if any(isinstance(answer, list) is are_texts for answer in answers.values()):
        found = ", ".join(f"{name} is {kind(answer)}" for name, answer in answers.items())
        raise UserError(names[0], found, "two strings, or two lists of messages")
    if are_texts:
        for name, answer in answers.items():
            check_text(name, answer)
        if "instruction" not in values and not isinstance(prompt, list):
            check_no_system(values)
            if prompt is None:
                raise UserError(" and ".join(answers), "no prompt", "a column prompt")
            return {"prompt": prompt, **answers}
        answers = {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    conversations = {name: read_messages(name, answer, SPEAKERS) for name, answer in answers.items()}
    if isinstance(prompt, list):
        prompt = read_messages(asked[0], prompt, SPEAKERS, needs_answer=False)
    before, conversations = _apart(prompt, conversations)
    return {"prompt": after_system(values, before), **conversations}


def _listed(name: str, value: Any) -> Any:
    """The value of a column: as a list if it is a message, or a JSON string of messages; else as it is.

    Raises ``UserError`` if a key of such an object is there twice.
    """
    text = f"[{value}]" if isinstance(value, str) and value.lstrip().startswith("{") else value
    if isinstance(text, str) and are_messages(text):
        return parsed(name, text)
    return [value] if is_message(value) else value


def _apart(
    prompt: list[Message] | str | None, conversations: dict[str, list[Message]]
) -> tuple[list[Message], dict[str, list[Message]]]:
    """Part conversations into the prompt and what follows it. ``prompt`` is None if it is only at their beginning."""
    first, *others = conversations.values()
    if isinstance(prompt, str):
        question = next((message["content"] for message in first if message["role"] == "user"), None)
        is_repeated = question is not None and question.strip() == prompt.strip()
        prompt = None if is_repeated else [{"role": "user", "content": prompt}]
    if prompt is None:
        if others:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], others[0][:-1], strict=False))
            num_shared = len([*alike])
        else:  # of a single conversation the last answer is rated
            num_shared = max(i for i, message in enumerate(first) if message["role"] == "assistant")
        prompt = first[:num_shared]
        if not prompt or prompt[-1]["role"] == "assistant":
            expected = "conversations that begin with the same prompt, or a column prompt"
            raise UserError(" and ".join(conversations), "no prompt, or prompts that differ", expected)
    parted = {}
    for name, messages in conversations.items():
        rest = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
        if not rest or rest[0]["role"] != "assistant":
            found = f"a message of the {rest[0]['role']}: the prompts differ" if rest else "ends with the prompt"
            at = f"{name}[{len(messages) - len(rest)}]" if rest else name
            raise UserError(at, found, "an answer to the prompt")
        parted[name] = rest
    return prompt, parted
