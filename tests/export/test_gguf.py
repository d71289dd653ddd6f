"""GGUF files are llama.cpp's own; what it cannot convert is said before weights are read, what is not compared too.

Most tests have a stand-in of the converter. With llama.cpp itself: docs/after-training.md.
"""

import json
import os
import sys

import pytest
from helpers import FAKE_CONVERTER, ROOT

from kit.errors import TrainingError, UserError
from kit.export import gguf
from kit.export.proof import Rows, Scores
from kit.model.tokenizer import open_tokenizer


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """A folder with a stand-in of the converter, and no package; ``mode`` is why it fails."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(FAKE_CONVERTER)
    (folder / "mode").write_text("")
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "llama_cpp" else object())
    monkeypatch.setattr(gguf.shutil, "which", lambda name: None)
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    return folder


def test_the_converter_is_found_where_it_was_said_in_the_variable_or_in_the_usual_folder(
    llama_cpp, tmp_path, monkeypatch
):
    assert gguf.find_tools(str(llama_cpp), ["f16"], None).converter.parent == llama_cpp
    monkeypatch.chdir(tmp_path)
    assert gguf.find_tools(None, ["f16"], None).converter.parent.name == "llama.cpp"
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=f"no convert_hf_to_gguf.py in {tmp_path}"):
        gguf.find_tools(None, ["f16"], None)


def test_all_that_is_missing_is_reported_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    monkeypatch.setattr(gguf.shutil, "which", lambda name: None)
    with pytest.raises(UserError) as caught:
        gguf.find_tools(str(tmp_path), ["q4_k_m"], None)
    text = str(caught.value)
    assert "git clone --depth 1 https://github.com/ggml-org/llama.cpp" in text and "pip install gguf sentencepi" in text
    assert "q4_k_m needs llama-quantize, or the package llama-cpp-python" in text and "3 problems" in text


def test_a_quantiser_that_was_built_needs_no_package(llama_cpp):
    with pytest.raises(UserError, match="q4_k_m needs llama-quantize"):
        gguf.find_tools(str(llama_cpp), ["q4_k_m"], None)
    program = llama_cpp / "build/bin/llama-quantize"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport sys, shutil\nshutil.copy(sys.argv[1], sys.argv[2])\n")
    program.chmod(0o755)
    tools = gguf.find_tools(str(llama_cpp), ["q4_k_m"], None)
    folder = llama_cpp / "out"
    folder.mkdir()
    plain = ROOT / "recipes/tiny/model"
    files = gguf.write_gguf(tools, plain, folder, "mine", ["q4_k_m", "f16"])
    assert sorted(os.listdir(folder)) == ["mine-F16.gguf", "mine-Q4_K_M.gguf"]  # what was between them is gone
    assert list(files) == ["f16", "q4_k_m"]
    words = [json.loads(line)[-1] for line in (llama_cpp / "log.jsonl").open()]
    assert words == ["f16", "f32"]  # quantised from the precision of the weights
    program.write_text("#!/bin/sh\necho no tensor can be quantised >&2\nexit 3\n")
    with pytest.raises(TrainingError, match=r"Q4_K_M\.gguf: no tensor can be quantised"):
        gguf.write_gguf(tools, plain, folder, "mine", ["q4_k_m"])


class Settings:
    model_name_or_path = str(ROOT / "recipes/tiny/model")


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("NotImplementedError: BPE pre-tokenizer was not recognized - x", "does not know how this tokenizer splits"),
        ("Model NewForCausalLM is not supported", r"does not take .*\(Model NewForCausalLM is not supported\)"),
    ],
)
def test_what_the_converter_does_not_know_is_one_message_before_weights_are_read(llama_cpp, tmp_path, mode, says):
    from kit.config.settings.method import MethodSettings
    from kit.model.load import open_config

    settings = MethodSettings(model_name_or_path=Settings.model_name_or_path)
    (llama_cpp / "mode").write_text(mode)
    tools = gguf.find_tools(str(llama_cpp), ["f16"], None)
    with pytest.raises(UserError, match=says):
        gguf.check_tokenizer(tools, settings, open_config(settings), open_tokenizer(settings), tmp_path / "work")
    (words,) = [json.loads(line) for line in (llama_cpp / "log.jsonl").open()]
    assert words[-1] == "--vocab-only" and not list((tmp_path / "work").rglob("*.safetensors"))


def test_a_name_for_the_way_of_splitting_is_found_by_comparing_ids(llama_cpp, tmp_path, monkeypatch):
    tools = gguf.Tools(llama_cpp / "convert_hf_to_gguf.py", None, True)
    tokenizer = open_tokenizer(settings_of_tiny())
    right = gguf._texts(tokenizer)

    def answers(file, asked):
        wrong = [] if asked["pre"] == "smollm" else [0]
        return {"ids": [[*wrong, *ids] for _, ids in right]}

    monkeypatch.setattr(gguf, "_ask", answers)
    chosen, (line,) = gguf._try_pretokenisers(tools, tmp_path / "v.gguf", tokenizer)
    assert chosen.pretokeniser == "smollm" and f"for {len(right)} of {len(right)} texts" in line
    monkeypatch.setattr(gguf, "_ask", lambda file, asked: {"ids": [[0]] * len(right)})
    with pytest.raises(UserError, match="no name that it has for this gives the same ids"):
        gguf._try_pretokenisers(tools, tmp_path / "v.gguf", tokenizer)


def settings_of_tiny():
    from kit.config.settings.method import MethodSettings

    return MethodSettings(model_name_or_path=Settings.model_name_or_path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}", True),
        ("{{ messages[0].content }}", False),
        (None, None),
    ],
)
def test_bos_is_added_by_servers_only_where_training_had_it(tmp_path, template, expected):
    tokenizer = open_tokenizer(settings_of_tiny())
    tokenizer.chat_template = template
    gguf.prepare_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()).get("add_bos_token") is expected
    written = tmp_path / "chat_template.jinja"
    assert written.is_file() == bool(template) and (template is None or "generation" not in written.read_text())


def test_marks_of_transformers_are_taken_out_of_a_template_without_a_change_of_its_text():
    import jinja2

    marked = "a {%- generation -%} b {{ 1 }} {%- endgeneration %} c{% generation %}d{%endgeneration%}"
    assert jinja2.Template(gguf.without_marks(marked)).render() == "ab 1 cd"


def test_without_the_package_a_line_says_that_nothing_was_compared(llama_cpp, tmp_path):
    tools = gguf.find_tools(str(llama_cpp), ["f16"], None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (line,), has_bos = gguf.check_gguf(tools, tmp_path / "a.gguf", Rows([], [], ""), None, Scores(None, None), 0.1)
    assert "was written and NOT compared: pip install llama-cpp-python" in line and not has_bos


def test_a_crash_of_llama_cpp_is_named_with_a_build_that_may_not(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setattr(gguf, "_WORKER", worker)
    with pytest.raises(TrainingError, match=r"cannot open a\.gguf: SIGSEGV ended it\. .*-DGGML_NATIVE=OFF pip install"):
        gguf._ask(tmp_path / "a.gguf", {})


def test_the_bounds_grow_as_bits_become_fewer():
    bounds = [gguf.BOUNDS[name] for name in ("f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")]
    assert bounds == sorted(bounds) and set(gguf.BOUNDS) == {*gguf.CONVERTED, *gguf.QUANTISED}
