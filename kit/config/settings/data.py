"""Settings of the data."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.config.dataset_entry import DatasetEntry
from kit.schema.fields import STRICT, TEMPLATE_KWARGS, column_mapping, dataset_entries, option, template_kwargs
from kit.schema.rules import Rule

_option = partial(option, "Data")
_identity = partial(option, "Data", identity=True)

Entries = Annotated[str | Annotated[list[DatasetEntry], Field(min_length=1)], BeforeValidator(dataset_entries)]
ENTRIES = "file, glob, folder, URL or hub id, or a list of {path: ..., weight: ...}"


class DataSettings(BaseModel):
    """Training data: where it is, how rows become samples, and the loss mask."""

    model_config = STRICT

    dataset: Entries = _option(
        ..., "file, glob, folder, URL or hub id; several with weights as a list", expected=ENTRIES
    )
    dataset_config: str | None = _option(None, "config (subset) of a hub id: main for openai/gsm8k")
    dataset_split: str = _option("train", "split of a hub id or a folder with splits")
    dataset_revision: str | None = _option(None, "branch, tag or commit of a hub id; default: the newest commit")
    dataset_columns: Annotated[dict[str, str], BeforeValidator(column_mapping)] = _identity(
        {},
        "column mapping: question=instruction,answer=output; images=ignore",
        expected="column=field, separated by commas, each column once",
    )
    streaming: bool = _identity(
        False, "streaming: read and tokenise rows during training instead of before it; needs max_steps"
    )
    shuffle: bool = _identity(True, "shuffle the samples in each epoch; false: keep the order of the data")
    shuffle_buffer_size: int = _identity(
        1000, "size of the shuffle buffer of a stream", "rows", ge=1, needs="streaming"
    )
    chat_template: str | None = _identity(None, "name or file of a chat template; default: the tokenizer's own")
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(template_kwargs)] = _identity(
        None, "values for variables of the chat template: enable_thinking=false", expected=TEMPLATE_KWARGS
    )
    system_prompt: str | None = _identity(
        None, "system prompt for conversations without one, in training and evaluation"
    )
    media_folder: str | None = _option(
        None, "folder of images and audio, to which their paths are relative; default: the folder of the data file"
    )
    min_pixels: int | None = _identity(
        None, "minimum image area: smaller images are resized, if the image processor supports it", "pixels", ge=1
    )
    max_pixels: int | None = _identity(
        None, "maximum image area: larger images are resized, if the image processor supports it", "pixels", ge=1
    )
    train_on: Literal["assistant", "last", "all"] = _identity(
        "assistant",
        "loss mask: assistant (every assistant turn, or the completion), last (the last turn only), all (every token)",
    )
    max_length: int = _identity(
        2048, "longest sample, and length of a packed row; at most max_position_embeddings", "tokens", ge=8
    )
    excess_length_strategy: Literal["truncate", "keep_end", "drop", "error", "split"] = _identity(
        "truncate",
        "longer samples: truncate cuts the end, keep_end the start; drop leaves out; error stops; split chunks a text",
    )
    on_bad_row: Literal["error", "skip"] | None = _option(
        None,
        "invalid rows: stop, or skip and list them; default: error; in a stream, skip after its first rows",
    )
    packing: bool = _identity(
        False, "pack samples into rows of max_length tokens, padding-free; attention stays within each sample"
    )
    max_train_samples: int | None = _identity(
        None, "train on the first N samples only; with several datasets, N in total, spread over all", "samples", ge=1
    )
    dataset_num_proc: int | None = _option(None, "processes that tokenise; default: one per core", "processes", ge=1)

    @property
    def dataset_entries(self) -> list[DatasetEntry]:
        """The datasets to train on, without those of weight 0."""
        entries = entries_of(
            self.dataset, self.dataset_config, self.dataset_split, self.dataset_columns, self.dataset_revision
        )
        return [entry for entry in entries if entry.weight != 0]


def entries_of(
    value: str | list[DatasetEntry], config: str | None, split: str, columns: dict[str, str], revision: str | None
) -> list[DatasetEntry]:
    """Return the value of ``dataset`` or ``eval_dataset`` as entries, each with the defaults that it does not set."""
    entries = [DatasetEntry(path=value)] if isinstance(value, str) else value
    return [entry.filled(config, split, columns, revision) for entry in entries]


def _lists(recipe: Any, test: Callable[[list[DatasetEntry]], object], flag: str = "dataset") -> object:
    """What ``test`` returns for a list of datasets; false for a single one."""
    entries = getattr(recipe, flag)
    return isinstance(entries, list) and test(entries)


def _name_of_two(entries: list[DatasetEntry]) -> str | None:
    names = [entry.filled(None, "", {}).name for entry in entries]
    return next((name for name in names if names.count(name) > 1), None)


RULES = (
    *(
        Rule(
            flag,
            partial(lambda flag, r: _lists(r, _name_of_two, flag), flag),
            "two datasets are named {it!r}",
            "name one of them in a list: [{path: a.jsonl, name: first}, {path: b.jsonl}]",
        )
        for flag in ("dataset", "eval_dataset")
    ),
    Rule(
        "eval_dataset",
        lambda r: _lists(r, lambda entries: any(entry.weight is not None for entry in entries), "eval_dataset"),
        "weights, but each evaluation sample counts once",
        "leave the weights out",
    ),
    Rule(
        "dataset",
        lambda r: _lists(r, lambda entries: len({entry.weight is None for entry in entries}) == 2),
        "only some datasets have a weight",
        "give each a weight, or none of them: then each counts by its size",
    ),
    Rule(
        "dataset",
        lambda r: _lists(r, lambda entries: all(entry.weight == 0 for entry in entries)),
        "all weights are 0",
        "give one of them a weight above 0",
    ),
    Rule(
        "dataset",
        lambda r: not r.teacher_top_k and any(entry.teacher or entry.teacher_server for entry in r.dataset_entries),
        "has a teacher of its own, without teacher_top_k: teachers read their data before the first step",
        "--objective distil --teacher_top_k 64",
    ),
    Rule(
        "shuffle dataset",
        lambda r: not r.shuffle and _lists(r, lambda entries: entries[0].weight is not None),
        "false, but weights draw samples at random",
        "--shuffle true; or leave out the weights: datasets then follow each other",
    ),
    Rule(
        "streaming max_steps",
        lambda r: r.streaming and r.max_steps is None,
        "without max_steps",
        "--max_steps 1000, or another number: a stream has no known end",
    ),
    *(
        Rule(
            f"streaming {name}",
            partial(lambda name, value, r: r.streaming and (getattr(r, name) == value), name, value),
            f"with {name}" + (f" {str(value).lower()}" if value is not True else ""),
            fix,
        )
        for name, value, fix in (
            ("shuffle", False, "--shuffle true --shuffle_buffer_size 1: rows keep the order of their file"),
            ("eval_strategy", "epoch", "--eval_strategy steps --eval_steps 100: a stream's epochs have no known end"),
            ("save_strategy", "epoch", "--save_strategy steps --save_steps 100: a stream's epochs have no known end"),
        )
    ),
    Rule(
        "streaming max_train_samples",
        None,
        "with max_train_samples",
        "leave out --max_train_samples: a run reads no more of a stream than its steps need",
    ),
    Rule(
        "streaming eval_split_size",
        None,
        "with eval_split_size",
        "--eval_split_size 0 --eval_dataset FILE: nothing can be held out of a stream",
    ),
    Rule(
        "streaming dataset",
        lambda r: r.streaming and _lists(r, lambda entries: len(entries) > 1 and entries[0].weight is None),
        "several datasets without weights",
        "give each a weight: a stream's size is not known",
    ),
    Rule(
        "streaming dataset",
        lambda r: r.streaming and _lists(r, lambda entries: any(entry.max_samples for entry in entries)),
        "max_samples, which draws from a whole dataset",
        "leave out max_samples: a run reads no more of a stream than its steps need",
    ),
    Rule(
        "attn_implementation packing",
        lambda r: r.attn_implementation == "varlen" and not r.packing,
        "varlen without packing",
        "--attn_implementation auto; or --packing true, which changes the batches",
    ),
    Rule(
        "attn_implementation packing",
        lambda r: r.attn_implementation == "flash_attention_2" and r.packing,
        "flash_attention_2 with packing",
        "--attn_implementation auto: it uses varlen, which needs no other package",
    ),
)
