"""An Accelerate config is read as written, or refused with a fix."""

import pytest
from helpers import ROOT

from kit.strategy import strategies
from kit.strategy.accelerate_config import read_config
from kit.system.errors import UserError

CONFIGS = ROOT / "accelerate_configs"
SHIPPED = {
    "single": strategies.SINGLE,
    "ddp": strategies.DDP,
    "fsdp": strategies.FSDP2,
    "fsdp_hybrid": strategies.HYBRID,
    "fsdp_offload": strategies.OFFLOAD,
    "fsdp1": strategies.FSDP1,
}

DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return read_config(path)

    return read


@pytest.fixture
def refusal(read):
    def refusal(text):
        with pytest.raises(UserError) as caught:
            read(text)
        return caught.value

    return refusal


def test_a_shipped_config_is_the_strategy_its_name_says():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)
    for name in SHIPPED:
        settings = read_config(CONFIGS / f"{name}.yaml")
        assert settings.strategy == SHIPPED[name], name
        assert settings.strategy.config == name, name
        assert settings.mixed_precision == "bf16", name
        assert settings.reshard_after_forward, name
        assert settings.load_on_rank0 == name.startswith("fsdp"), name
        # Fits any machine: one process per GPU, the model's own layer class.
        assert (settings.num_processes, settings.num_machines, settings.layer_classes) == (None, 1, ()), name
        assert not settings.use_cpu, name
        assert (settings.groups.replicas, settings.groups.shards) == (2 if "hybrid" in name else None, None), name


def test_the_output_of_accelerate_config_is_read(read):
    """The answers to `accelerate config` for one machine with four GPUs, as it writes them."""
    settings = read("""
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,MistralDecoderLayer
  fsdp_version: 2
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
""")
    assert (settings.strategy, settings.num_processes) == (strategies.OFFLOAD, 4)
    assert settings.layer_classes == ("LlamaDecoderLayer", "MistralDecoderLayer")
    assert not settings.reshard_after_forward and not settings.load_on_rank0


def test_values_mean_what_they_mean_to_accelerate(read):
    cases = [
        ("", "single", "no"),
        ("distributed_type: NO\nmixed_precision: no\n", "single", "no"),  # YAML makes both false
        ("distributed_type: MPS\n", "single", "no"),  # of earlier versions, on a Mac
        ("distributed_type: MULTI_CPU\n", "ddp", "no"),
        ("distributed_type: FSDP\n", "fsdp1", "no"),  # accelerate's default version
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: '2'\n", "fsdp2", "no"),
    ]
    for case in cases:
        text, strategy, precision = case
        settings = read(text)
        assert (settings.strategy.name, settings.mixed_precision) == (strategy, precision), case


def test_resharding_has_another_key_under_fsdp1(read):
    for sharding, reshard in {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "2": False}.items():
        text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: {sharding}\n"
        assert read(text).reshard_after_forward is reshard
        if sharding != "2":  # as `accelerate config` writes it
            text = text.replace("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
            assert read(text).reshard_after_forward is reshard


def test_minus_one_process_is_one_per_gpu(read):
    assert read(f"{DDP}num_processes: -1\n").num_processes is read(f"{DDP}num_processes: null\n").num_processes is None


# The text of a config, the line to name, and words the message must hold.
REFUSED = [
    (FSDP + "  fsdp_reshard_after_foward: false\n", 5, ["did you mean 'fsdp_config.fsdp_reshard_after_forward'?"]),
    ("mixed_precision: fp8\n", 1, ["'fp8'", "no or bf16 or fp16", "--fp8 true"]),
    (DDP + "deepspeed_config:\n  zero_stage: 2\n", 3, ["deepspeed_config: not a key", "docs/distributed.md"]),
    (FSDP + "  fsdp_auto_wrap_policy: NO_WRAP\n", 5, ["NO_WRAP", "transformer_based_wrap"]),
    (FSDP + "  fsdp_activation_checkpointing: true\n", 5, ["--gradient_checkpointing", "wrong gradients"]),
    (FSDP.replace("2", "1") + "  fsdp_sharding_strategy: HYBRID_SHARD\n", 5, ["HYBRID_SHARD", "full_shard"]),
    (DDP + "dynamo_config:\n  dynamo_backend: EAGER\n", 4, ["dynamo_backend", "no or inductor"]),
    (FSDP + "parallelism_config:\n  tp_size: 2\n", 6, ["parallelism_config.tp_size: not a key"]),
    (DDP + "num_processes: 0\n", 3, ["num_processes", "from 1"]),
    (DDP + "gpu_ids: 2,3\n", 3, ["gpu_ids", "CUDA_VISIBLE_DEVICES"]),
]


def test_an_unsupported_key_is_refused_at_its_line_with_a_fix(refusal):
    for case in REFUSED:
        text, line, words = case
        error = refusal(text)
        assert len(error.problems) == 1, case
        assert f"mine.yaml:{line}" in str(error), case
        for word in words:
            assert word in str(error), case


def test_everything_wrong_with_a_config_is_reported_at_once(refusal):
    error = refusal(
        "mixed_precision: fp8\ndistributed_type: FSDP\nnum_proceses: 4\nnum_processes: -2\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: NO_WRAP\n  fsdp_activation_checkpointing: true\n"
    )
    places = [problem.where.rpartition("mine.yaml:")[2].split()[0] for problem in error.problems]
    assert sorted(places) == ["1", "3", "4", "7", "8"]
