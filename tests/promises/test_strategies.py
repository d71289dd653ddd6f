"""Every strategy with every method, for real: trains, evaluates, generates, and leaves a model that opens plainly."""

import pytest
from helpers import matrix


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("fsdp_hybrid", 4)])
def test_the_final_model_scores_as_the_run_ended(finetune, fp32, chat_file, config, processes):
    """What is saved is what was trained: no rank's part missing, no tie lost, no adapter left out."""
    import json

    for method in ("full", "lora"):
        flags = {"config": fp32[config], "max_length": 256, "eval_dataset": chat_file, "max_eval_samples": 9}
        run = finetune.ok(f"{method}", processes, method=method, max_steps=3, **flags)
        ended = next(row for row in run.rows if "eval_loss" in row)["eval_loss"]
        for name in ("final", "checkpoints/step-00000003"):
            flags["config"] = fp32["single"]
            score = finetune.score(f"{method}-{name[:5]}", model_name_or_path=run.folder / name, **flags)
            line = json.loads(score.output.splitlines()[-1])
            assert line["eval_loss"] == pytest.approx(ended, rel=1e-5), (method, name)


@pytest.mark.slow
@pytest.mark.parametrize("config", matrix(["fsdp", "single"]))
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_the_samples(finetune, model_folder, tmp_path, config):
    """The weights on disk stay those of the last good step."""
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(model_folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    run = finetune("run", 1 if config == "single" else 2, config=config, model_name_or_path=broken, max_steps=3)
    assert run.status == 1
    assert "step 1" in run.output and "chats.jsonl:" in run.output and "Traceback" not in run.output
    assert not (run.folder / "final").exists() and not list((run.folder / "checkpoints").glob("*"))


@pytest.mark.slow
def test_a_model_with_buffers_is_sharded_and_saved_with_them(finetune, fp32, model_folder, tmp_path):
    """Rank 0 sends them with the weights; checkpoints and final/ have them, whatever of the model trains."""
    import shutil

    import torch
    from safetensors.torch import load_file
    from transformers import ApertusConfig, ApertusForCausalLM

    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = ApertusForCausalLM(
        ApertusConfig(vocab_size=320, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **shape)
    )
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    assert buffers
    for buffer in buffers.values():
        buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(base)
    runs = {}
    for config, processes in (("single", 1), ("fsdp", 2)):
        flags = {"model_name_or_path": base, "method": "full", "config": fp32[config], "max_steps": 3}
        flags["save_only_model"] = "true"
        runs[config] = run = finetune.ok(config, processes, **flags)
        final = load_file(run.folder / "final/model.safetensors")
        assert all(torch.equal(final[name].view_as(buffer), buffer) for name, buffer in buffers.items())
        refused = finetune(config, processes, **(flags | {"max_steps": 4}))
        assert refused.status == 2 and "step-00000003 holds weights only" in refused.output
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in runs.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
