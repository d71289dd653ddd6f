"""A student learns a teacher: the same on every topology, exactly after a stop, and refused where it cannot."""

import json
import re
import shutil

import pytest
import torch
from fake_vllm import FakeVllm
from helpers import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.config.dataset_entry import in_one_line

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Deeper and wider than the student, with a table padded to another size."""
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=4, vocab_size=328)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(finetune, fp32, model_folder):
    flags = {"objective": "distil", "teacher": model_folder, "max_steps": 1, "train_on": "all", "method": "full"}
    (row,) = finetune.ok("same", config=fp32["single"], **flags).rows
    assert row["divergence"] == pytest.approx(0, abs=1e-6) and row["teacher_agreement"] == 1.0
    assert row["entropy"] == pytest.approx(row["teacher_entropy"], rel=1e-6)


def test_answers_of_the_student_are_those_of_one_process_and_go_on_bit_for_bit_but_not_with_another_teacher(
    finetune, fp32, teacher, tmp_path
):
    teacher = shutil.copytree(teacher, tmp_path / "teacher")
    flags = {"objective": "distil", "teacher": teacher, "method": "lora", "save_steps": 3}
    flags |= {"on_policy_share": 0.5, "max_new_tokens": 8, "divergence": "reverse_kl"}
    flags |= {"config": fp32["single"], "learning_rate": 1e-4}
    whole = finetune.ok("whole", **flags)
    shared = finetune.ok("shared", 2, **flags | {"config": fp32["fsdp"]})
    for key in ("loss", "divergence", "entropy"):
        assert [row[key] for row in shared.rows] == pytest.approx([row[key] for row in whole.rows], rel=1e-6), key
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
    assert changed.status == 2 and "the weights of teacher changed" in changed.output, changed.output


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
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    for flags, words in (
        ({"teacher": quantised}, r"teacher: a quantised checkpoint \(hqq\)"),
        ({"teacher": other}, "other ids than that of"),
        ({"teacher": swapped}, "2 tokens of its vocabulary, such as '\u0120cat', have other ids than in that of"),
        ({"teacher": short}, "max_position_embeddings 128"),
        (of_two_heads | shared, "4, with 2 attention heads, of the teacher; expected one of 1, 2"),
        ({"teacher": tmp_path / "none"}, "teacher: .*no such folder"),
        ({"teacher": teacher, "teacher_top_k": 4, "on_policy_share": 0.5}, "teacher_top_k: 4 with on_policy_share 0.5"),
        ({"teacher": teacher, "teacher_top_k": 4, "streaming": True}, "streaming: with teacher_top_k 4"),
        ({"teacher": "x", "teacher_server": "http://localhost:1"}, "teacher_server: given with teacher_top_k 0"),
        ({"teacher": "x", "dataset": "[{path: a, teacher: y}]"}, "a teacher of its own, without teacher_top_k"),
        (
            {"teacher": "x", "teacher_server": "http://localhost:1", "teacher_top_k": 4, "distil_temperature": 2},
            "distil_temperature: 2, and a server gives log-probabilities at 1",
        ),
    ):
        run = finetune(f"refused-{words[:9]}", **{"objective": "distil"} | flags)
        assert run.status == 2 and re.search(words, run.output), (words, run.output)
        assert "Traceback" not in run.output
    finetune.ok("padded", objective="distil", teacher=resized, method="lora", max_steps=1)


def test_datasets_learn_from_a_served_teacher_and_from_their_own_on_any_topology(
    finetune, fp32, teacher, model_folder, tmp_path, request
):
    rows = [{"prompt": f"the fox {i} ", "completion": "and the dog " * (1 + i % 3)} for i in range(12)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({**row, "id": name}) for row in rows))
    datasets = [{"path": f"{tmp_path}/a.jsonl"}, {"path": f"{tmp_path}/b.jsonl", "teacher": str(teacher)}]
    flags = {"objective": "distil", "teacher": model_folder, "teacher_top_k": 4, "dataset": in_one_line(datasets)}
    flags |= {"dataset_columns": "id=ignore", "method": "full", "learning_rate": 1e-3}
    stored = finetune.ok("stored", config=fp32["single"], **flags)
    server = FakeVllm(model_folder, loses_at=3, away_seconds=1)
    request.addfinalizer(server.close)
    served = finetune.ok("served", 2, config=fp32["fsdp"], teacher_server=server.url, **flags)
    assert "asking again" in served.output and len(server.requests) > 12, served.output
    for key in ("loss", "divergence"):
        assert [row[key] for row in served.rows] == pytest.approx([row[key] for row in stored.rows], abs=2e-6), key
    shutil.rmtree(served.folder / "final")
    swapped = [datasets[1] | {"path": datasets[0]["path"]}, {"path": datasets[1]["path"]}]
    again = finetune("served", config=fp32["single"], **flags | {"dataset": in_one_line(swapped)})
    assert again.status == 2 and "the weights of teacher changed" in again.output, again.output
