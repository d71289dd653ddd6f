"""Checks of datasets against settings, and notes on how rows are read.

Promises: nothing is tokenised here, and of the rows no more than the first is read.
"""

from collections.abc import Sequence

from kit.data.chat.formats import Sample
from kit.data.chat.messages import check_text
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder
from kit.system.errors import Problem, Problems


def check_datasets(datasets: Sequence[Dataset], encoder: Encoder, generates: bool, holds_out: bool) -> Problems:
    """Return the problems of the settings with these datasets.

    Args:
        generates: answers to evaluation samples are generated.
        holds_out: evaluation samples are taken from the training data.
    """
    problems = Problems()
    formats = {dataset.entry.prompt_format for dataset in datasets if not dataset.is_evaluation} - {None}
    if encoder.settings.system_prompt:
        with problems.caught():
            check_text("system_prompt", encoder.settings.system_prompt)
    eos = encoder.tokenizer.eos_token_id or 0
    if eos >= encoder.vocab_size:  # batches are padded with it
        found = f"EOS of its tokenizer has id {eos}, but the model has {encoder.vocab_size} embeddings"
        fix = "give the eos_token that the model knows in tokenizer_config.json"
        problems.append(Problem("model_name_or_path", found, fix=fix))
    for dataset in datasets:
        name, fields = dataset.source.name, dataset.fields
        if dataset.is_evaluation and formats and "instruction" in fields and dataset.entry.prompt_format is None:
            found = "instructions without a prompt_format, while the training data have one"
            problems.append(Problem(name, found, "the same wording", "give its entry the same prompt_format"))
        if encoder.settings.system_prompt and not dataset.is_evaluation and not _takes_system(dataset, encoder):
            found = f"given, but {name} holds {dataset.format}, which has no messages"
            problems.append(Problem("system_prompt", found, "conversations", "leave out --system_prompt"))
        if generates and (dataset.is_evaluation or holds_out) and ("text" in fields or "input_ids" in fields):
            found = f"{name} is {'plain text' if 'text' in fields else 'token ids'}, which has no prompts"
            problems.append(Problem("predict_with_generate", found, "messages, or prompt and completion"))
        splits = encoder.settings.excess_length_strategy == "split"
        if splits and "text" not in fields:
            found = f"split, but {name} holds {dataset.format}, and conversations cannot be chunked"
            fix = "--excess_length_strategy drop or truncate"
            problems.append(Problem("excess_length_strategy", found, "truncate, drop or error", fix))
    return problems


def _takes_system(dataset: Dataset, encoder: Encoder) -> bool:
    """Whether the first sample has messages, before which a system message can stand; true if there is no sample."""
    sample = first_sample(dataset)
    return not sample or holds_chats(dataset) or (encoder.prompts_as_chat and "prompt" in sample)


def holds_chats(dataset: Dataset) -> bool:
    """Whether the first sample holds messages, which only a chat template makes a text."""
    sample = first_sample(dataset)
    return any(isinstance(sample.get(name), list) for name in ("messages", "prompt"))


def reading_notes(dataset: Dataset, encoder: Encoder) -> list[str]:
    """Return notes on how rows are read where users may expect otherwise."""
    sample = first_sample(dataset)
    if not isinstance(sample.get("prompt"), str) or encoder.template is None or encoder.prompts_as_chat:
        return []
    what = "prompt and completion" if encoder.kind.is_demonstration else "prompt and answers"
    what = what if len(sample) > 1 else "prompts"
    found = f"{what} are trained on as plain text, although the tokenizer has a chat template"
    fix = "--chat_template with the template's file or name makes a chat of each row"
    return [f"{dataset.source.name}: {found}; {fix}"]


def first_sample(dataset: Dataset) -> Sample:
    """Return the sample of the first row; empty if there is none, or if that row does not fit its format."""
    for _, _, row in read_rows(dataset.source.parts, dataset.columns):
        if isinstance(row, dict):
            sample = dataset.sample(row)
            return sample if isinstance(sample, dict) else {}
    return {}
