"""Settings of the data."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.config.dataset_entry import DatasetEntry
from kit.config.fields import STRICT, TEMPLATE_KWARGS, column_mapping, dataset_entries, option, template_kwargs

_option = partial(option, "Data")
_identity = partial(option, "Data", identity=True)

Entries = Annotated[str | Annotated[list[DatasetEntry], Field(min_length=1)], BeforeValidator(dataset_entries)]
ENTRIES = "file, glob, folder, address or hub id, or a list of {path: ..., weight: ...}"


class DataSettings(BaseModel):
    """Training data: where it is, how rows become samples, and what is learned from them."""

    model_config = STRICT

    dataset: Entries = _option(
        ..., "file, glob, folder, address or hub id; several with weights as a list", expected=ENTRIES
    )
    dataset_config: str | None = _option(None, "config of a hub id: main for openai/gsm8k")
    dataset_split: str = _option("train", "split of a hub id or a folder with splits")
    dataset_revision: str | None = _option(None, "branch, tag or commit of a hub id; default: the newest commit")
    dataset_columns: Annotated[dict[str, str], BeforeValidator(column_mapping)] = _identity(
        {},
        "names of columns: question=instruction,answer=output; images=ignore",
        expected="column=field, separated by commas, each column once",
    )
    mixing: Literal["samples", "tokens"] = _identity(
        "samples", "the weights of several data sets are shares of the samples, or of the tokens"
    )
    streaming: bool = _identity(
        False, "read and tokenise rows while training instead of all of them first; needs max_steps"
    )
    shuffle: bool = _identity(True, "shuffle the samples anew in each epoch; false: keep the order of the data")
    shuffle_buffer_size: int = _identity(1000, "streamed rows that are shuffled together", "rows", ge=1)
    chat_template: str | None = _identity(None, "name or file of a chat template; default: the tokenizer's own")
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(template_kwargs)] = _identity(
        None, "values for variables of the chat template: enable_thinking=false", expected=TEMPLATE_KWARGS
    )
    system_prompt: str | None = _identity(
        None, "system message of conversations that have none, in training and evaluation"
    )
    train_on: Literal["assistant", "last", "all"] = _identity(
        "assistant", "assistant: every assistant turn, or the completion; last: the last turn only; all: every token"
    )
    max_length: int = _identity(2048, "longest sample, and size of a pack", "tokens", ge=8)
    excess_length_strategy: Literal["truncate", "keep_end", "drop", "error", "split"] = _identity(
        "truncate",
        "longer samples: truncate cuts the end, keep_end the start; drop leaves out; error stops; split (text) divides",
    )
    on_bad_row: Literal["error", "skip"] | None = _option(
        None,
        "rows that cannot be used: stop, or leave out and list; default: error; in a stream, skip after its beginning",
    )
    dedup: bool = _identity(False, "leave out training samples with the same tokens and mask as an earlier one")
    packing: bool = _identity(False, "put several samples into a row of max_length tokens; no sample sees another")
    max_train_samples: int | None = _identity(
        None, "train on the first N samples only; with several data sets, N in total, spread over all", "samples", ge=1
    )
    dataset_num_proc: int | None = _option(None, "processes that tokenise; default: one per core", "processes", ge=1)

    @property
    def dataset_entries(self) -> list[DatasetEntry]:
        """The data sets to train on, without those of weight 0."""
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
