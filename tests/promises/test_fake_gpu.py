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
PADDED = {"rows": 2, "micro_batches": 2}  # every other row is a quarter shorter
# Pairs and answers with a label. In full training the reference is given; else its passes are part of a step.
PREFERENCES = [
    PADDED | {"objective": "dpo", "method": "lora", "topology": "fsdp2", "world": 8},
    PADDED | {"objective": "dpo", "method": "full", "topology": "fsdp2", "world": 8},
    PADDED | {"objective": "kto", "method": "qlora"},
    PADDED | {"objective": "kto", "method": "lora", "precompute_reference": True},
    {"objective": "dpo", "method": "lora", "packing": True, "micro_batches": 2},
]


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
