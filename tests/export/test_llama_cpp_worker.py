"""The worker imports nothing of the kit, and computes log-probabilities from logits."""

import ast
import math
from types import SimpleNamespace

import numpy as np
from helpers import ROOT

from kit.export.llama_cpp_worker import measure


def test_it_imports_only_python_numpy_and_llama_cpp():
    tree = ast.parse((ROOT / "kit/export/llama_cpp_worker.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"ctypes", "json", "sys", "typing", "numpy", "llama_cpp"}


class Llama:
    """Gives each token the id before it plus one, with certainty of two to one."""

    def __init__(self, path, **options):
        assert options["n_ctx"] > 3 and options["logits_all"]
        self.model, self.metadata = None, {"tokenizer.chat_template": "t", "general.name": "n"}

    def reset(self):
        self.scores = np.full((9, 4), -math.inf)

    def eval(self, ids):
        for at, id_ in enumerate(ids):
            self.scores[at, [id_ % 4, (id_ + 1) % 4]] = [5.0, 5.0 + math.log(2)]

    def tokenize(self, text, add_bos, special):
        assert special and not add_bos
        return list(text)


def test_each_compared_token_is_scored_by_the_logits_before_it():
    package = SimpleNamespace(
        Llama=Llama,
        GGML_TYPE_F32=0,
        __version__="1",
        llama_vocab_get_add_bos=lambda vocab: True,
        llama_model_get_vocab=lambda model: None,
    )
    found = measure(package, "f", {"ids": [[0, 1, 1]], "learned": [[1, 2]], "texts": ["ab"]})
    assert found["logprobs"] == [math.log(2 / 3), math.log(1 / 3)] or np.allclose(
        found["logprobs"], [math.log(2 / 3), math.log(1 / 3)]
    )
    assert found["top"] == [1, 2] and found["text_ids"] == [[97, 98]] and found["add_bos"] is True
    assert found["metadata"] == {"tokenizer.chat_template": "t"}
