"""A server with the part of vLLM's HTTP interface that rollouts use, over transformers and peft on the CPU.

It says of a request what vLLM 0.32 was seen to say. With the tiny model it is about as exact: 1e-6 nats.
"""

import base64
import io
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from helpers import ROOT

COMPLETIONS, GENERATE, CHAT = "/v1/completions", "/inference/v1/generate", "/v1/chat/completions"
TINY = ROOT / "recipes/tiny"
# Of a run that it serves.
FLAGS = {
    "model_name_or_path": TINY / "model",
    "adapter_name_or_path": TINY / "sft",
    "dataset": TINY / "train.jsonl",
    "method": "lora",
    "objective": "grpo",
    "rewards": "token_f1",
    "max_length": 128,
    "max_new_tokens": 8,
    "num_generations": 4,
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "num_iterations": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "vllm_server_timeout": 20,
}


class FakeVllm:
    """Serves the model in ``folder`` until it is closed.

    Attributes:
        requests: paths and bodies, in their order.
        loses_at: the number of the request for answers at which it ends as if it were killed, and begins again with its
            first weights after ``away_seconds``; 0: never.
        keeps_stale: weights are loaded under their name only if they are the first ones.
        lacks: a path that it does not know.
        max_logprobs: how many of a token of a prompt it gives.
        hold: called with the body of a request for completions, before they are generated.
        max_pixels: of an image, of a model of the family qwen2_vl.
    """

    def __init__(
        self,
        folder: Path,
        loses_at: int = 0,
        away_seconds: float = 2,
        keeps_stale: bool = False,
        max_model_len: int = 256,
        lacks: str = "",
        max_logprobs: int = 20,
        hold: Callable[[dict[str, Any]], None] = lambda body: None,
        max_pixels: int = 0,
    ) -> None:
        from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.loses_at, self.away_seconds = loses_at, away_seconds
        self.name, self.max_logprobs = str(folder), max_logprobs
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.keeps_stale, self.max_model_len, self.lacks, self.hold = keeps_stale, max_model_len, lacks, hold
        has_images = (folder / "preprocessor_config.json").exists()
        auto: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(folder, dtype="float32").eval()
        self._images: Any = AutoImageProcessor.from_pretrained(folder) if has_images else None
        if max_pixels:
            self._images.size["longest_edge"] = max_pixels
        self._first = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        self._lock, self._up_at, self._names, self._version = threading.Lock(), 0.0, set[str](), "default"
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                status, content = owner.reply(self.path, body)
                if status:  # else the connection ends, as that of a process that was killed
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def away(self) -> bool:
        """Whether it has ended and not begun again."""
        return time.monotonic() < self._up_at

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def loaded(self) -> list[str]:
        """The names of the weights that it was given, in their order."""
        paths = ("/v1/load_lora_adapter", "/update_weight_version")
        return [body.get("lora_name") or body["new_version"] for path, body in self.requests if path in paths and body]

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        if path in (COMPLETIONS, GENERATE, CHAT):
            self.hold(body)
        with self._lock:
            if self.away:
                return (503, {}) if path == "/health" else (0, None)
            if path == self.lacks:
                return 404, {"detail": "Not Found"}
            if path == "/v1/models":
                return 200, {"data": [{"id": "base", "parent": None, "max_model_len": self.max_model_len}]}
            if path == "/weight_info":
                return 200, {"weight_version": self._version}
            if body is not None:
                self.requests.append((path, body))
            if path == "/collective_rpc":
                return self._reload(body)
            if path == "/update_weight_version":
                self._version = body["new_version"]
            if path == "/reset_prefix_cache":
                return 200, {"success": True}
            if path == "/v1/load_lora_adapter":
                return self._load(body)
            if path == "/tokenize":
                if body["model"] != self.name:
                    return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
                return 200, {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
            if path == COMPLETIONS:
                return self._complete(body, {})
            if path == GENERATE:
                return self._generate(body)
            if path == CHAT:
                return self._chat(body)
            return 200, {}

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

        if not body:
            return 400, {"error": {"message": "Field required"}}
        if not hasattr(self._model, "peft_config"):
            self._model = PeftModel.from_pretrained(self._model, body["lora_path"]).eval()
        elif not self.keeps_stale:
            set_peft_model_state_dict(self._model, load_peft_weights(body["lora_path"], device="cpu"))
        self._names.add(body["lora_name"])
        return 200, {}

    def _reload(self, body: dict[str, Any]) -> tuple[int, Any]:
        from safetensors.torch import load_file

        assert body["method"] == "reload_weights"
        if not self.keeps_stale or self._version == "default":
            state = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            assert state["lm_head.weight"].equal(state["model.embed_tokens.weight"])
            self._model.load_state_dict(state)
        return 200, {"results": [None]}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Completions of a prompt with images, in which each placeholder becomes as many as its image has features."""
        from PIL import Image as pil

        assert {part["type"] for part in body["content_parts"]} == {"image_url"} and body["return_token_ids"]
        files = [base64.b64decode(part["url"].removeprefix("data:image/png;base64,")) for part in body["content_parts"]]
        images = self._images(images=[pil.open(io.BytesIO(file)) for file in files], return_tensors="pt")
        counts = iter((images["image_grid_thw"].prod(-1) // self._images.merge_size**2).tolist())
        holder = self._model.config.image_token_id
        ids = [each for i in body["token_ids"] for each in [i] * (next(counts, 1) if i == holder else 1)]
        given = {name: body[name] for name in ("model",) if name in body}
        status, content = self._complete(body["sampling_params"] | {"prompt": ids} | given, dict(images))
        for choice in content["choices"] if status == 200 else ():
            choice["logprobs"] = {"content": [{"logprob": each} for each in choice["logprobs"]["token_logprobs"]]}
        return status, content | {"prompt_token_ids": ids}

    def _chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)["input_ids"]
        given = {name: body[name] for name in ("max_tokens", "seed", "temperature")}
        asked = {"prompt": ids, "n": 1, "stop_token_ids": [self.tokenizer.eos_token_id], "logit_bias": {}, "top_k": 0}
        status, content = self._complete(asked | given, {})
        for choice in content["choices"] if status == 200 else ():
            text = self.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        return status, content

    def _complete(self, body: dict[str, Any], images: dict[str, Any]) -> tuple[int, Any]:
        if self.loses_at and sum(path in (COMPLETIONS, GENERATE, CHAT) for path, _ in self.requests) == self.loses_at:
            self._names, self._up_at = set(), time.monotonic() + self.away_seconds
            if self._version != "default":
                self._model.load_state_dict(self._first)
                self._version = "default"
            return 0, None
        if "prompt_logprobs" in body:
            return self._score(body)
        if "model" in body and body["model"] not in self._names:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        return 200, {"choices": [self._choice(body, k, images) for k in range(body["n"])]}

    def _score(self, body: dict[str, Any]) -> tuple[int, Any]:
        """The most probable tokens of each place of the prompt, and its own token, which comes first."""
        import torch

        ids, k = body["prompt"], body["prompt_logprobs"]
        message = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
        if k <= self.max_logprobs:
            message = "The decoder prompt plus the number of requested output tokens is longer than the maximum"
        if k > self.max_logprobs or len(ids) + body["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": message}}
        torch.set_num_threads(1)
        with torch.no_grad():
            logps = self._model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        known: list[Any] = [None]
        for token, row in zip(ids[1:], logps, strict=True):
            best = row.topk(k).indices.tolist()
            known.append({str(each): {"logprob": float(row[each])} for each in dict.fromkeys([token, *best])})
        return 200, {"choices": [{"index": 0, "prompt_logprobs": known}]}

    def _choice(self, body: dict[str, Any], k: int, images: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)  # of this request's thread, which else would make a pool of its own
        generator = torch.Generator().manual_seed(body["seed"] + k)
        ids, logps, ended = list(body["prompt"]), [], False
        while len(logps) < body["max_tokens"] and not ended:
            input_ids = torch.tensor([ids])
            if images:
                images["mm_token_type_ids"] = (input_ids == self._model.config.image_token_id).long()
            with torch.no_grad():
                logits = self._model(input_ids=input_ids, **images).logits[0, -1]
            scores = logits / body["temperature"]
            scores[[int(each) for each in body["logit_bias"]]] = -torch.inf
            if body["top_k"]:
                scores[scores < scores.topk(body["top_k"]).values[-1]] = -torch.inf
            ids.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
            logps.append(float(logits.log_softmax(-1)[ids[-1]]))  # before the temperature, as vLLM does it
            ended = ids[-1] in body["stop_token_ids"]
        return {
            "index": k,
            "token_ids": ids[len(body["prompt"]) :],
            "logprobs": {"token_logprobs": logps},
            "finish_reason": "stop" if ended else "length",
        }
