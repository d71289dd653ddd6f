"""SentencePiece itself reads what is written of a ``tokenizer.json``, and makes the same ids."""

import json

import pytest
import sentencepiece
from sentencepiece_helpers import PARTS, tokenizer_of
from tokenizers import AddedToken

from kit.export.proof import TEXTS
from kit.export.sentencepiece_file import write_sentencepiece


@pytest.mark.parametrize("kind", PARTS)
def test_its_ids_are_those_of_the_tokenizer(kind, tmp_path):
    tokenizer = tokenizer_of(kind, None if kind == "plain" else "<unk>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    written = write_sentencepiece(tmp_path, "")
    assert written["add_prefix_space"] == (kind != "plain")
    reader = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert reader.vocab_size() == tokenizer.get_vocab_size() and reader.unk_id() == 0
    for text in (*TEXTS, "two  spaces ", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert reader.encode(text) == ids
        assert not text.strip() or len(ids) < len(text.encode())  # some of it was joined


def test_added_tokens_and_holes_keep_their_ids(tmp_path):
    tokenizer = tokenizer_of("plain")
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    values = json.loads(tokenizer.to_str())
    values["added_tokens"][-1]["id"] += 2  # as in a model whose embedding has rows that no token uses
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    written = write_sentencepiece(tmp_path, "")
    reader = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert [reader.id_to_piece(size), reader.id_to_piece(size + 3)] == ["<tool>", "<|end|>"]
    assert reader.is_unused(size + 1) and reader.is_unused(size + 2) and reader.is_control(size + 3)
    decoder = written["added_tokens_decoder"]
    assert decoder[str(size)] == {"content": "<tool>", "special": False} and decoder[str(size + 3)]["special"]
