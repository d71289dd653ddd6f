"""The teacher of knowledge distillation: the model whose token distribution the student learns."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kit.config.recipe import Recipe
from kit.model.build import build_meta_model, check_model, fingerprint, open_config
from kit.model.layers.loss_head import install_loss_head
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.cache import digest
from kit.system.errors import UserError, raise_if

# Spaces, digits, scripts, marks and code, which tokenizers that differ cut up differently.
PROBES = (
    'The quick brown fox, 3.14159 and 1,000,000 others - it\'s "so".',
    "  def f(x):\n\treturn {'a': x**2}  # twice\r\n\n\n",
    "Größe, naïve, Ελληνικά, русский, العربية, हिन्दी, 中文字符, 日本語, 한국어 🙂👩‍🔬",
    "<|im_start|>user\n[INST] <<SYS>> </s> <bos> <think>",
)


def teacher_settings(recipe: Recipe) -> Recipe:
    """Return the recipe as if the teacher were its model, frozen and without adapters."""
    changes: dict[str, Any] = {
        "model_name_or_path": recipe.teacher,
        "model_revision": recipe.teacher_revision,
        "adapter_name_or_path": None,
        "method": "qlora" if recipe.teacher_in_4bit else "lora",  # frozen weights have the compute dtype
        "freeze": None,
        "train_only": None,
        "qat": None,
        "fp8": False,
        "gradient_checkpointing": False,
        "activation_offload": False,
        "tiled_mlp": False,
        "trainable_tokens": None,
    }
    return recipe.model_copy(update=changes)


def own_teachers(recipe: Recipe) -> list[tuple[Recipe, list[int]]]:
    """Return the recipe with each of its teachers, and the indices of the datasets whose teacher that is."""
    found: dict[Any, tuple[Recipe, list[int]]] = {}
    for i, entry in enumerate(recipe.dataset_entries):
        own = recipe
        if entry.teacher or entry.teacher_server:
            names = {"teacher": entry.teacher or recipe.teacher, "teacher_server": entry.teacher_server}
            own = recipe.model_copy(update={**names, "teacher_revision": None})
        found.setdefault((own.teacher, own.teacher_server), (own, []))[1].append(i)
    return list(found.values())


def fingerprint_of_teachers(recipe: Recipe) -> str:
    """Return a string that identifies the teachers of a run. A served one has its name alone."""
    found = [
        (f"served {own.teacher}" if own.teacher_server else fingerprint(teacher_settings(own)), datasets)
        for own, datasets in own_teachers(recipe)
    ]
    return found[0][0] if len(found) == 1 else digest(found)


def check_teacher(recipe: Recipe, tokenizer: Any, needs_weights: bool = True) -> tuple[Any, Any]:
    """Open the config of the teacher, and check that it can be distilled into this student.

    Args:
        tokenizer: the student's.
        needs_weights: see ``check_model``.

    Returns:
        Its config, and its modules on meta.

    Raises:
        UserError: it cannot be opened, has another tokenizer, too few positions or quantised weights, or does more to
            its hidden states than this kit knows.
    """
    settings = teacher_settings(recipe)
    with naming_teacher():
        config = open_config(settings)
        meta_model = build_meta_model(settings, config, recipe.packing)
        raise_if(
            check_model(
                settings,
                config,
                meta_model,
                max_length=recipe.max_length,
                packing=recipe.packing,
                needs_weights=needs_weights,
                trains=False,
            )
        )
        own = open_tokenizer(settings)
    if found := _difference(own, tokenizer):
        found = f"{recipe.teacher}: {found} that of {recipe.model_name_or_path}"
        raise UserError("teacher", found, "a model with the same tokenizer, of the same family")
    install_loss_head(meta_model)
    if meta_model.uses_own_logits:
        found = f"{type(meta_model).__name__} computes its logits in its own way"
        raise UserError("teacher", found, "a model whose head is one matrix product")
    return config, meta_model


def _difference(own: Any, tokenizer: Any) -> str:
    """Why the ids of one tokenizer are not those of the other; empty if they are.

    The same id must be the same token; the teacher may add more to its vocabulary than the student, whose data may hold
    any that it adds. How it cuts up text shows in probes: tokenizers that cut alike may be written down in different
    ways.
    """
    theirs, ours = (each.backend_tokenizer.get_vocab(with_added_tokens=False) for each in (own, tokenizer))
    if differing := [token for token in ours | theirs if theirs.get(token) != ours.get(token)]:
        return f"{len(differing)} tokens of its vocabulary, such as {min(differing)!r}, have other ids than in"
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = [*PROBES, *tokenizer.all_special_tokens, *added, str(tokenizer.chat_template)]
    differing = [text for text in texts if _ids(own, text) != _ids(tokenizer, text)]
    return f"its tokenizer gives {differing[0]!r:.80} other ids than" if differing else ""


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Let the problems of a model in the ``with`` block name the setting ``teacher``."""
    try:
        yield
    except UserError as error:
        raise UserError(*(replace(each, where="teacher") for each in error.problems)) from None
