"""A student learns a teacher: the same on every topology, exactly after a stop, and refused where it cannot."""

import json
import re
import shutil

import pytest
import torch
from helpers import make_model
from promises.test_parity import TOPOLOGIES
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Deeper and wider than the student, with a table padded to another size."""
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=4, vocab_size=328)


CASES = [
    ({"method": "full", "divergence": "jsd", "packing": True, "cross_entropy_weight": 0.3}, ["fsdp2"]),
    ({"method": "lora", "distil_temperature": 2.0}, ["hybrid"]),
    ({"method": "lora", "on_policy_share": 0.5, "max_new_tokens": 8, "learning_rate": 1e-4}, ["ddp"]),
]


@pytest.mark.parametrize(("case", "names"), CASES)
def test_every_topology_and_micro_batch_learns_the_same(finetune, fp32, teacher, case, names):
    flags = {"objective": "distil", "teacher": teacher, "global_batch_size": 24, "learning_rate": 2e-3, **case}
    reference = finetune.ok("reference", config=fp32["single"], **flags | {"per_device_train_batch_size": 1})
    assert float.fromhex(reference.losses[-1]) < float.fromhex(reference.losses[0])
    for name in names:
        config, processes, micro_batch = TOPOLOGIES[name]
        run = finetune.ok(name, processes, config=fp32[config], **flags | {"per_device_train_batch_size": micro_batch})
        for key in ("loss", "divergence", "cross_entropy", "entropy", "teacher_entropy"):
            ours, theirs = ([row[key] for row in each.rows if "loss" in row] for each in (run, reference))
            # A divergence is a difference of logarithms, a hundred times as large as it is.
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), (name, key)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), name


def test_the_loss_is_that_of_both_models_own_logits(finetune, fp32, teacher, model_folder):
    flags = {"objective": "distil", "teacher": teacher, "max_steps": 1, "train_on": "all"}
    run = finetune.ok("run", config=fp32["single"], method="full", **flags)
    again = finetune.ok("again", config=fp32["single"], method="full", **flags, teacher_in_4bit=True)
    assert again.rows[0]["loss"] != run.rows[0]["loss"] and again.rows[0]["loss"] == pytest.approx(
        run.rows[0]["loss"], rel=0.2
    )
    same = finetune.ok("same", config=fp32["single"], method="full", **flags | {"teacher": model_folder})
    assert same.rows[0]["divergence"] == pytest.approx(0, abs=1e-6) and same.rows[0]["teacher_agreement"] == 1.0
    assert same.rows[0]["entropy"] == pytest.approx(same.rows[0]["teacher_entropy"], rel=1e-6)


def test_a_stopped_run_continues_bit_for_bit_and_not_with_another_teacher(finetune, teacher, tmp_path):
    teacher = shutil.copytree(teacher, tmp_path / "teacher")
    flags = {"objective": "distil", "teacher": teacher, "method": "lora", "save_steps": 3}
    flags |= {"on_policy_share": 0.5, "max_new_tokens": 8, "divergence": "reverse_kl"}
    whole = finetune.ok("whole", **flags)
    half = finetune.ok("half", **flags)
    for folder in ("checkpoints/step-00000006", "final"):
        shutil.rmtree(half.folder / folder)
    again = finetune.ok("half", **flags)
    assert "continuing" in again.output and again.losses[-3:] == whole.losses[-3:], again.output
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(teacher)
    shutil.rmtree(half.folder / "final")
    changed = finetune("half", **flags)
    assert changed.status == 2 and "the weights at teacher are others" in changed.output, changed.output


def test_an_answer_of_the_data_teaches_on_policy_what_it_teaches_off_policy(finetune, fp32, teacher, tmp_path):
    turns = [{"role": role, "content": f"{role} says so"} for role in ("user", "assistant") * 2]
    rows = [{"messages": [*turns[:-1], {"role": "assistant", "content": f"{i} times"}]} for i in range(8)]
    (data := tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = {"objective": "distil", "teacher": teacher, "method": "full", "max_steps": 1, "dataset": data}
    off, on = (
        finetune.ok(f"share-{share}", config=fp32["single"], **flags, on_policy_share=share, max_new_tokens=8)
        for share in (0, 1e-9)
    )
    for key in ("supervised_tokens", "loss", "divergence"):
        assert on.rows[0][key] == pytest.approx(off.rows[0][key], rel=1e-6), key


def test_a_teacher_that_cannot_judge_is_refused_before_anything_loads(finetune, teacher, tmp_path):
    shutil.copytree(teacher, other := tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(other)
    short = make_model(tmp_path / "short", max_position_embeddings=128)
    quantised = shutil.copytree(teacher, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    for flags, words in (
        ({"teacher": quantised}, r"teacher: a quantised checkpoint \(gptq\)"),
        ({}, "teacher: none given"),
        ({"teacher": other}, "other ids than that of"),
        ({"teacher": short}, "128 positions"),
        ({"teacher": tmp_path / "none"}, "teacher: .*no such folder"),
        ({"teacher": teacher, "objective": "sft"}, "teacher: .*objective sft does not read it"),
        ({"teacher": teacher, "beta": 0.2}, "beta: 0.2 with divergence forward_kl"),
    ):
        run = finetune(f"refused-{words[:9]}", **{"objective": "distil"} | flags)
        assert run.status == 2 and re.search(words, run.output), (words, run.output)
        assert "Traceback" not in run.output
