"""Write ``tokenizer.model``, SentencePiece's file, of a tokenizer that has only ``tokenizer.json``.

llama.cpp's converter reads scores of tokens, which decide what is joined first, from ``tokenizer.model`` alone. Without
it, it gives each token of Llama 2 and Mistral the same score, so that other ids come out, and refuses Gemma and Phi-3.
But transformers saves only ``tokenizer.json`` since version 5.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.system.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # SentencePiece.Type in its proto


def write_sentencepiece(folder: Path, prompt: str) -> dict[str, Any]:
    """Write ``tokenizer.model`` beside ``tokenizer.json`` in ``folder``, if that is the BPE of SentencePiece.

    SentencePiece joins the pair of the highest score first, and a tokenizer of ``tokenizer.json`` that of the first
    merge, so the score of a token is the rank of the first merge that makes it, negated.

    Args:
        prompt: a conversation in the chat template; empty if there is none.

    Returns:
        What the converter reads of it from ``tokenizer_config.json``; empty if nothing was written.

    Raises:
        UserError: a package is missing.
    """
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if not _is_bpe_of_bytes(values):
        return {}
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        found = "the tokenizer is SentencePiece's, and its file is written with protobuf"
        raise UserError("--format gguf", found, fix="pip install sentencepiece protobuf") from None
    model = values["model"]
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault("".join(pair if isinstance(pair, list) else pair.split(" ")), rank)
    added = {token["id"]: token for token in values["added_tokens"]}
    names = {number: name for name, number in model["vocab"].items()} | {
        i: each["content"] for i, each in added.items()
    }
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made when it is imported
    for number in range(max(names) + 1):
        name = names.get(number, f"<unused of {number}>")
        kind = _NORMAL if number in names else _UNUSED
        if name == _unknown(model):
            kind = _UNKNOWN
        elif number in added:
            kind = _CONTROL if added[number]["special"] else _USER_DEFINED
        elif len(name) == 6 and name.startswith("<0x"):
            kind = _BYTE
        proto.pieces.add(piece=name, score=-ranks.get(name, len(ranks)), type=kind)
    has_prefix = _has_prefix(values, prompt)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.vocab_size = len(proto.pieces)
    proto.trainer_spec.unk_id = model["vocab"][_unknown(model)]
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = has_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    keys = ("content", "special")
    decoder = {str(i): {key: token[key] for key in keys} for i, token in sorted(added.items())}
    return {"added_tokens_decoder": decoder, "add_prefix_space": has_prefix}


def _is_bpe_of_bytes(values: Mapping[str, Any]) -> bool:
    model = values["model"]
    return model.get("type") == "BPE" and bool(model.get("byte_fallback")) and _unknown(model) in model["vocab"]


def _unknown(model: Mapping[str, Any]) -> str:
    """The token that SentencePiece must have, also where each character has bytes."""
    return str(model.get("unk_token") or "<unk>")


def _has_prefix(values: Mapping[str, Any], prompt: str) -> bool:
    """Whether llama.cpp must put a space before a text, which it then also does after each special token."""
    parts: list[Mapping[str, Any]] = []
    for name, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        part = values[name] or {}
        parts += part[inner] if part.get("type") == "Sequence" else [part]
    kinds = [
        part.get("prepend_scheme", "always") if part.get("type") == "Metaspace" else part.get("type") for part in parts
    ]
    begins_with_token = any(prompt.startswith(token["content"]) for token in values["added_tokens"])
    # "first": none after a special token, so none at all if each prompt begins with one
    return "Prepend" in kinds or "always" in kinds or ("first" in kinds and not begins_with_token)
