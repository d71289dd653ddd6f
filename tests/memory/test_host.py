"""Host memory and disk space of a run."""

from dataclasses import replace

from kit.memory import host
from kit.memory.formulas import predict
from kit.memory.host import host_memory
from kit.memory.workload import Workload
from kit.strategy.strategies import FSDP2
from kit.tools.plan.models import find_shape

BASE = Workload(shape=find_shape("llama-8b"), method="full", strategy=FSDP2, num_gpus=16, gpus_per_machine=8)
SHAPE = BASE.shape.num_parameters


def test_host_and_disk_hold_what_a_save_writes():
    memory = predict(BASE)
    assert memory.host["asynchronous checkpoint"] == 12 * SHAPE // 2  # half of the ranks are on a machine
    assert memory.disk["checkpoints"] == 3 * 12 * SHAPE  # two are kept while a third is written
    matrices = BASE.trained_in_matrices
    for changes, size in (
        ({"save_only_model": True}, 4 * SHAPE),
        ({"optim": "adamw_8bit"}, 6 * SHAPE),
        ({"optim": "muon"}, 12 * SHAPE - 4 * matrices),
        ({"optim": "adamw_bf16", "pure_bf16": True}, 6 * SHAPE),
    ):
        assert predict(replace(BASE, **changes)).disk["checkpoints"] == 3 * size, changes
    served = predict(replace(BASE, publishes=True))
    assert served.host["weights for the vLLM server"] == served.disk["weights for the vLLM server"] == 4 * SHAPE


def test_host_memory_is_that_of_loading_or_of_training():
    assert "loading" not in predict(BASE).host
    unsaved = predict(replace(BASE, async_save=False)).host
    assert "asynchronous checkpoint" not in unsaved and unsaved["loading"] == 4 * SHAPE
    lora = predict(replace(BASE, method="lora")).host  # small copies; rank 0 reads bf16 weights
    assert lora["loading"] == 2 * SHAPE
    qlora = predict(replace(BASE, method="qlora")).host
    assert 0.5 * SHAPE < qlora["loading"] < lora["loading"]  # it keeps no weight that it has quantised


def test_offloaded_inputs_of_layers_are_pinned_in_blocks_of_a_power_of_two():
    offloaded = replace(BASE, length=3000, gradient_checkpointing=True, activation_offload=True)
    assert predict(offloaded).host["offloaded activations"] == 8 * 32 * 2**25  # 3,000 x 8,192 bytes are 23.4 MiB
    assert "offloaded activations" not in predict(replace(offloaded, gradient_checkpointing=False)).host


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    whole, _ = host_memory()
    (tmp_path / "memory.current").write_text("200\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_memory() == (1000, 800)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()[0] == whole
