"""Open the tokenizer of a model or of its adapter, with the recipe's new tokens in it.

Promises: the same recipe gives the same ids on every rank and at every start; a new token never takes the id or the
text of another one.
"""

from collections import Counter
from contextlib import suppress
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from kit.config.settings.method import MethodSettings
from kit.model.pretrained.locate import TOKENIZER_FILES, hint_trust, hub_options, locate_model, open_adapter
from kit.system.durable import read_object
from kit.system.errors import Problem, UserError, did_you_mean, first_line, raise_if


def open_tokenizer(settings: MethodSettings) -> PreTrainedTokenizerBase:
    """Open the adapter's tokenizer if it has one, since it has the chat template of its training; else the model's.

    The recipe's ``new_tokens`` are added to it as special tokens.

    Raises:
        UserError: there is no tokenizer, or only a slow one; a new token exists already, or one to train does not.
    """
    adapter = settings.adapter_name_or_path
    folder = open_adapter(adapter) if adapter else None
    folder = folder if folder and (folder / TOKENIZER_FILES[0]).is_file() else None
    field = "adapter_name_or_path" if folder else "model_name_or_path"
    name = str(folder) if folder else locate_model(settings.model_name_or_path, settings.model_revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **hub_options(settings))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library, in Rust, is no Exception
        found = f"no tokenizer in {name}: {first_line(error)}"
        raise UserError(field, found, "tokenizer.json next to the weights", hint_trust(error)) from None
    if tokenizer.chat_template is None and folder is None:
        tokenizer.chat_template = _template_of_processor(name, settings)
    if not tokenizer.is_fast:
        raise UserError(field, "a slow tokenizer only", "a tokenizer.json")
    _add(tokenizer, settings.new_tokens or [])
    _check_known(tokenizer, settings.trainable_tokens or [])
    return tokenizer


def _template_of_processor(name: str, settings: MethodSettings) -> str | None:
    """The chat template that older vision-language models have in a separate file; None if there is none.

    A ``chat_template.jinja`` has been read with the tokenizer.
    """
    with suppress(OSError):
        commit = hub_options(settings, is_checked=True)["revision"]
        file = cached_file(name, "chat_template.json", revision=commit, _raise_exceptions_for_missing_entries=False)
        template = read_object(file).get("chat_template") if file else None
        return template if isinstance(template, str) else None
    return None


def ids_of(tokenizer: Any, tokens: list[str] | None) -> list[int]:
    """Return the ids of tokens that the tokenizer has."""
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens or []]


def _add(tokenizer: Any, tokens: list[str]) -> None:
    known = tokenizer.get_vocab() if tokens else {}
    fix = "leave it out; or give it as --trainable_tokens, which trains the rows of tokens that exist"
    problems = [
        Problem("new_tokens", f"{token!r} exists already, with id {known[token]}", "new ones", fix)
        for token in dict.fromkeys(tokens)
        if token in known
    ]
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    raise_if(problems + [Problem("new_tokens", f"{token!r} is given twice") for token in twice])
    tokenizer.add_tokens(tokens, special_tokens=True)
    # A normaliser may make two of them equal.
    lost = [token for token in tokens if token not in tokenizer.get_vocab()]
    raise_if(Problem("new_tokens", f"{token!r} cannot be added to this tokenizer") for token in lost)


def _check_known(tokenizer: Any, tokens: list[str]) -> None:
    known = tokenizer.get_vocab() if tokens else {}
    raise_if(
        Problem(
            "trainable_tokens",
            f"{token!r} is not in the tokenizer",
            "a token that it has",
            did_you_mean(token, tokenizer.get_added_vocab()) or "--new_tokens adds one",
        )
        for token in tokens
        if token not in known
    )
