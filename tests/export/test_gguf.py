"""GGUF files are llama.cpp's own; what it cannot convert is said before weights are read, what is not compared too.

Most tests have a stand-in of the converter. With llama.cpp itself: docs/after-training.md.
"""

import json
import os
from pathlib import Path

import pytest
from helpers import FAKE_CONVERTER, ROOT

from kit.config.settings.method import MethodSettings
from kit.export import gguf
from kit.model.build import open_config
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.errors import TrainingError, UserError


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """A folder with a stand-in of the converter, and no package; ``mode`` is why it fails."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(FAKE_CONVERTER)
    (folder / "mode").write_text("")
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "llama_cpp" else object())
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    return folder


def test_all_that_is_missing_is_reported_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        gguf.find_tools(str(tmp_path), ["q4_k_m"], None)
    text = str(caught.value)
    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in text and "pip install gguf sentencepi" in text
    assert "q4_k_m needs the package llama-cpp-python" in text and "3 problems" in text


def settings_of_tiny():
    return MethodSettings(model_name_or_path=str(ROOT / "recipes/tiny/model"))


def test_what_the_converter_does_not_know_is_one_message_before_weights_are_read(llama_cpp, tmp_path):
    settings = settings_of_tiny()
    for mode, says in (
        ("NotImplementedError: BPE pre-tokenizer was not recognized - x", "does not know how this tokenizer splits"),
        ("Model NewForCausalLM is not supported", r"does not take .*\(Model NewForCausalLM is not supported\)"),
    ):
        (llama_cpp / "mode").write_text(mode)
        tools, work = gguf.find_tools(str(llama_cpp), ["f16"], None), tmp_path / mode[:5]
        with pytest.raises(UserError, match=says):
            gguf.check_tokenizer(tools, settings, open_config(settings), open_tokenizer(settings), work)
        assert not list(work.rglob("*.safetensors"))


def test_quantised_files_are_made_of_one_in_the_precision_of_the_weights(llama_cpp, tmp_path, monkeypatch):
    tools = gguf.Tools(llama_cpp / "convert_hf_to_gguf.py", True)

    def ask(file, asked):
        Path(asked["quantise"]).write_bytes(file.read_bytes())
        return {"status": asked["ftype"] == 10}

    monkeypatch.setattr(gguf, "_ask", ask)
    folder = tmp_path / "out"
    folder.mkdir()
    plain = ROOT / "recipes/tiny/model"
    files = gguf.write_gguf(tools, plain, folder, "mine", ["q4_k_m", "f16"])
    assert sorted(os.listdir(folder)) == ["mine-F16.gguf", "mine-Q4_K_M.gguf"]  # what was between them is gone
    assert list(files) == ["q4_k_m", "f16"]
    assert [json.loads(line)[-1] for line in (llama_cpp / "log.jsonl").open()] == ["f16", "f32"]
    with pytest.raises(TrainingError, match="failed to write mine-Q2_K"):
        gguf.write_gguf(tools, plain, folder, "mine", ["q2_k"])


def test_bos_is_added_by_servers_only_where_training_had_it(tmp_path):
    tokenizer = open_tokenizer(settings_of_tiny())
    for template, expected in (
        (None, None),
        ("{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}", True),
        ("{{ messages[0].content }}", False),
    ):
        tokenizer.chat_template = template
        gguf.prepare_tokenizer(tokenizer, tmp_path)
        assert json.loads((tmp_path / "tokenizer_config.json").read_text()).get("add_bos_token") is expected
        written = tmp_path / "chat_template.jinja"
        assert written.is_file() == bool(template) and (template is None or "generation" not in written.read_text())
