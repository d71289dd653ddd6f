"""What people call the keys of ``run.json`` and ``metrics.jsonl``, and settings as a recipe would write them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kit.config.dataset_entry import without_point
from kit.config.recipe import Recipe

_OF_ANSWERS = {  # each of the chosen and of the rejected answers; of answers with a label, of the good and the bad ones
    "rewards": "reward",
    "logps": "log-probability",
    "lengths": "tokens",
}
_WORDS = {
    "eval_loss": "loss",
    "eval_perplexity": "perplexity",
    "eval_exact_match": "exact match",
    "eval_number": "right number",
    "eval_token_f1": "token F1",
    "eval_bleu": "BLEU",
    "eval_chrf": "chrF",
    "eval_rouge_l": "ROUGE-L",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "nll_loss": "loss of chosen",
    "name": "data set",
    "num_rows": "rows",
    "num_samples": "samples",
    "num_tokens": "tokens",
    "num_supervised_tokens": "tokens learned from",
    "num_files": "files",
    "num_truncated": "cut at max_length",
    "num_split": "cut in pieces",
    "num_dropped_long": "left out: too long",
    "num_dropped_unsupervised": "left out: nothing to learn from",
    "num_blank_lines": "blank lines",
    "num_skipped": "left out: cannot be used",
}


def words(key: str, answers: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the words for a key of metrics or data: ``tokens learned from`` for ``num_supervised_tokens``.

    Args:
        answers: other words for the answers that the metrics call ``chosen`` and ``rejected``.
    """
    if text := _WORDS.get(key.removeprefix("eval_")):
        return text
    name, slash, source = key.partition("/")
    if text := _OF_ANSWERS.get(name.removeprefix("eval_")):
        return f"{text} of {answers.get(source, source)}"
    text = _WORDS.get(name) or name.removeprefix("eval_").removeprefix("num_").replace("_", " ")
    return f"{text} ({source})" if slash else text


def setting(value: Any) -> str:
    """Return a setting as a recipe would write it; each entry of a list of objects in a line of its own."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "\n".join(_entry(entry) if isinstance(entry, dict) else setting(entry) for entry in value)
    if isinstance(value, list):
        return ",".join(map(setting, value))
    if isinstance(value, dict):
        return ",".join(f"{name}={setting(item)}" for name, item in value.items())
    return str(value)


def _entry(entry: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}: {setting(without_point(value))}" for key, value in entry.items() if value not in (None, "", [], {})
    )


def chosen_and_defaults(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in which a recipe differs from the defaults, and the others, as JSON has them."""
    values = recipe.model_dump(mode="json")
    defaults = {key: info.get_default(call_default_factory=True) for key, info in Recipe.model_fields.items()}
    chosen = {key: value for key, value in values.items() if value != defaults[key]}
    return chosen, {key: value for key, value in values.items() if key not in chosen}


def meaning(key: str) -> str:
    """Return what a setting means, in the words of the help; empty for one that this version does not know."""
    info = Recipe.model_fields.get(key)
    return info.description or "" if info else ""


def start_text(start: Mapping[str, Any]) -> str:
    """Describe a start of a run in one line."""
    changed = "; ".join(map(str, start["changed"])).replace(" -> ", " \u2192 ")
    what = f"continued after step {start['step']:,}" if start["step"] else "began"
    return f"{what} ({clock(start['time'])} UTC)" + (f", changed: {changed}" if changed else "")


def after(step: int) -> str:
    """Return when something was measured: ``after step 160``, ``before training``."""
    return f"after step {step:,}" if step else "before training"


def clock(time: str) -> str:
    """Return an ISO 8601 time in UTC as people write it: ``2026-03-01 09:30:00``."""
    return time.replace("T", " ").removesuffix("+00:00")
