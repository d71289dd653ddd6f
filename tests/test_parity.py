"""The topology does not change the maths: the same losses and gradient norms whatever the sharding."""

import pytest

pytestmark = pytest.mark.slow

TOPOLOGIES = {
    "one micro-batch": ("single", 1, 8),
    "ddp": ("ddp", 2, 2),
    "ddp on three": ("ddp", 3, 1),
    "fsdp2": ("fsdp", 2, 4),
    "fsdp1": ("fsdp1", 2, 1),
}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_topology_gives_the_losses_of_one_process_with_micro_batch_one(finetune, fp32, method):
    flags = {
        "method": method,
        "max_steps": 12,
        "gradient_checkpointing": method == "lora",
        "global_batch_size": 24,
        "learning_rate": 2e-3,
    }
    reference = finetune.ok("reference", config=fp32["single"], **flags | {"per_device_train_batch_size": 1})
    assert len(reference.rows) == 12
    for name, (config, processes, micro_batch) in TOPOLOGIES.items():
        run = finetune.ok(
            name.replace(" ", "-"),
            processes,
            config=fp32[config],
            **flags | {"per_device_train_batch_size": micro_batch},
        )
        losses = [row["loss"] for row in run.rows]
        assert losses == pytest.approx([row["loss"] for row in reference.rows], rel=1e-6), name
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=5e-6), name
