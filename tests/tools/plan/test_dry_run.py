"""``--dry_run`` says what the run would do: strategy, memory, data and number of steps; and writes nothing."""

import shutil

import pytest
from preflight_helpers import ONE_PROCESS, wrong
from vision_models import write_rows

from kit.config.command_line import read_recipe
from kit.config.launch_flags import Launch
from kit.data.samples import samples
from kit.memory.fit import planned_workload
from kit.memory.formulas import predict
from kit.preflight import preflight
from kit.strategy.strategies import FSDP2
from kit.strategy.topology import Topology
from kit.tools.plan.dry_run import describe_plan, describe_run
from kit.tools.plan.models import SHAPES

GPU = Topology(strategy=FSDP2, config_name="fsdp", num_processes=8, mixed_precision="bf16", device_type="cuda")
RECIPE = read_recipe(["--recipe", "llama-8b-full"])


@pytest.fixture(scope="module")
def config():
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(SHAPES / "llama-8b")


def test_memory_is_shown_by_component_with_the_disk(config):
    assert describe_plan(None)[0].startswith("no plan: ")
    own = planned_workload(RECIPE, GPU, config)
    lines = describe_plan(own)
    memory = predict(own)
    assert f"GPU memory at the peak ({memory.moment}), {memory.peak / 2**30:.1f} GiB:" in lines and "disk:" in lines
    assert all(any(name in line for line in lines) for name in (*memory.disk, "optimiser", "activations"))
    sizes = [float(line.split()[-2]) for line in lines[2 : lines.index("host memory per machine:")]]
    assert abs(sum(sizes) - memory.peak / 2**30) < 0.05 * len(sizes)


@pytest.mark.slow
def test_a_dry_run_needs_no_weights_but_everything_else(recipe, model_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    mine = recipe(model_name_or_path=str(bare))
    assert wrong(mine, ONE_PROCESS, "mine") == ["model_name_or_path"]
    checked = preflight.check(mine, ONE_PROCESS, "mine", launch=Launch(dry_run=True))
    strategy, *lines, steps = describe_run(checked)
    assert strategy.startswith("Single on CPU, 1 process, fp32, ") and steps.startswith(
        f"{checked.total_steps} steps. "
    )
    assert [str(bare) in line for line in lines if line.startswith("weights: none of ")] == [True]
    (bare / "pytorch_model.bin").write_bytes(b"")
    assert wrong(mine, ONE_PROCESS, "mine", launch=Launch(dry_run=True)) == ["model_name_or_path"]


@pytest.mark.slow
def test_a_plan_counts_the_images_that_the_rows_have(recipe, vision_model, tmp_path, monkeypatch):
    """70 x 50 pixels are 2 x 2 tokens of the tiny tower, 28 x 28 a single one. Longer rows of text hide none."""
    monkeypatch.setattr(samples, "_LOOKED_AT", 2)
    data = write_rows(tmp_path, [[(70, 50)], [(28, 28), (70, 50)], [], []])
    data.write_text(data.read_text().replace("number 2", "number 2 " * 20).replace("number 3", "number 3 " * 20))
    mine = recipe(model_name_or_path=str(vision_model("qwen2_5_vl")), dataset=str(data), global_batch_size=2)
    for changes, number in (({}, 5), ({"max_pixels": 28 * 28}, 2)):
        checked = preflight.check(mine.model_copy(update=changes), ONE_PROCESS, "mine")
        assert checked.workload.image_tokens == number
        assert f", {number} image or audio tokens per row:" in "".join(describe_run(checked))
    packed = preflight.check(mine.model_copy(update={"packing": True}), ONE_PROCESS, "mine").workload
    assert packed.length // 20 < packed.image_tokens < packed.length // 2
