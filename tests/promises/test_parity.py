"""The topology does not change the maths: equal losses and gradient norms under any sharding."""

import shutil

import pytest
import torch
from helpers import matrix
from transformers import MixtralConfig, MixtralForCausalLM

pytestmark = pytest.mark.slow

# Others: the covering array.
TOPOLOGIES = {"ddp on three": ("ddp", 3, 1), "hybrid": ("fsdp_hybrid", 4, 2)}


@pytest.mark.parametrize(
    "data",
    matrix(
        [
            {"method": "lora", "packing": True, "dataset": "mixed"},
            {"method": "full"},
            {"method": "lora", "streaming": True, "dataset": "mixed"},
        ]
    ),
)
def test_every_topology_gives_the_losses_of_one_process_with_micro_batch_one(finetune, fp32, chat_file, tmp_path, data):
    flags = {"max_steps": 3, "global_batch_size": 24, "learning_rate": 2e-3, **data}
    if data.get("dataset") == "mixed":
        (tmp_path / "few.jsonl").write_text("".join(f"{line}\n" for line in chat_file.read_text().splitlines()[:7]))
        flags["dataset"] = f"[{{path: {chat_file}, weight: 3}}, {{path: {tmp_path / 'few.jsonl'}, weight: 1}}]"
    reference = finetune.ok("reference", config=fp32["single"], **flags | {"per_device_train_batch_size": 1})
    assert len(reference.rows) == 3
    for name, (config, processes, micro_batch) in TOPOLOGIES.items():
        run = finetune.ok(
            name.replace(" ", "-"),
            processes,
            config=fp32[config],
            **flags | {"per_device_train_batch_size": micro_batch},
        )
        losses = [row["loss"] for row in run.rows]
        assert losses == pytest.approx([row["loss"] for row in reference.rows], rel=1e-6), name
        sources = [key for key in reference.rows[0] if key.startswith(("loss/", "tokens/"))]
        assert len(sources) == (4 if "dataset" in data else 0)
        for key in sources:
            pairs = [(row.get(key), other.get(key)) for row, other in zip(run.rows, reference.rows, strict=True)]
            assert [a for a, _ in pairs if a] == pytest.approx([b for _, b in pairs if b], rel=1e-6), (name, key)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=5e-6), name


def test_the_load_balancing_loss_is_the_same_under_ddp_and_fsdp(finetune, fp32, model_folder, tmp_path):
    """In equal micro-batches, on which it depends: of two packs, padded."""
    base = shutil.copytree(model_folder, tmp_path / "base")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(vocab_size=320, pad_token_id=0, **heads, **shape)).save_pretrained(base)
    flags = {"model_name_or_path": base, "method": "full", "packing": True, "router_aux_loss_coef": 0.5, "max_steps": 2}
    of_ddp, *others = (finetune.ok(each, 2, config=fp32[each], **flags) for each in ("ddp", "fsdp", "fsdp1"))
    for key in ("router_loss", "loss", "grad_norm"):
        expected = [row[key] for row in of_ddp.rows]
        for run in others:
            assert [row[key] for row in run.rows] == pytest.approx(expected, rel=1e-6), (run.folder.name, key)


def test_the_final_model_holds_the_frozen_weights_as_they_were(finetune, fp32, model_folder):
    from safetensors.torch import load_file

    frozen = {"method": "full", "freeze": "model.embed_tokens*,model.layers.[01].*,lm_head.weight"}
    run = finetune.ok("run", 2, config=fp32["fsdp"], max_steps=2, **frozen)
    before = load_file(model_folder / "model.safetensors")
    after = load_file(run.folder / "final/model.safetensors")
    assert after.keys() == before.keys()
    unchanged = {name for name in before if after[name].float().equal(before[name])}
    assert unchanged == {
        name for name in before if name.startswith(("model.embed", "model.layers.0", "model.layers.1", "lm_head"))
    }
    # The last of three layers, and the last norm.
    assert 0 < run.info["strategy"]["trainable_parameters"] < 20_000
