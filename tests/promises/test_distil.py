"""A student learns a teacher: the same on every topology, exactly after a stop, and refused where it cannot."""

import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
import torch
from helpers import make_model, matrix
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
TRUNCATED = r"its (\d+) most probable tokens, .* hold ([\d.]+)% of the probability"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Deeper and wider than the student, with a table padded to another size."""
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=4, vocab_size=328)


def with_cache(folder, *_):
    """In a rank: a cache of its own run, so that the teacher's pass is its own."""
    os.environ["KIT_CACHE"] = str(folder)


# Config, processes and rows of a micro-batch.
SPREAD = [("single", 1, 3), ("single", 1, 8), ("ddp", 2, 1), ("ddp", 2, 8), ("fsdp", 2, 3), ("fsdp", 2, 8)]
SPREAD += [("fsdp_hybrid", 4, 1), ("fsdp_hybrid", 4, 3)]
LONG = {"max_steps": 20, "global_batch_size": 48, "max_length": 64, "max_train_samples": 48}
CASES = [
    ({"method": "full", "divergence": "jsd", "packing": True, "cross_entropy_weight": 0.3}, [("fsdp", 2, 4)]),
    ({"method": "lora", "distil_temperature": 2.0, "teacher_top_k": 16}, [("fsdp_hybrid", 4, 2)]),
    ({"method": "lora", "on_policy_share": 0.5, "max_new_tokens": 8, "learning_rate": 1e-4}, [("ddp", 2, 2)]),
    ({"method": "full", **LONG}, SPREAD),
    ({"method": "lora", "divergence": "reverse_kl", "packing": True, **LONG}, SPREAD),
    ({"method": "full", "divergence": "jsd", "distil_temperature": 2.0, "teacher_top_k": 16, **LONG}, SPREAD),
    ({"method": "lora", "teacher_in_4bit": True, "divergence": "jsd", "beta": 0.2, **LONG}, SPREAD),
]


@pytest.mark.parametrize(("case", "runs"), matrix(CASES[:3], always=3, rest=CASES[3:]))
def test_every_topology_and_micro_batch_learns_the_same(finetune, fp32, teacher, tmp_path, case, runs):
    flags = {"objective": "distil", "teacher": teacher, "global_batch_size": 24, "learning_rate": 2e-3, **case}

    def run(config, processes, micro_batch):
        name = f"{config}-{micro_batch}"
        own = {"config": fp32[config], "per_device_train_batch_size": micro_batch}
        return finetune.ok(name, processes, prepare=partial(with_cache, tmp_path / f"cache-{name}"), **flags | own)

    reference = run("single", 1, 1)
    assert float.fromhex(reference.losses[-1]) < float.fromhex(reference.losses[0])
    for way in runs:
        other = run(*way)
        for key in ("loss", "divergence", "cross_entropy", "entropy", "teacher_entropy"):
            ours, theirs = ([row[key] for row in each.rows if "loss" in row] for each in (other, reference))
            # A divergence is a difference of logarithms, a hundred times as large as it is.
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), (way, key)
        assert other.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), way


def test_what_is_stored_of_the_whole_vocabulary_teaches_what_the_teacher_beside_does(finetune, fp32, teacher):
    flags = {"objective": "distil", "teacher": teacher, "config": fp32["single"], "method": "full", "packing": True}
    beside = finetune.ok("beside", **flags)
    stored = finetune.ok("stored", **flags, teacher_top_k=1000)
    few = finetune.ok("few", **flags, teacher_top_k=64)
    for key in ("loss", "divergence", "cross_entropy", "entropy", "teacher_entropy", "teacher_agreement"):
        assert [row[key] for row in stored.rows] == pytest.approx([row[key] for row in beside.rows], rel=1e-5), key
    assert few.rows[0]["cross_entropy"] == pytest.approx(beside.rows[0]["cross_entropy"], rel=1e-6)
    assert few.rows[0]["teacher_agreement"] == beside.rows[0]["teacher_agreement"]
    assert 0 < few.rows[0]["divergence"] < beside.rows[0]["divergence"]
    held, of_all = (float(re.search(TRUNCATED, run.output)[2]) for run in (few, stored))
    assert 20 < held < of_all == 100


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


