"""Packed samples do not attend to each other; everything that is not packed is sdpa's."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MistralConfig,
    Qwen2Config,
)

import kit.model.layers.attention
from kit.model.layers.attention import (
    VARLEN,
    needs_mask,
    register_varlen,
    turn_off_cudnn_if_masked,
    why_not_varlen,
)

LENGTHS = [[7, 9, 5, 3], [12, 10, 2]]  # of the samples in two rows of 24 tokens; the last of each is padding


def llama(implementation, **changes):
    """A random Llama whose weights are large enough for a leak to be seen."""
    shape = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    shape |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    register_varlen()
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**shape | changes), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.dim() > 1 else 1
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.3  # not what attention would take by default
    return model.eval()


def ids(*shape, seed=0):
    return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(seed))


def packed(rows=LENGTHS):
    """A micro-batch as a packed call takes it."""
    lengths = torch.tensor([length for row in rows for length in row])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {
        "input_ids": ids(len(rows), sum(rows[0])),
        "position_ids": torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows]),
        "use_cache": False,
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def samples(batch, values):
    """``values`` [B, T, ...] cut at the borders of the samples."""
    return values.flatten(0, 1).split(batch["cu_seq_lens_q"].diff().tolist())


def computed(model, calls):
    """The logits of each call, and the gradients of the summed log-likelihoods of one token after each position."""
    logits = [model(**call).logits for call in calls]
    sum(each.log_softmax(-1)[..., 7].sum() for each in logits).backward()
    return logits, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4 * b[name].abs().max().item(), msg=name)


def test_a_packed_sample_has_the_logits_and_gradients_it_has_alone(monkeypatch):
    for rows in [LENGTHS[:1], LENGTHS, [[24]]]:
        batch = packed(rows)
        alone = [{"input_ids": each[None], "use_cache": False} for each in samples(batch, batch["input_ids"])]
        expected, gradients = computed(llama(VARLEN), alone)
        (together,), found = computed(llama(VARLEN), [batch])
        pairs = list(zip(samples(batch, together), expected, strict=True))
        assert max((a - b[0]).abs().max().item() for a, b in pairs) < 1e-4, rows
        assert_close(found, gradients)
    (leaking,), _ = computed(llama(VARLEN), [{"input_ids": packed()["input_ids"], "use_cache": False}])
    assert (leaking - computed(llama(VARLEN), [packed()])[0][0]).abs().max() > 0.1
    monkeypatch.delattr(kit.model.layers.attention, "sdpa_mask")
    llama(VARLEN)(**packed())  # builds no dense mask


def padded():
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    mask[2, :4] = 0
    return {"input_ids": ids(3, 10), "attention_mask": mask}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padded_batches_and_generation_give_the_same_as_with_sdpa(cache):
    batch = padded()
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        for use_cache in (False, True):
            ours, theirs = (llama(name)(**batch, use_cache=use_cache).logits for name in (VARLEN, "sdpa"))
            assert torch.equal(ours[seen], theirs[seen])
    batch = {name: tensor[[0, 2]] for name, tensor in batch.items()}
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    ours, theirs = (llama(name).generate(**batch, **options) for name in (VARLEN, "sdpa"))
    assert ours.shape == (2, 18) and torch.equal(ours, theirs)


def test_options_that_a_packed_call_would_ignore_are_refused():
    for change, message in (
        ({"cu_seq_lens_q": torch.tensor([0, 24, 46], dtype=torch.int32)}, "48"),  # a token of no sample
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "is_causal"),
        ({"use_cache": True}, "use_cache"),
        ({"something_new": 1}, "something_new"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            llama(VARLEN)(**packed() | change)
    cache = llama(VARLEN)(packed()["input_ids"], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values: 24 earlier tokens"):
        llama(VARLEN)(**packed(), past_key_values=cache)


def test_where_no_kernel_takes_groups_each_head_of_queries_gets_its_keys_with_the_same_gradients(monkeypatch):
    """sdpa with enable_gqa may fall back to mathematics: https://github.com/pytorch/pytorch/issues/187770."""
    batch = packed()
    _, expected = computed(llama(VARLEN), [batch])
    monkeypatch.setattr(kit.model.layers.attention, "takes_groups", lambda key: False)
    heads, plain = set(), torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, *args, **kwargs):
        heads.add((query.shape[1], key.shape[1]))
        return plain(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    assert_close(computed(llama(VARLEN), [batch])[1], expected)
    assert heads == {(4, 4)}


def test_padding_on_the_right_needs_a_mask_only_where_a_token_could_see_it():
    cases = [
        (LlamaConfig(), False),
        (Gemma3Config(), False),
        (LlamaConfig(is_causal=False), True),
        (LlamaConfig(use_bidirectional_attention=True), True),
        (MiniMaxConfig(), True),
    ]
    for config, needed in cases:
        assert needs_mask(config) == needed, (config, needed)


def test_cudnn_attends_only_where_no_step_has_a_mask():
    try:
        for config, attention, packing, router_loss, stays in (
            (LlamaConfig(), "sdpa", False, False, True),
            (LlamaConfig(), VARLEN, True, False, True),
            (LlamaConfig(), "sdpa", True, False, False),  # a mask keeps the samples of a pack apart
            (LlamaConfig(), "sdpa", False, True, False),
            (MistralConfig(sliding_window=64), "sdpa", False, False, False),
            (MiniMaxConfig(), "sdpa", False, False, False),
        ):
            torch.backends.cuda.enable_cudnn_sdp(True)
            turn_off_cudnn_if_masked(config, attention, packing, router_loss)
            assert torch.backends.cuda.cudnn_sdp_enabled() == stays, (config.model_type, attention, packing)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_why_a_model_cannot_use_packed_attention():
    cases = [
        (LlamaConfig(), ""),
        (Qwen2Config(use_sliding_window=True, max_window_layers=20), "layers of sliding_attention"),
        (MistralConfig(), "a sliding window of 4096 tokens"),
        (Gemma2Config(), "a model class that supports eager attention only"),
        (Llama4TextConfig(), "layers of chunked_attention"),
        (LlamaConfig(attention_dropout=0.1), "attention_dropout 0.1"),
        (LlamaConfig(is_causal=False), "attention that is not causal"),
        (DeepseekV3Config(), "value heads of another size than query heads"),
        (JambaConfig(), "a model class with its own kernels"),
    ]
    for config, reason in cases:
        found = why_not_varlen(config)
        assert found.startswith(reason) and bool(found) == bool(reason), config
