"""Tokenizers as models have them; a folder for each test, and a cache next to it."""

import pytest
from data_helpers import byte_level_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_with_bos():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(scope="session", params=["metaspace", "prepend"])
def sentencepiece(request):
    return sentencepiece_tokenizer(request.param)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cache(folder):
    return folder.parent / f"{folder.name}-cache" / "samples"
