"""A plan as lines and commands."""

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from fake_gpu import SHAPES

from kit.config.recipe import ACCELERATE_CONFIGS
from kit.memory.formulas import predict
from kit.strategy.parallelism import PREFIX, group_sizes
from kit.tools.plan.ask import read_ask
from kit.tools.plan.hardware import GPUS, parse_gpu
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.search import options, recommend, try_out
from kit.tools.plan.table import (
    command,
    explanation,
    fitted,
    gib,
    limits,
    missing,
    needs,
    on_machines,
    parts,
    rows_of,
    table,
    time_lines,
    to_type,
    ways,
)


def planned(*words, gpu="24GiB"):
    asked = read_ask([*words, "--gpu", gpu])
    (question,) = asked.questions
    base = asked.workload(question)
    found = options(base, asked.gpu, question.recipe.global_batch_size)
    option, _ = recommend(found, base.method)
    return question, found, option


def test_columns_are_aligned():
    assert table(["a", "long"], [["wide", "b"], ["", "c"]]) == ["a     long", "wide  b", "      c"]
    assert table(["a", "long"], [["1,000", "b"]], numbers=(0,)) == ["    a  long", "1,000  b"]


def test_lines_fit_the_terminal_and_commands_stay_commands():
    lines = fitted(["short  line", "  name       " + "word " * 40, "\x1b[31m" + "sentence " * 20]).split("\n")
    assert max(map(len, lines)) <= 100 and lines[0] == "short  line" and "\x1b" not in lines[-1]
    assert lines[2].startswith("             word word")  # below the second column
    text = "accelerate launch recipes/finetune.py --dataset 'my data.jsonl' --columns 'a=b,c=d' " + "--flag value " * 20
    lines = to_type(text)
    assert len(lines) > 2 and all(len(line) <= 100 for line in lines)
    typed = "\n".join(lines)
    assert shlex.split(typed.replace("\\\n", " ")) == shlex.split(text)
    assert all("--flag" not in line or line.count("--flag") == line.count("value") for line in lines)


def test_each_way_says_whether_it_fits_and_by_how_much():
    _, found, _ = planned("--recipe", "llama-8b-qlora")
    lines = ways(found)[2:]
    for line, option in zip(lines, found, strict=False):
        words = line.split()
        assert words[:3] == [option.workload.method, option.workload.config, "yes" if option.fits else "no"]
        assert words[3:5] == [f"{size / 2**30:,.1f}" for size in (option.memory.peak, option.spare)]
        assert (float(words[4]) < 0) == (not option.fits)


def test_a_way_that_lacks_host_memory_says_so():
    _, _, option = planned("--recipe", "llama-8b-lora")
    small = replace(option, gpu=replace(option.gpu, host=2**30))
    assert "  no, host  " in ways([small])[2] and "machine's memory is not" in ways([small])[-1]
    assert "machine's memory" not in "".join(ways([option]))
    assert missing(small).endswith("GiB of host memory") and not missing(small).startswith("0.0")
    barely = replace(option, gpu=replace(option.gpu, memory=int((option.memory.peak - 2**20) / 0.95)))
    assert -(2**25) < barely.spare < 0 and missing(barely) == "0.1 GiB"


def test_the_recommended_way_says_what_each_machine_needs():
    _, _, option = planned("--recipe", "llama-8b-qlora")
    text = "\n".join(needs(option))
    host, disk = (gib(sum(sizes.values())) for sizes in (option.memory.host, option.memory.disk))
    assert f"each machine: {host} of memory, {disk} of disk" in text and f"{option.largest_length:,} tokens" in text
    _, _, option = planned("--recipe", "llama-8b-qlora", "--save_total_limit", "0")
    assert "of disk; and each further checkpoint" in "\n".join(needs(option))


def test_the_command_has_only_what_differs_from_the_recipe():
    question, _, option = planned("--recipe", "llama-8b-qlora", "--max_length", "1024", "--gpus", "2")
    text = command(option, question)
    assert text.startswith(
        "accelerate launch recipes/finetune.py --config ddp --recipe llama-8b-qlora --num_processes 2"
    )
    assert "--max_length 1024" in text and "--learning_rate" not in text and "--method" not in text


def test_the_command_trains_on_the_data_that_were_given():
    question, _, option = planned("--recipe", "llama-8b-qlora", "--dataset", "my.jsonl")
    assert "--recipe llama-8b-qlora --dataset my.jsonl" in command(option, question)


