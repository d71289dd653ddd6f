import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.data.feed.batches import Collator
from kit.data.samples.records import Table
from kit.model.layers.checkpointing import enable_checkpointing
from kit.model.layers.loss_head import install_loss_head

LENGTHS = (13, 5, 24, 9, 6)
FAMILIES = ("qwen3_5_text", "gpt_oss", "falcon")  # a recurrent layer, masks without positions, ALiBi


def make_model(family, checkpointing=False):
    config = tiny_config(family)
    if family == "falcon":  # six heads: slopes that bf16 rounds
        config.alibi, config.hidden_size, config.num_attention_heads = True, 48, 6
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # larger than at the start, so that samples that mix differ by much
        torch.nn.init.normal_(parameter, std=0.2)
    if checkpointing:
        enable_checkpointing(model, True)
    install_loss_head(model)
    return model.train()


class Samples(Table):
    """Rows of random tokens for the collator; all but the first token of each are learned."""

    def __init__(self):
        lengths, rng = np.array(LENGTHS), np.random.default_rng(1)
        self.ids = [rng.integers(1, 64, length) for length in LENGTHS]
        records = {"length": lengths, "num_targets": lengths - 1, "target_weight": lengths - 1.0}
        super().__init__(records, np.zeros(len(LENGTHS), np.int64))

    def __getitem__(self, i):
        return self.ids[i], np.ones(LENGTHS[i])


def losses(model, items, packing):
    """Of each target, in the order of the samples; ``items`` are the samples of each row."""
    batch = Collator(9, pad_token_id=0, packing=packing, max_length=64).collate(Samples(), [np.array(i) for i in items])
    found = model(**batch.model_inputs())
    order = torch.from_numpy(np.concatenate([np.full(LENGTHS[i] - 1, i) for item in items for i in item]))
    return found[order.argsort(stable=True)]


def gradients(model):
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def test_samples_have_in_a_pack_the_losses_and_gradients_that_they_have_alone():
    for family in FAMILIES:
        model = make_model(family)
        alone = losses(model, [[0], [1], [2], [3], [4]], packing=False)
        alone.sum().backward()
        expected = gradients(model)
        for is_checkpointed in (False, True):
            model = make_model(family, is_checkpointed)
            packed = losses(model, [[2, 4, 0], [3, 1]], packing=True)  # the second row ends with padding
            packed.sum().backward()
            torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(gradients(model), expected, atol=1e-3, rtol=1e-4)
