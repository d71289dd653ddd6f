"""A tokenizer, and a folder of one's own to type commands in."""

import pytest
from data_helpers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
