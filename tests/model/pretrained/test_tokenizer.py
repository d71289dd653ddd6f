"""New tokens get ids of their own, the same at every start; what cannot be added or trained is named."""

import pytest
from transformers import AutoTokenizer

from kit.config.settings.method import MethodSettings
from kit.model.pretrained.tokenizer import ids_of, open_tokenizer
from kit.system.errors import UserError


def test_new_tokens_are_special_and_one_token_each(recipe, tmp_path):
    tokenizer = open_tokenizer(recipe(new_tokens=["<a>", "<b>"]))
    assert ids_of(tokenizer, ["<a>", "<b>"]) == [len(tokenizer) - 2, len(tokenizer) - 1]
    ids = tokenizer("red<a>cat", add_special_tokens=False).input_ids
    assert ids.count(len(tokenizer) - 2) == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "redcat"
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved("red<a>cat", add_special_tokens=False).input_ids == ids


def test_tokens_that_cannot_be_added_or_trained_are_refused_by_name(recipe):
    cases = [
        ({"new_tokens": ["<a>", "<|im_end|>"]}, "new_tokens: '<|im_end|>' exists already, with id 2"),
        ({"new_tokens": ["<a>", "<a>"]}, "new_tokens: '<a>' is given twice"),
        ({"trainable_tokens": ["<|im_ned|>"]}, "did you mean '<|im_end|>'"),
        ({"trainable_tokens": ["<none>"]}, "--new_tokens adds one"),
    ]
    for changes, message in cases:
        with pytest.raises(UserError) as error:
            open_tokenizer(recipe(**changes))
        assert message in str(error.value), (changes, message)


def test_a_panic_of_the_tokenizers_library_is_a_problem_of_the_model(model_folder, monkeypatch):
    def panic(*args, **kwargs):
        raise BaseException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("kit.model.pretrained.tokenizer.AutoTokenizer.from_pretrained", panic)
    with pytest.raises(UserError, match=r"model_name_or_path: no tokenizer in .*unwrap"):
        open_tokenizer(MethodSettings(model_name_or_path=str(model_folder)))