def test_the_command_is_one_that_a_run_takes():
    from kit.config.command_line import read_command_line

    several = '[{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1, "columns": {"q": "prompt"}}]'
    for words in (
        ["--recipe", "llama-8b-full", "--gpus", "8", "--report_to", "tensorboard", "--dataset", several],
        ["--model", "llama-8b", "--dataset_columns", "q=prompt,a=completion"],
        ["--params", "1B"],
        ["--model_name_or_path", str(SHAPES["tiny"]), "--dataset", "a.jsonl", "--method", "full", "--max_length", "64"],
    ):
        question, _, option = planned(*words)
        request = read_command_line(shlex.split(command(option, question))[3:])
        assert not request.problems
        assert [entry.path for entry in request.recipe.dataset_entries] == [
            entry.path for entry in question.recipe.dataset_entries
        ]
        assert request.recipe.dataset_columns == question.recipe.dataset_columns
        assert request.recipe.per_device_train_batch_size == option.workload.rows
        assert request.recipe.gradient_checkpointing == option.workload.gradient_checkpointing
        assert request.recipe.method == option.workload.method


def test_the_config_for_several_machines_is_one_that_divides_them_so():
    question, found, option = planned("--recipe", "llama-8b-full", "--gpus", "8", gpu="h100")
    assert on_machines(option) == []
    shipped = (ACCELERATE_CONFIGS / "fsdp_hybrid.yaml").read_text(encoding="utf-8")
    for machines, differs in ((2, False), (4, True)):
        question, found, _ = planned("--recipe", "llama-8b-full", "--gpus", f"{machines}x8", gpu="h100")
        option = next(o for o in found if o.workload.config == "fsdp_hybrid")
        text = " ".join(on_machines(option))
        key = re.search(r"parallelism_config_dp_replicate_size: \d+", text)[0]
        copied = re.sub(r"parallelism_config_dp_replicate_size: \d+", key, shipped)
        assert (copied != shipped) == differs and f"num_machines: {machines}" in text and "multi-node.md" in text
        sizes = yaml.safe_load(copied)["parallelism_config"]
        groups, _ = group_sizes(*(sizes.get(f"{PREFIX}dp_{of}_size") for of in ("replicate", "shard")), "fsdp2")
        assert groups.num_replicas(8 * machines) == option.workload.num_replicas == machines
        assert f"--config fsdp_hybrid --recipe llama-8b-full --num_processes {8 * machines}" in command(
            option, question
        )
    plain = next(o for o in found if o.workload.config == "fsdp")
    assert "num_machines: 4" in " ".join(on_machines(plain)) and "replicate" not in " ".join(on_machines(plain))


def test_parts_add_up_to_the_peak():
    _, _, option = planned("--recipe", "llama-8b-qlora")
    lines = parts(option.memory)
    assert lines[0] == f"a GPU at its peak ({option.memory.moment}), {gib(option.memory.peak)}:"
    numbers = [float(line.split()[-2]) for line in lines[1 : lines.index("memory of a machine:")]]
    assert sum(numbers) == pytest.approx(option.memory.peak / 2**30, abs=0.1 * len(numbers))


def test_what_limits_the_length_of_rows_is_named_the_largest_first():
    _, _, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    own = replace(option.workload, rows=1, length=131072, gradient_checkpointing=True)
    title, *lines = limits(own)
    assert "here 131,072 tokens, micro-batch 1" in title
    assert lines[0].split() == "held by 32 layers for their backward pass 32.0 GiB".split()  # 8 KiB a token and layer
    sizes = [float(line.split()[-2]) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes[:2]) == pytest.approx(predict(own).components["activations"] / 2**30, rel=0.02)
    assert "masks" not in " ".join(lines)
    eager = limits(replace(own, eager=True))
    assert any(line.split()[:4] == "masks of eager attention".split() for line in eager)


def test_time_is_a_range_with_its_assumption_and_its_cost():
    _, _, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    text = "\n".join(time_lines(option, None, 2.0))
    assert "tokens/s per GPU" in text and "1,000 steps: " in text and "cost " in text and "every sample has" in text
    assert "cost" not in "\n".join(time_lines(option, None))
    _, _, option = planned("--recipe", "llama-8b-lora")
    assert "nothing is known of a GPU named 24GiB" in time_lines(option, None)[0]
    assert time_lines(option, None, 2.0)[0].startswith("time, and so no cost: ")


@pytest.mark.parametrize(
    ("num_steps", "shown"),
    [(1, "1 step: 0.01 to 0.02 seconds"), (9000, "1.5 to 3 minutes"), (10**7, "27.8 to 55.6 hours")],
)
def test_a_time_has_a_unit_that_suits_it_and_no_exponent(num_steps, shown):
    _, _, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    step = SimpleNamespace(seconds=(0.01, 0.02), tokens_per_second=(1.0, 2.0), tokens=1, bound="memory")
    text = "\n".join(time_lines(replace(option, step=step), num_steps))
    assert shown in text and "time: 0.01 to 0.02 s a step" in text
    slow = replace(option, step=SimpleNamespace(**{**vars(step), "seconds": (67.0, 110.4)}))
    assert "time: 67 to 110 s a step" in "\n".join(time_lines(slow, None))