def dies(moment, folder, rank):
    """In a rank, before the script: SIGKILL at that moment. Blocks are so small that there are several."""
    import kit.tasks.distil.stored_teacher
    import kit.train.step

    with_cache(folder)
    kit.tasks.distil.stored_teacher.BLOCK_VALUES = 2048
    module, name, number = {
        "in the teacher's pass": (kit.tasks.distil.stored_teacher, "store", 3),
        "in a step": (kit.train.step, "train_step", 5),
        "never": (kit.train.step, "train_step", 0),
    }[moment]
    real, calls = getattr(module, name), []

    def call(*args, **options):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(module, name, call)


@pytest.mark.parametrize(("config", "processes"), matrix([("single", 1)], rest=[("ddp", 2), ("fsdp", 2)]))
def test_a_run_that_is_killed_continues_bit_for_bit_without_the_teacher(finetune, teacher, tmp_path, config, processes):
    teacher = shutil.copytree(teacher, tmp_path / "teacher")
    flags = {"objective": "distil", "teacher": teacher, "method": "full", "teacher_top_k": 8, "divergence": "jsd"}
    flags |= {"save_steps": 2, "async_save": False, "config": config, "processes": processes}
    whole = finetune.ok("whole", **flags, prepare=partial(dies, "never", tmp_path / "other"))
    for moment in ("in the teacher's pass", "in a step"):
        killed = finetune("run", **flags, prepare=partial(dies, moment, tmp_path / "own"))
        assert killed.status == -signal.SIGKILL, killed.output
    stored = re.findall(r"storing its 8 most probable tokens of \d+ targets", killed.output)
    assert len(stored) == 1, killed.output
    again = finetune.ok("run", **flags, prepare=partial(dies, "never", tmp_path / "own"))
    assert "continuing after step 4 of 6" in again.output and "targets are in the cache" in again.output
    assert again.losses == whole.losses
    names = [each.relative_to(whole.folder) for each in (whole.folder / "final").glob("*.safetensors")]
    assert names and all((again.folder / each).read_bytes() == (whole.folder / each).read_bytes() for each in names)


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
    swapped = shutil.copytree(teacher, tmp_path / "swapped")
    core = json.loads((swapped / "tokenizer.json").read_text())
    vocab = core["model"]["vocab"]
    vocab["\u0120cat"], vocab["\u0120fish"] = vocab["\u0120fish"], vocab["\u0120cat"]
    (swapped / "tokenizer.json").write_text(json.dumps(core))
    resized = shutil.copytree(teacher, tmp_path / "resized")
    tokenizer = AutoTokenizer.from_pretrained(resized)
    tokenizer.add_tokens(["<|unheard_of|>"], special_tokens=True)
    tokenizer.save_pretrained(resized)
    short = make_model(tmp_path / "short", max_position_embeddings=128)
    of_two_heads = {"teacher": make_model(tmp_path / "two", num_attention_heads=2), "dry_run": True}
    shared = {"config": "ddp", "num_processes": 4, "sequence_parallel_size": 4}
    quantised = shutil.copytree(teacher, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    for flags, words in (
        ({"teacher": quantised}, r"teacher: a quantised checkpoint \(gptq\)"),
        ({}, "teacher: none given"),
        ({"teacher": other}, "other ids than that of"),
        ({"teacher": swapped}, "2 tokens of its vocabulary, such as '\u0120cat', have other ids than in that of"),
        ({"teacher": short}, "128 positions"),
        (of_two_heads | shared, "4, with 2 attention heads, of the teacher; expected one of 1, 2"),
        ({"teacher": tmp_path / "none"}, "teacher: .*no such folder"),
        ({"teacher": teacher, "objective": "sft"}, "teacher: .*objective sft does not read it"),
        ({"teacher": teacher, "teacher_top_k": 4, "on_policy_share": 0.5}, "teacher_top_k: 4 with on_policy_share 0.5"),
        ({"teacher": teacher, "teacher_top_k": 4, "streaming": True}, "streaming: with teacher_top_k 4"),
        ({"teacher": teacher, "beta": 0.2}, "beta: 0.2 with divergence forward_kl"),
    ):
        run = finetune(f"refused-{words[:9]}", **{"objective": "distil"} | flags)
        assert run.status == 2 and re.search(words, run.output), (words, run.output)
        assert "Traceback" not in run.output
    finetune.ok("padded", objective="distil", teacher=resized, method="lora", max_steps=1)
