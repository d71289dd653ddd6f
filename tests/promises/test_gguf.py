"""A GGUF file answers in llama.cpp as ``kit chat`` does.

Needs the package llama-cpp-python, and ``LLAMA_CPP``, the folder of llama.cpp with its converter.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.release,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"),
    pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP is not set"),
]
NUM_QUESTIONS = 8


def kit(folder, *words, asked=""):
    command = [sys.executable, "-m", "kit.cli.main", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, input=asked, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_trained_adapter_answers_in_llama_cpp_as_in_the_kit(tmp_path):
    from llama_cpp import Llama

    kit(tmp_path, "train", "--config", "single", "--method", "lora", "--output_dir", "run")
    rows = [json.loads(line) for line in (ROOT / "recipes/tiny/eval.jsonl").read_text().splitlines()]
    questions = [row["messages"][0]["content"] for row in rows[:NUM_QUESTIONS]]
    expected = kit(tmp_path, "chat", "run", asked="\n".join(questions) + "\n").splitlines()
    assert len(set(expected)) == NUM_QUESTIONS  # it has learned to answer each

    flags = "--output_dir gguf --format gguf --gguf_type f16,q8_0,q4_k_m --pre_tokenizer superbpe"
    said = kit(tmp_path, "export", "run", *flags.split())
    assert said.count("in llama.cpp") == said.count("against transformers") == 3
    for name in ("F16", "Q8_0", "Q4_K_M"):
        model = Llama(str(tmp_path / f"gguf/run-{name}.gguf"), n_ctx=256, verbose=False)
        for question, answer in zip(questions, expected, strict=True):
            messages = [{"role": "user", "content": question}]
            found = model.create_chat_completion(messages, temperature=0, max_tokens=64)
            assert found["choices"][0]["message"]["content"] == answer, name
