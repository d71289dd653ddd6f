"""On fake GPUs (tests/fake_gpu.py) the kit's own step keeps to its devices, dtypes and bytes, and waits once a step."""

import pytest
from fake_gpu import growth, many, num_per_micro_batch, num_per_step
from helpers import matrix

pytestmark = pytest.mark.slow

# Each method and each topology.
CASES = [
    {"method": "lora", "topology": "fsdp2", "world": 8},
    {"method": "full", "topology": "hybrid", "world": 16},
    {"method": "full", "topology": "ddp", "world": 8},
    {"method": "qlora", "topology": "fsdp2", "world": 8},
    {"method": "qlora", "topology": "single", "world": 1},
    {"method": "full", "packing": True},
]
REST = [
    {"method": "lora", "fp8": True, "topology": "fsdp2", "world": 8},
    {"method": "qlora", "topology": "ddp", "world": 8},
    {"method": "qlora", "packing": True},
]
OFFLOAD = [{"method": method, "topology": "offload", "world": 8} for method in ("full", "qlora")]
LONG = {"length": 512, "micro_batches": 2}
PADDED = {"rows": 2, "micro_batches": 2}  # every other row is a quarter shorter
# Pairs and answers with a label. In full training the reference is given; else its passes are part of a step.
PREFERENCES = [
    PADDED | {"objective": "dpo", "method": "lora", "topology": "fsdp2", "world": 8},
    PADDED | {"objective": "dpo", "method": "full", "topology": "fsdp2", "world": 8},
    PADDED | {"objective": "kto", "method": "qlora"},
    PADDED | {"objective": "kto", "method": "lora", "precompute_reference": True},
    {"objective": "dpo", "method": "lora", "packing": True, "micro_batches": 2},
]


def num_launches(report: dict) -> int:
    """Kernels that a further micro-batch launches."""
    return many(report)["launches"] - report["step of 1 micro-batch"]["launches"]


def ran(report: dict) -> dict:
    """The report of a case that ran through, each tensor on its device and of its dtype."""
    assert "error" not in report, report["error"]
    assert not report["misplaced"]
    return report


@pytest.mark.parametrize("case", matrix(CASES, rest=REST))
def test_a_step_keeps_to_its_devices_dtypes_and_kernels_and_waits_once(fake_gpu, case):
    packs = "packing" in case
    report = ran(fake_gpu(**case, **({"micro_batches": 2} if packs else PADDED)))
    # Of the wide matrix products one is meant: the sum of losses by data set, a vector of float64.
    wide = [name for name in many(report)["products"] if not name.startswith("bfloat16")]
    assert all(name.startswith("float64 kit/tasks/sft/loss.py") for name in wide), wide
    assert num_per_micro_batch(report, "syncs") == 0, report["per micro-batch"]["syncs"]
    assert num_per_step(report, "syncs") <= 1, report["step of 1 micro-batch"]["syncs"]
    assert num_per_micro_batch(report, "pageable") == 0, report["per micro-batch"]["pageable"]
    kernels = {name.removesuffix("_backward") for name in many(report)["attention"]}
    if packs:
        assert any("varlen" in name or "flash_attention" in name for name in kernels)
    else:
        assert kernels == {"scaled_dot_product_flash_attention"}
    if case.get("topology") == "fsdp2":
        assert growth(report) < 0.02 * many(report)["peaks"]["cuda"]  # with the number of micro-batches


@pytest.mark.parametrize("case", matrix(OFFLOAD[:1], always=0, rest=OFFLOAD))
def test_with_offload_every_tensor_is_on_its_device_and_of_its_dtype(fake_gpu, case):
    report = ran(fake_gpu(**PADDED, **case))
    assert "optimiser" not in many(report)["components"]["cuda"]
    assert many(report)["components"]["cpu"]["optimiser"] > 0


@pytest.mark.parametrize("case", matrix(CASES[:1], rest=[CASES[2], *REST[:2]]))
def test_offloaded_inputs_of_layers_wait_in_pinned_memory_and_the_host_for_none_of_them(fake_gpu, case):
    plain, offloaded = (ran(fake_gpu(**LONG, **case, activation_offload=offloads)) for offloads in (False, True))
    size, layers = 2 * 512 * 128, 4
    if (case["method"], case["topology"]) in (("full", "single"), ("full", "ddp")):
        size *= 2  # float32
    assert many(offloaded)["peaks"]["cpu"] - many(plain)["peaks"]["cpu"] == pytest.approx(layers * size, rel=0.1)
    assert many(offloaded).get("pageable") == many(plain).get("pageable")
    assert many(offloaded)["syncs"] == many(plain)["syncs"]
    copies = num_launches(offloaded) - num_launches(plain)
    assert copies == 2 * layers
    assert many(offloaded)["peaks"]["cuda"] < many(plain)["peaks"]["cuda"]


@pytest.mark.parametrize("case", matrix(PREFERENCES))
def test_the_references_passes_add_no_wait_no_copy_and_no_peak(fake_gpu, case):
    report = ran(fake_gpu(**case))
    step, passes, evaluation = many(report), report["passes without gradients"], report["evaluation"]
    assert num_per_micro_batch(report, "syncs") == 0, report["per micro-batch"]["syncs"]
    assert num_per_step(report, "syncs") == 1, report["step of 1 micro-batch"]["syncs"]
    assert "syncs" not in passes and sum(evaluation["syncs"].values()) == 1
    assert not any(counted.get("pageable") for counted in (step, passes, evaluation)), step.get("pageable")
    assert passes["peaks"]["cuda"] < step["peaks"]["cuda"]
    assert all(name.startswith("bfloat16") for name in step["products"]), step["products"]


@pytest.mark.long
def test_copies_of_hybrid_sharding_send_one_share_of_the_gradients_once_a_step(fake_gpu):
    report = ran(fake_gpu(**PADDED, **CASES[1]))
    share = report["gradient bytes"]  # 4 for each weight of this GPU's shard
    assert num_per_micro_batch(report, "collectives") == 14  # 9 gather weights, 5 reduce gradients inside the copy
    assert many(report)["collectives"]["allreduce"] == 7  # 5 units, the sums for the metrics, and the norm
    assert many(report)["collective_bytes"]["allreduce"] == pytest.approx(share, rel=0.01)


@pytest.mark.release
def test_no_gpu_holds_the_whole_model_while_it_is_loaded(fake_gpu):
    """In 4 bits, which are made on the GPU of rank 0: it holds its shards, and embedding and head."""
    report = ran(fake_gpu(shape="llama-8b", length=512, method="qlora", topology="fsdp2", world=8))
    whole, embedding = 5.7e9, 1.05e9  # bytes
    assert report["build"]["peaks"]["cuda"] < whole / 8 + 2.1 * embedding
