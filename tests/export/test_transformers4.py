"""Files of a model have what transformers 4 looks for, and transformers 5 reads of them what it read before.

Tried with transformers 4.57: benchmarks/results/2026-11-25-export.md.
"""

import json

import pytest
from helpers import ROOT
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2_5_VLConfig,
)

from kit.export.transformers4 import write_for_transformers_4

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA = {
    "full_attention": LINEAR | {"rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
PARTIAL = {"rope_theta": 2e4, "rope_type": "default", "partial_rotary_factor": 0.5}
CASES = [
    (LlamaConfig(rope_parameters={"rope_theta": 5e5, **LLAMA3}), {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    (
        Qwen2_5_VLConfig(text_config={"rope_parameters": {"rope_theta": 1e6, **SECTIONS}}),
        {"rope_theta": 1e6, "rope_scaling": SECTIONS},
    ),
    (
        Gemma3TextConfig(rope_parameters=GEMMA),
        {"rope_theta": 2e6, "rope_scaling": LINEAR, "rope_local_base_freq": 2e4},
    ),
    (
        Phi3Config(pad_token_id=0, rope_parameters=PARTIAL),
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
]


@pytest.mark.parametrize(("config", "older"), CASES)
def test_rotary_positions_have_the_keys_of_both_versions(tmp_path, config, older):
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    plain = json.loads((tmp_path / "config.json").read_text())
    write_for_transformers_4(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    is_text = "text_config" not in plain
    assert (written if is_text else written["text_config"]) == (plain if is_text else plain["text_config"]) | older
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    after.pop("partial_rotary_factor", None)
    assert after == before


def test_a_tokenizer_has_names_that_both_versions_know(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model")
    tokenizer.save_pretrained(tmp_path)
    write_for_transformers_4(tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in values
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == tokenizer.all_special_tokens and type(again) is type(tokenizer)
    assert again("hi <|end|> there").input_ids == tokenizer("hi <|end|> there").input_ids


def test_a_config_that_lacks_positions_is_left_as_it_is(tmp_path):
    for rotary in (None, {"full_attention": None}):
        values = {"model_type": "gemma3_text", "rope_parameters": rotary}
        (tmp_path / "config.json").write_text(json.dumps(values))
        write_for_transformers_4(tmp_path)  # at the end of a run: it must not fail
        assert json.loads((tmp_path / "config.json").read_text()) == values
