"""A plan by simulation runs the kit's own step in a process of its own, without weights and without CUDA."""

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import ROOT, matrix, typed

from kit.errors import TrainingError, UserError
from kit.memory.formulas import predict
from kit.memory.operations import operations_per_token
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD, SINGLE
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.models import find_shape
from kit.tools.plan.simulate import simulate
from kit.tools.plan.speed import collective_seconds

METHODS = ("full", "lora", "qlora")


@pytest.fixture
def forked(monkeypatch):
    """The process of a simulation begins after the slow imports."""

    def run(command, input, timeout, **_):
        return typed(*command[1:], text=input, timeout=timeout)

    names = {"run": run, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr("kit.tools.plan.simulate.subprocess", SimpleNamespace(**names))


TINY = Workload(shape=find_shape(str(ROOT / "recipes/tiny/model")), method="lora", length=64, micro_batches=2)


@pytest.mark.slow
def test_the_update_is_counted_once_in_a_step_of_several_micro_batches():
    one, three = (simulate(replace(TINY, micro_batches=number)) for number in (1, 3))
    assert 2 * one.launches < three.launches < 3 * one.launches - 100  # 56 weights of adapters, clipped and updated
    assert three.flops == 3 * one.flops


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(UserError, match=r"no config\.json"):
        simulate(replace(TINY, shape=replace(TINY.shape, folder=None)))
    with pytest.raises(UserError, match="qlora with offload"):
        simulate(replace(TINY, method="qlora", strategy=OFFLOAD, num_gpus=8))


@pytest.mark.slow
def test_a_simulation_ends_at_its_deadline():
    with pytest.raises(TrainingError, match=r"longer than 0\.1 s"):
        simulate(TINY, deadline_seconds=0.1)


@pytest.mark.slow
def test_an_error_of_the_run_is_reported():
    with pytest.raises(TrainingError, match="no_such_module"):
        simulate(replace(TINY, lora_targets=("no_such_module",)))


@pytest.mark.usefixtures("forked")
@pytest.mark.long
@pytest.mark.slow
def test_full_logits_are_what_plain_transformers_holds_more():
    workload = Workload(shape=find_shape("llama-1b"), method="lora", length=4096, gradient_checkpointing=True)
    ours, plain = simulate(workload), simulate(replace(workload, loss="whole"))
    logits = 4 * workload.length * workload.shape.vocab_size
    assert plain.tensors - ours.tensors > logits


@pytest.mark.usefixtures("forked")
@pytest.mark.long
@pytest.mark.slow
def test_packs_are_simulated():
    assert simulate(replace(TINY, packing=True)).tensors > 0
    assert simulate(replace(TINY, packing=True, loss="whole")).tensors > 0


COPIES = {"strategy": HYBRID, "num_gpus": 16, "num_replicas": 2}
# Each method and each strategy.
CASES = [
    {"method": "full", "strategy": FSDP2, "num_gpus": 8},
    {"method": "lora", "strategy": DDP, "num_gpus": 8},
    {"method": "qlora", "strategy": SINGLE, "num_gpus": 1},
    {"method": "lora", "strategy": OFFLOAD, "num_gpus": 8},
    {"method": "full", **COPIES},
    {"method": "lora", "strategy": FSDP2, "num_gpus": 8, "objective": "dpo"},
]
REST = [
    {"method": method, "strategy": strategy, "num_gpus": gpus}
    for method in METHODS
    for strategy, gpus in ((SINGLE, 1), (FSDP2, 8), (DDP, 8))
]
REST += [{"method": method, "strategy": OFFLOAD, "num_gpus": 8} for method in ("full", "lora")]
REST += [{"method": method, **COPIES} for method in METHODS]
REST += [
    {"method": method, "strategy": SINGLE, "num_gpus": 1, "objective": objective}
    for method, objective in (("lora", "kto"), ("full", "dpo"), ("qlora", "orpo"))
]


TOPOLOGIES = {SINGLE: "single", DDP: "ddp", FSDP2: "fsdp2", HYBRID: "hybrid", OFFLOAD: "offload"}


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize("case", matrix(CASES, always=0, rest=REST))
def test_the_cpu_device_holds_what_fake_cuda_holds(fake_gpu, case):
    simulated = simulate(replace(TINY, **case, gradient_checkpointing=True))
    topology = TOPOLOGIES[case["strategy"]]
    same = {key: value for key, value in case.items() if key not in ("strategy", "num_gpus", "num_replicas")}
    report = fake_gpu(topology=topology, world=case["num_gpus"], length=64, micro_batches=2, **same)
    assert "error" not in report, report["error"]
    step = report["step of 2 micro-batches"]
    assert simulated.tensors == pytest.approx(step["peaks"]["cuda"], rel=0.01)
    for name in ("allgather_base", "reduce_scatter_base", *(["allreduce"] if topology == "hybrid" else [])):
        assert simulated.collective_bytes.get(name, 0) == step.get("collective_bytes", {}).get(name, 0)
    assert simulated.flops == step["flops"]


FORMULAS = [
    {"method": "full", "strategy": SINGLE, "num_gpus": 1, "gradient_checkpointing": True},
    {"method": "lora", "strategy": FSDP2, "num_gpus": 8, "gradient_checkpointing": False},
    {"method": "qlora", "strategy": DDP, "num_gpus": 8, "gradient_checkpointing": True},
    {"method": "full", "strategy": FSDP2, "num_gpus": 8, "gradient_checkpointing": True},
    {"method": "lora", "strategy": SINGLE, "num_gpus": 1, "gradient_checkpointing": "selective"},
    {"method": "lora", "strategy": SINGLE, "num_gpus": 1, "gradient_checkpointing": False, "bf16": False},
]
FORMULAS_REST = [
    {"method": "full", "strategy": SINGLE, "num_gpus": 1, "gradient_checkpointing": False, "bf16": False},
    {"method": "qlora", "strategy": SINGLE, "num_gpus": 1, "gradient_checkpointing": True, "bf16": False},
]
FORMULAS_REST += [
    {"method": method, "strategy": strategy, "num_gpus": gpus, "gradient_checkpointing": checkpointing}
    for method in METHODS
    for strategy, gpus in ((SINGLE, 1), (FSDP2, 8), (DDP, 8))
    for checkpointing in (True, False, "selective")
]


# Offloading, where the device stands for GPU and host, and attention that holds scores.
OTHERS = [
    {"shape": "llama-1b", "method": "full", "strategy": OFFLOAD, "num_gpus": 8},
    {"shape": "llama-1b", "method": "lora", "strategy": OFFLOAD, "num_gpus": 8},
    {"shape": "gemma-2-2b", "method": "lora", "eager": True, "gradient_checkpointing": False},
]


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", matrix(OTHERS[1:], always=0, rest=OTHERS), ids=lambda case: "-".join(map(str, case.values()))
)
def test_formulas_and_simulation_agree_on_offloading_and_eager_attention(case):
    fields = {"gradient_checkpointing": True, "length": 2048} | case | {"shape": find_shape(case["shape"])}
    workload = Workload(**fields)
    assert predict(workload).tensors == pytest.approx(simulate(workload).tensors, rel=0.05)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "method"), matrix([("tiny", "full")], always=0, rest=[("tiny", "lora"), ("llama-8b", "full")])
)
def test_formulas_and_simulation_agree_on_hybrid_sharding(shape, method):
    """And a copy takes of its GPUs what a run on them alone takes."""
    given = {"shape": find_shape(shape), "length": 4096} if shape != "tiny" else {}
    workload = replace(TINY, **given, **COPIES, method=method, micro_batches=3, gradient_checkpointing=True)
    simulated = simulate(workload)
    assert predict(workload).tensors == pytest.approx(simulated.tensors, rel=0.05)
    gradients = 4 * workload.trainable_parameters / workload.num_shards  # once a step, between the copies
    assert simulated.collective_bytes["allreduce"] == pytest.approx(gradients, rel=0.01)