def test_with_the_lengths_of_data_time_counts_padding_and_what_is_useful():
    _, _, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    row = option.workload.length // 4
    lengths = Lengths(
        num_samples=900,
        every=3,
        shortest=9,
        mean=row / 2,
        longest=row,
        row=row,
        padding=0.5,
        num_shapes=7,
        num_micro_batches=1600,
        waiting=0.0,
        supervised=0.2,
        seen=row,
        num_steps=70,
        epochs=2.0,
    )
    full, padded = "\n".join(time_lines(option, None)), "\n".join(time_lines(option, None, 2.0, lengths))
    assert "data: 900 samples, one block in 3 of the data, of 9 to" in padded and "50.0% are padding" in padded
    assert "7 shapes in 1,600 micro-batches" in padded
    assert "70 steps: " in padded and "without padding" in padded and "every sample has" not in padded
    tokens = option.step.tokens * option.workload.num_gpus
    assert f"a step of {tokens:,} tokens" in full and f"a step of {tokens // 4:,} tokens" in padded
    assert "7 steps: " in "\n".join(time_lines(option, 7, None, lengths))


def times(*words, **more):
    _, _, option = planned("--recipe", "llama-8b-lora", *words, gpu="h100")
    return option, "\n".join(time_lines(option, 100, **more))


def test_the_time_of_passes_without_gradients_is_said():
    option, text = times("--objective", "dpo")
    assert f"of it {option.step.passes_share:.0%} in a pass without gradients: the reference's" in text
    assert "tokens of both halves of the pairs" in text and "both halves of every pair have max_length" in text
    assert "of it " in times("--objective", "kto")[1] and "3 passes without gradients" in times("--objective", "kto")[1]
    assert "pass" not in times("--objective", "orpo")[1] and "pairs" not in times()[1]


def test_the_time_before_the_first_step_is_part_of_the_run_and_of_its_cost():
    plain, text = times("--objective", "orpo", "--method", "qlora", price=2.0)
    before, with_reference = times("--objective", "dpo", "--method", "qlora", "--precompute_reference", price=2.0)
    assert "before the first step" not in text and "of it" not in with_reference
    assert re.search(
        r"^before the first step: \S+ to \S+ \w+ for the reference's pass over the samples", with_reference, re.M
    )
    assert "100 steps, with it: " in with_reference
    costs = [float(re.search(r"cost ([\d.]+) to", each)[1]) for each in (text, with_reference)]
    assert 1.2 < costs[1] / costs[0] < 1.6  # a pass over the samples of 100 steps
    assert before.step == plain.step


def test_samples_that_are_read_again_pass_the_reference_once():
    _, found, _ = planned("--recipe", "llama-8b-lora", "--objective", "dpo", "--precompute_reference", gpu="h100")
    own = next(option for option in found if option.workload.method == "lora")
    length = own.workload.length
    seen = dict(
        shortest=1,
        mean=length,
        longest=length,
        row=length,
        padding=0.0,
        num_shapes=1,
        num_micro_batches=9,
        waiting=0.0,
        supervised=1.0,
        seen=length,
    )

    def minutes(epochs):
        lengths = Lengths(num_samples=9, every=1, num_steps=4000, epochs=epochs, **seen)
        text = "\n".join(time_lines(own, None, lengths=lengths))
        assert "data: 9 pairs of two sequences of 1 to" in text
        return float(re.search(r"before the first step: (\S+) to \S+ hours", text)[1])

    assert minutes(2.0) == pytest.approx(minutes(1.0) / 2, rel=0.01)
    assert minutes(0.5) == minutes(1.0)  # of the 4,000 steps


def test_rows_of_pairs_are_shown_as_they_are():
    _, found, option = planned("--recipe", "llama-8b-lora", "--objective", "dpo", gpu="h100")
    assert rows_of(option.workload) == f"two rows of {option.workload.length:,} tokens for each pair"
    packed = replace(option.workload, packing=True)
    assert rows_of(packed) == f"packs of {2 * option.workload.length:,} tokens"
    assert "micro-batch: of pairs" in ways(found)[-1] and "longest sequences that fit" in "\n".join(needs(option))
    _, found, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    assert "pairs" not in "\n".join(ways(found))


def test_an_explanation_names_every_component_and_its_source():
    _, found, _ = planned("--recipe", "llama-8b-qlora", gpu="h100")
    text = "\n".join(explanation(try_out(found[0].workload, GPUS["h100"])))
    for option in found:
        assert all(name in text for name in option.memory.components)
    assert "datasheet" in text and "torchtitan" in text
    assert "TFLOP/s" not in "\n".join(explanation(try_out(found[0].workload, parse_gpu("24GiB"))))
