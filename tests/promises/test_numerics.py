"""NaN/Inf steps, replicas that diverge, loss spikes, adapters that do not train."""

import json
import re
from functools import partial

import pytest
import torch
from helpers import make_model, matrix
from safetensors.torch import load_file

ROW = 37  # of the dataset, the only one with the poisoned token


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory, chat_file):
    """A model that answers NaN to one character, and a dataset with that character in one row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("poisoned")
    make_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    (token,) = tokenizer("~", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.get_input_embeddings().weight.data[token] = float("nan")
    model.save_pretrained(folder / "model")
    rows = [json.loads(line) for line in chat_file.read_text().splitlines()]
    rows[ROW]["messages"][1]["content"] += " ~ ~"
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model_name_or_path": folder / "model", "dataset": folder / "chats.jsonl", "method": "lora"}


def adapter(run, step):
    """What trains, and its moments; of all ranks."""
    paths = (run.folder / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    return {(path.name, name): tensor for path in paths for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), matrix([("fsdp", 2), ("ddp", 2)], rest=[("single", 1)]))
def test_a_step_that_is_not_finite_is_skipped_whole_or_stops_the_run(finetune, poisoned, fp32, config, processes):
    flags = {**poisoned, "config": fp32[config], "save_steps": 1, "save_total_limit": 0, "max_steps": 8}
    stopped = finetune("stopped", processes, **flags)
    assert stopped.status == 1 and "Traceback" not in stopped.output
    bad = stopped.rows[-1]["step"]
    found = f"step {bad}: loss nan, gradient norm nan"
    assert f"error: rank 0: {found}; weights unchanged. Samples: " in stopped.output
    assert re.search(rf"chats\.jsonl:[\d,]*\b{ROW + 1}\b", stopped.output)
    assert len(stopped.rows) == bad and bad < 8  # the epoch has seven steps and a bit
    assert not (stopped.folder / "final").exists()
    assert found in (stopped.folder / "error.txt").read_text()  # a launcher may bury it

    # The same command goes on, past it.
    skipped = finetune.ok("stopped", processes, **flags, max_nonfinite_steps=1)
    assert not (skipped.folder / "error.txt").exists()
    row = next(row for row in skipped.rows if "nonfinite" in row)
    assert row["step"] == bad and row["nonfinite"] == "loss nan, gradient norm nan"
    assert any(place.endswith(f"chats.jsonl:{ROW + 1}") for place in row["samples"])
    assert f"warning: {found}: skipped" in skipped.output
    assert [row["step"] for row in skipped.rows] == list(range(1, 9))
    before, after = adapter(skipped, bad - 1), adapter(skipped, bad)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[name], tensor) for name, tensor in adapter(skipped, bad + 1).items())


def push(step, rank):
    """In the child: after an update a bit of rank 1's first weight flips."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from kit.strategy.weights import own_part

    count = 0

    def after_update(optimizer, args, kwargs):
        nonlocal count
        count += 1
        if rank == 1 and count == step:
            weight = own_part(optimizer.param_groups[0]["params"][0].data)
            weight.view(torch.int32).reshape(-1)[3] ^= 1

    register_optimizer_step_post_hook(after_update)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), matrix([("ddp", 2), ("fsdp_hybrid", 4)], rest=[("ddp", 3)]))
def test_a_drifted_replica_stops_the_run_and_is_named(finetune, config, processes):
    flags = {"config": config, "method": "lora", "global_batch_size": 4 * processes, "max_steps": 6}
    run = finetune("run", processes, prepare=partial(push, 3), check_replicas=2, **flags)
    assert run.status == 1 and "Traceback" not in run.output
    assert "error: rank 0: step 4: replicas diverge: " in run.output
    assert "lora_A" in run.output
    assert (" on rank 1\n" if config == "ddp" else " (shard 1) on rank 3\n") in run.output  # of two, the first counts
    assert [row["step"] for row in run.rows] == [1, 2, 3]


def sever(modules, rank):
    """In the child: what the adapters of these modules compute is multiplied by zero, so no gradient reaches them."""
    from kit.train import policy

    build_model = policy.build_model

    def severed(*args, **options):
        model = build_model(*args, **options)
        for name, module in model.named_modules():
            if isinstance(getattr(module, "scaling", None), dict) and any(
                re.search(pattern, name) for pattern in modules
            ):
                module.scaling["default"] = 0.0
        return model

    policy.build_model = severed


@pytest.mark.slow
def test_adapters_that_no_gradient_reaches_are_named_at_the_first_step_and_at_the_end(finetune):
    flags = {"config": "fsdp", "method": "lora", "max_steps": 2}
    dead = [r"layers\.1\.self_attn\.q_proj$", r"layers\.2\.mlp\.up_proj$"]
    run = finetune.ok("run", 2, prepare=partial(sever, dead), **flags)
    names = "model.layers.1.self_attn.q_proj, model.layers.2.mlp.up_proj"
    text = f"warning: in the first step no gradient reached 2 of 21 adapters: {names}; they stay as they are until"
    assert run.output.count(text) == 1
    text = f"warning: 2 of 21 adapters were not trained (lora_B is zero): {names}; no gradient reached them\n"
    assert run.output.count(text) == 1


@pytest.mark.slow
def test_a_run_of_which_no_adapter_moves_ends_with_an_error(finetune):
    run = finetune("run", config="single", method="lora", max_steps=2, prepare=partial(sever, ["."]))
    assert run.status == 1 and "every lora_B is zero: the adapter was not trained" in run.output
    text = "no gradient reached 21 of 21 adapters: model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, "
    assert re.search(text + r"\S+ and 18 others; ", run.output)
