"""Fixes of the data: kit/data and `kit inspect`, `prepare`."""

from fixes.harness import case

UNTYPED: dict[str, str] = {}


@case("kit/data/read/sources.py:_find_files")
def a_file_with_a_slip(world):
    return "finetune --dataset chat.jsonl"
