"""Ask llama.cpp, through the package llama-cpp-python, in a process of its own: ``gguf.py`` starts it.

The path of a GGUF file is the argument; standard input is a JSON object that says what to do, and the last line of
standard output is one with the result. Imports nothing of the kit.
"""

import ctypes
import json
import sys
from typing import Any


def main() -> None:
    """Do what standard input asks for, and print the result."""
    import llama_cpp

    path, asked = sys.argv[1], json.load(sys.stdin)
    if "quantise" in asked:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = asked["ftype"]
        status = llama_cpp.llama_model_quantize(path.encode(), asked["quantise"].encode(), ctypes.byref(params))
        print(json.dumps({"status": status}))
    else:
        print(json.dumps(measure(llama_cpp, path, asked)))


def measure(llama_cpp: Any, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return ids of texts, and the log-probability of each token at the positions asked for.

    Keys and values are kept in float32: a server may keep them in float16, which is no property of the file.
    """
    import numpy as np

    length = max(map(len, asked["ids"]))
    kept = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(path, n_ctx=length + 1, n_batch=length + 1, logits_all=True, verbose=False, **kept)
    logprobs = []
    for ids, compared in zip(asked["ids"], asked["compared"], strict=True):
        model.reset()
        model.eval(ids)
        for at in compared:
            logits = np.asarray(model.scores[at - 1], np.float64)  # [V]
            largest = logits.max()
            logprobs.append(float(logits[ids[at]] - largest - np.log(np.exp(logits - largest).sum())))
    return {
        "version": llama_cpp.__version__,
        "text_ids": [_tokens(model, text) for text in asked["texts"]],
        "logprobs": logprobs,
        "metadata": {key: value for key, value in model.metadata.items() if key == "tokenizer.chat_template"},
    }


def _tokens(model: Any, text: str) -> list[int]:
    found: list[int] = model.tokenize(text.encode(), add_bos=False, special=True)
    return found


if __name__ == "__main__":
    main()
