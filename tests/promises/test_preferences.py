"""Objectives over pairs and answers with a label: the same maths on every topology."""

import math

import pytest
from data_helpers import preference_pairs, rated_answers, write
from helpers import matrix
from promises.test_parity import TOPOLOGIES

pytestmark = pytest.mark.slow

KEYS = ("rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "nll_loss", "kl")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The files of 61 pairs and of 61 answers with a label, by name; the lengths are very different."""
    folder = tmp_path_factory.mktemp("preferences")
    write(folder / "pairs.jsonl", *preference_pairs(61))
    write(folder / "rated.jsonl", *rated_answers(61))
    return {"pairs": folder / "pairs.jsonl", "rated": folder / "rated.jsonl"}


def flags_of(data, objective, **more):
    # beta is large, so that rewards of random models on few steps are not all near zero.
    plain = {"objective": objective, "dataset": data["rated" if objective == "kto" else "pairs"], "beta": 0.5}
    # At larger rates rounding in a step grows with each of the next ones.
    rate = 5e-4 if more.get("method") == "full" else 2e-3
    return plain | {"learning_rate": rate, "max_grad_norm": 0, **more}


def steps(run):
    return [row for row in run.rows if "loss" in row]


CASES = [
    ({"objective": "dpo", "method": "lora", "packing": True}, ["fsdp2"]),
    ({"objective": "kto", "method": "lora"}, ["hybrid"]),
]


@pytest.mark.parametrize(("case", "names"), CASES)
def test_the_metrics_of_every_topology_are_those_of_one_process_with_one_pair_at_a_time(
    finetune, fp32, data, case, names
):
    """Losses and norms of the other objectives: the covering array."""
    flags = flags_of(data, max_steps=6, global_batch_size=24, **case)
    reference = finetune.ok("reference", config=fp32["single"], **flags | {"per_device_train_batch_size": 1})
    assert len(steps(reference)) == 6
    for name in names:
        config, processes, micro_batch = TOPOLOGIES[name]
        more = {"config": fp32[config], "per_device_train_batch_size": micro_batch}
        run = finetune.ok(name.replace(" ", "-"), processes, **flags | more)
        for key in ("loss", *KEYS):
            ours, theirs = ([row[key] for row in steps(each) if key in row] for each in (run, reference))
            # Rewards are differences of sums over whole answers, hundreds of nats.
            exact = {"rel": 1e-6, "abs": 1e-6} if key == "loss" else {"rel": 5e-6, "abs": 5e-6}
            assert ours == pytest.approx(theirs, **exact), (name, key)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), name
    margins = [row["rewards/margins"] for row in steps(reference) if "rewards/margins" in row]
    assert len(margins) == 6 and max(map(abs, margins)) > 0.01


@pytest.mark.parametrize("objective", matrix(["kto"], rest=["dpo"]))
def test_a_reference_that_is_computed_before_equals_the_one_along_the_way(finetune, fp32, data, objective):
    flags = flags_of(data, objective, method="lora", lora_dropout=0.5, eval_split_size=8, eval_on_start=True)
    along = finetune.ok("along", config=fp32["single"], **flags)
    before = finetune.ok("before", config=fp32["single"], precompute_reference=True, **flags)
    again = finetune.ok("again", 2, config=fp32["ddp"], precompute_reference=True, **flags)
    assert "in the cache" not in before.output and again.output.count("in the cache") == 2  # training and evaluation
    # Dropout draws other numbers on two ranks: only what was measured before the first step is the same there.
    for rows, others in ((before.rows, along.rows), (again.rows[:1], along.rows[:1])):
        for row, other in zip(rows, others, strict=True):
            assert row.keys() == other.keys()
            for key in row.keys() & {"loss", "eval_loss", "rewards/margins", "eval_rewards/margins", "kl", "eval_kl"}:
                assert row[key] == pytest.approx(other[key], rel=1e-6, abs=2e-6), key


def test_an_adapter_that_is_trained_on_is_compared_with_itself_as_it_was(finetune, fp32, data):
    flags = flags_of(data, "dpo", method="lora", seed=1)
    first = finetune.ok("first", config=fp32["single"], **flags)
    then = finetune.ok("then", config=fp32["single"], adapter_name_or_path=first.folder / "final", **flags)
    assert steps(first)[-1]["rewards/margins"] != pytest.approx(0, abs=1e-3)
    assert steps(then)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
