"""Tokenizers as models have them."""

import pytest
from data_helpers import byte_level_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def tokenizer_with_bos():
    return byte_level_tokenizer(bos_token="<bos>")


@pytest.fixture(scope="module", params=["metaspace", "prepend"])
def sentencepiece(request):
    return sentencepiece_tokenizer(request.param)