# The objectives over pairs and over answers with a label, whose reference's passes come first.
PREFERENCES = [
    {"objective": "dpo", "method": "lora", "strategy": FSDP2, "num_gpus": 8},
    {"objective": "dpo", "method": "lora", "gradient_checkpointing": False},
    {"objective": "kto", "method": "qlora", "gradient_checkpointing": False},
    {"objective": "dpo", "method": "full", "strategy": FSDP2, "num_gpus": 8, "packing": True},
]
PREFERENCES_REST = [{"objective": "orpo", "method": "lora", "packing": True}]
PREFERENCES_REST += [
    {"objective": objective, "method": method, **gpus}
    for objective in ("dpo", "kto")
    for method in METHODS
    for gpus in ({}, {"strategy": FSDP2, "num_gpus": 8})
]


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", matrix(PREFERENCES, rest=PREFERENCES_REST), ids=lambda case: "-".join(map(str, case.values()))
)
def test_formulas_and_simulation_agree_on_pairs_and_answers_with_a_label(case):
    fields = {"gradient_checkpointing": True, "micro_batches": 2} | case
    workload = Workload(shape=find_shape("llama-1b"), length=1024, **fields)
    simulated = simulate(workload)
    assert predict(workload).tensors == pytest.approx(simulated.tensors, rel=0.05)
    supervised = workload.tokens - workload.rows * workload.sequences  # the first token of a sequence is none
    planned = operations_per_token(workload, supervised / workload.tokens)
    if workload.method != "qlora":  # whose products torch does not count
        # It counts attention without its mask, and does not count that of packs.
        assert workload.tokens * workload.micro_batches * planned == pytest.approx(simulated.flops, rel=0.1)
    if workload.sharded:  # at a link so slow that nothing else takes time
        gathered = simulated.collective_bytes["allgather_base"] * 7 / 8
        quick = replace(GPUS["h100"], link=1.0)
        reduced = 7 / 8 * 4 * workload.micro_batches * workload.trainable_parameters
        assert collective_seconds(workload, quick) - reduced == pytest.approx(gathered, rel=0.01)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
@pytest.mark.parametrize("case", matrix(FORMULAS, rest=FORMULAS_REST))
def test_formulas_and_simulation_agree(case):
    workload = Workload(shape=find_shape("llama-1b"), length=2048, micro_batches=2, **case)
    assert predict(workload).tensors == pytest.approx(simulate(workload).tensors, rel=0.05)
