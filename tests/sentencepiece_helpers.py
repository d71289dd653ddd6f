"""Small tokenizers of SentencePiece's kind: each character that is not known becomes bytes."""

from collections import Counter

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kit.export.proof import TEXTS

SPECIAL = ["<unk>", "<s>", "</s>"]
# As in Llama 2 as it was first converted, in later conversions of it, and in Gemma.
PREFIXED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
PARTS = {
    "prepend": (PREFIXED, None),
    "metaspace": (None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)),
    "plain": (normalizers.Replace(" ", "▁"), None),
}


def tokenizer_of(kind, unknown="<unk>"):
    """A BPE whose merges are all pairs that make a token, in the order of the tokens, as SentencePiece joins them."""
    words = Counter()
    for text in TEXTS:
        marked = text.replace(" ", "▁")
        words.update(marked[i : i + size] for size in (2, 3, 4) for i in range(len(marked) - size + 1))
    characters = sorted({each for word in words for each in word})[1::2]  # the others are read as bytes
    known = [(word, count) for word, count in words.items() if set(word) <= set(characters)]
    joined = [word for word, _ in sorted(known, key=lambda pair: (len(pair[0]), -pair[1], pair[0]))][:400]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *characters]
    vocab = {token: number for number, token in enumerate(tokens)}
    splits = [(word[:at], word[at:]) for word in joined for at in range(1, len(word))]
    merges = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    normalizer, pre_tokenizer = PARTS[kind]
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
