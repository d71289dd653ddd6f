"""A tokenizer, and a folder and a cache of each test's own."""

import pytest
from data_helpers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
