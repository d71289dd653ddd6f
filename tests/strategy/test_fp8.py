"""FP8 matmuls run, or the run stops with the reason. The GPUs are torch's answers about them."""

from helpers import with_gpus

from kit.strategy.precision import check_fp8
from kit.strategy.strategies import FSDP2, SINGLE
from kit.strategy.topology import Topology


def topology_of(precision="bf16", device="cuda", num_processes=1, strategy=SINGLE):
    return Topology(
        strategy=strategy,
        config_name=strategy.config,
        num_processes=num_processes,
        mixed_precision=precision,
        device_type=device,
    )


def test_products_of_8_bits_are_refused_where_they_cannot_be(recipe, monkeypatch):
    for gpu, changes, reason in [
        (("RTX 4090", 8, 9), {"strategy": FSDP2}, ""),
        (("A100", 8, 0), {}, "compute capability 8.9 or above, and A100 has 8.0"),
        (("H100", 9, 0), {"precision": "no"}, "needs mixed_precision: bf16"),
        (None, {"device": "mps"}, "the run is on mps"),
        (None, {"device": "cpu"}, ""),  # dry run
    ]:
        with_gpus(monkeypatch, *([gpu] if gpu else []))
        problems = check_fp8(recipe(fp8=True), topology_of(**changes))
        assert bool(problems) == bool(reason) and all(reason in problem.found for problem in problems), reason
