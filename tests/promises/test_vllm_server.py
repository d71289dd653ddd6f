"""Rollouts by a vLLM server: what it gets, that it is proven, that it may go and come back, and say anything.

The server is a stand-in (tests/fake_vllm.py) over the same weights.
"""

import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
from fake_vllm import FLAGS, GENERATE, TINY, FakeVllm
from helpers import ROOT, free_port
from vision_models import write_rows

from kit.data.feed.data_ranks import Ranks
from kit.preflight.rollout_checks import check_server
from kit.rollouts.generation import Request
from kit.rollouts.vllm_server import VllmServer
from kit.system.errors import LateError, UserError
from kit.tasks.grpo.spec import GrpoSettings

pytestmark = pytest.mark.slow

FULL = {"method": "full", "adapter_name_or_path": None}


@pytest.fixture
def served(request):
    """Start a server with the arguments of ``FakeVllm``."""

    def start(folder=TINY / "model", **changes):
        server = FakeVllm(folder, **changes)
        request.addfinalizer(server.close)
        return server

    return start


@pytest.fixture
def trained(finetune, fp32, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    return lambda name, url, **changes: finetune(
        name, **FLAGS | {"config": fp32["single"], "vllm_server_base_url": url} | changes
    )


def test_each_rollout_is_by_the_weights_of_its_step_and_a_server_that_came_back_gets_them_again(trained, served, fp32):
    server, other = served(), served(loses_at=4)
    run = trained("one", server.url, vllm_importance_sampling_cap=2)
    assert run.status == 0, run.output
    assert [row["sampling/logp_difference/max"] < 1e-5 for row in run.rows] == [True] * 4, run.rows
    assert all(row["sampling/capped_ratio"] == 0 for row in run.rows)
    assert [name[:13] for name in server.loaded()] == ["step-00000000", "step-00000002"]
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert len(asked) == 4 and len({body["seed"] for body in asked}) == 4
    assert all(
        (body["temperature"], body["top_p"], body["top_k"], body["ignore_eos"]) == (1, 1, 0, True) for body in asked
    )
    # It goes in the second rollout, on two processes, of which one alone talks to it.
    again = trained(
        "two", other.url, vllm_importance_sampling_cap=2, config=fp32["ddp"], processes=2, per_device_train_batch_size=2
    )
    assert again.status == 0 and "does not answer" in again.output, again.output
    assert [name[:13] for name in other.loaded()] == ["step-00000000", "step-00000002", "step-00000002"]
    assert [row["loss"] for row in again.rows] == pytest.approx([row["loss"] for row in run.rows], abs=1e-6)


def test_all_weights_reach_a_server_from_shards_and_its_cache_of_prefixes_is_reset(trained, served, fp32):
    server = served(loses_at=4)
    run = trained("full", server.url, **FULL, config=fp32["fsdp"], processes=2, per_device_train_batch_size=2)
    assert run.status == 0 and all(row["sampling/logp_difference/max"] < 1e-5 for row in run.rows), run.output
    assert [name[:13] for name in server.loaded()] == ["step-00000000", "step-00000002", "step-00000002"]
    paths = [path for path, _ in server.requests if path != "/v1/completions"]
    assert paths == ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"] * 3
    run = trained("stale", served(keeps_stale=True).url, **FULL)
    assert run.status == 2 and "after publishing step-00000002-" in run.output, run.output
    assert "nats on average" in run.output and "base without the adapter" not in run.output


def test_a_server_samples_at_the_temperature_and_its_log_probabilities_are_proven_without_it(trained, served):
    server = served()
    flags = {"rollout_temperature": 0.5, "rollout_top_k": 20, "rollout_top_p": 0.9, "rollout_min_p": 0.01}
    run = trained("warm", server.url, max_steps=2, **flags)
    assert run.status == 0 and run.rows[0]["sampling/logp_difference/max"] < 1e-5, run.output
    assert run.rows[0]["log_ratio"] < 1e-6 and 0 < run.rows[0]["sampling/cut_probability"] < 0.2, run.rows
    (body, *_) = [body for path, body in server.requests if path == "/v1/completions"]
    assert [body[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.5, 20, 0.9, 0.01]
    run = trained("warm", server.url, vllm_importance_sampling_cap=2, **flags)
    assert run.status == 2 and "log-probabilities before the temperature" in run.output, run.output


def test_images_reach_a_server_also_ahead_and_other_tokens_of_them_are_refused(trained, served, vision_model, tmp_path):
    model, data = vision_model("qwen2_vl"), write_rows(tmp_path, [[(70, 50)], [], [(120, 60), (56, 28)], [(70, 50)]])
    own = tmp_path / "own.py"
    own.write_text("def letters(expected, answer, row):\n    return sum(map(ord, answer)) % 97 / 97\n")
    flags = {"model_name_or_path": model, "adapter_name_or_path": None, "dataset": data, "learning_rate": 1e-2}
    flags["rewards"] = f"{own}:letters"
    server = served(model)
    run = trained("images", server.url, **flags, num_iterations=1, rollout_overlap=True)
    assert run.status == 0 and len(set(server.loaded())) == 4, run.output
    assert all(row["sampling/logp_difference/max"] < 1e-5 for row in run.rows), run.rows
    assert {len(body["content_parts"]) for path, body in server.requests if path == GENERATE} == {1, 2}
    run = trained("other", served(model, max_pixels=28 * 28).url, **flags)
    assert (
        run.status == 2
        and "makes other tokens of the images of" in run.output
        and "--mm-processor-kwargs" in run.output
    )


def test_a_run_stops_saved_if_an_adapter_did_not_arrive_or_the_server_is_gone(trained, served):
    server = served(keeps_stale=True)
    run = trained("stale", server.url)
    assert run.status == 2 and (run.folder / "checkpoints/step-00000002").is_dir(), run.output
    assert "after publishing step-00000002-" in run.output and "nats on average" in run.output
    state = json.loads((run.folder / "checkpoints/step-00000002/state.json").read_text())
    assert state["feed"]["num_taken"] == 1  # the prompts of the refused rollout are asked again
    gone = trained("stale", served(loses_at=1, away_seconds=600).url, vllm_server_timeout=1)
    assert gone.status == 2 and "stopped by an error after step 2 of 4, and saved" in gone.output, gone.output
    assert "does not answer" in gone.output and ", for 1 s" in gone.output
    new = served()
    run = trained("stale", new.url)
    assert run.status == 0 and [row["step"] for row in run.rows] == [1, 2, 3, 4], run.output
    assert [name[:13] for name in new.loaded()] == ["step-00000002"]


def test_a_run_that_waits_for_its_server_can_be_stopped(trained, served):
    server = served(loses_at=1, away_seconds=600)

    def stop(ranks):
        if server.away:
            os.kill(ranks[0].pid, signal.SIGTERM)
        return server.away

    run = trained("waits", server.url, vllm_server_timeout=600, meanwhile=stop)
    assert run.status == 75 and "stopped by a signal before the first step" in run.output, run.output


def test_what_a_server_cannot_do_is_refused_before_the_model_is_loaded(trained, served):
    server = served(max_model_len=100)
    free = f"http://127.0.0.1:{free_port()}"
    for changes, words in (
        ({}, "takes 100 tokens; expected max_length 128"),
        ({"use_dora": True, "adapter_name_or_path": None}, "what vLLM does not serve"),
        ({"vllm_server_base_url": "localhost:8000"}, "expected http://HOST:PORT"),
        ({"vllm_server_base_url": free, "vllm_server_timeout": 0.1}, "does not answer"),
        ({"vllm_server_base_url": served(lacks="/v1/load_lora_adapter").url}, "--enable-lora"),
        (FULL | {"vllm_server_base_url": served(lacks="/weight_info").url}, "VLLM_SERVER_DEV_MODE=1 vllm serve"),
        ({"objective": "sft"}, "objective sft does not read it"),
        ({"rollout_overlap": True, "vllm_server_base_url": None}, "needs a vLLM server"),
        (
            {"rollout_overlap": True, "tools": f"{ROOT}/recipes/tiny-tools/tools.py:price"},
            "completions of a single turn",
        ),
        ({"rollout_overlap": True, "rollout_temperature": 0.5}, "log-probabilities before the temperature"),
    ):
        run = trained("refused", server.url, **changes)
        assert run.status == 2 and words in run.output, (changes, run.output)
        assert "Traceback" not in run.output and not (run.folder / "run.json").exists()


def sampler_of(model, url):
    """What asks the server at ``url``, in the settings that it reads, for a model that did not train."""
    sampling = GrpoSettings(vllm_server_base_url=url, vllm_server_timeout=1)
    others = {"ddp_timeout": 1, "output_dir": "", "max_length": 64, "seed": 0, "method": "lora"}
    recipe = SimpleNamespace(**vars(sampling), **others)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    prepared = SimpleNamespace(model=model, accelerator=accelerator, processes=Ranks())
    return recipe, VllmServer(prepared, recipe, [2], None, lambda items, *_: items)


def test_trajectories_with_equal_ids_are_asked_together_and_each_gets_its_own_turn(served):
    from transformers import AutoModelForCausalLM

    server = served()
    recipe, asking = sampler_of(AutoModelForCausalLM.from_pretrained(TINY / "model"), server.url)
    recipe.ddp_timeout = 60
    prompts = [[5, 6], [5, 7, 8], [5, 6]]
    turns = dict(asking.sample([Request(ids, (0, 0, k, 1), 4) for k, ids in enumerate(prompts)]))
    bodies = {len(body["prompt"]): body for _, body in server.requests}
    assert [bodies[2]["n"], bodies[3]["n"]] == [2, 1] and bodies[2]["seed"] != bodies[3]["seed"]
    equal, other = (server.reply("/v1/completions", bodies[length])[1]["choices"] for length in (2, 3))
    assert [turns[k].ids for k in range(3)] == [each["token_ids"] for each in (equal[0], other[0], equal[1])]


@pytest.fixture
def saying(request):
    """Start a server that answers each request with the bytes that a function yields, and return what asks it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "model")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                for each in self.server.say():
                    self.wfile.write(each)
            except OSError:
                pass  # the client has gone

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    request.addfinalizer(server.server_close)
    request.addfinalizer(server.shutdown)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    recipe, asking = sampler_of(adapted, f"http://127.0.0.1:{server.server_port}")

    def ask(say):
        server.say = say
        return [completion for _, completion in asking.sample([Request([5, 6], (0, 0, k), 3) for k in (0, 1)])]

    def check(say):
        server.say = say
        check_server(recipe)

    return ask, check


def endless(start, again):
    yield start
    while True:
        time.sleep(0.05)
        yield again


def test_a_server_that_says_anything_at_all_costs_its_time_and_a_message(saying):
    ask, check = saying
    first = {"index": 0, "finish_reason": "length", "token_ids": [7, 2], "logprobs": {"token_logprobs": [-1.0, -2]}}
    second = {"index": 1, "finish_reason": "length", "token_ids": [7, 8, 9], "logprobs": {"token_logprobs": [-1] * 3}}
    ok = b"HTTP/1.1 200 OK\r\n\r\n"

    def whole(content):
        return lambda: [ok, json.dumps(content).encode()]

    answers = ask(whole({"choices": [second, first]}))
    assert [(answer.ids, answer.ended) for answer in answers] == [([7, 2], True), ([7, 8, 9], False)]
    for changes in (
        {"token_ids": [7.0, 2.0]},
        {"token_ids": [7, 10**6]},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"token_ids": [7, 2, 7]},
        {"token_ids": [7] * 4, "logprobs": {"token_logprobs": [-1] * 4}},
        {"logprobs": {"token_logprobs": [[-1.0], [-2.0]]}},
        {"logprobs": {"token_logprobs": [-1.0, float("nan")]}},
        {"finish_reason": "stop", "token_ids": [7, 8]},
        {"finish_reason": ["stop"]},
        {"index": "0"},
    ):
        with pytest.raises(LateError, match="/v1/completions: "):
            ask(whole({"choices": [first | changes, second]}))
    for say, words in (
        (lambda: [ok, b'{"choices": ' + b"[" * 100_000], "recursion limit"),
        (lambda: endless(ok, b" " * 100_000), "status 200, more than"),
        (lambda: [ok[:-2] + b"Content-Length: 99999999999\r\n\r\n", b" "], "v1/completions: "),
        (lambda: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "does not answer"),
        (lambda: endless(ok, b" "), "does not answer"),
    ):
        with pytest.raises(LateError, match=words):
            ask(say)
    for models in (["a"], [{"max_model_len": float("inf")}], []):
        with pytest.raises(UserError, match="expected a vLLM server"):
            check(whole({"data": models}))
