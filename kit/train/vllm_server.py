"""Answers from a vLLM server that runs apart: ``vllm serve``, which gets the run's adapter before each rollout.

Promises:

- Prompts go and answers come as ids, with their log-probabilities. They are drawn at temperature 1 from all tokens, by
  seeds of (seed, rollout, sample) to which vLLM adds the number of the answer: vLLM's draws, not those of the kit.
- Only the main process talks to the server, and each call ends. While it waits, all ranks meet once a second.
- An adapter is named after its content, so the server cannot answer with an earlier one. A server that was started
  again is given it again, and asked again for the whole rollout.

The API is that of vLLM 0.32: https://docs.vllm.ai/en/latest/features/lora.html, "Dynamically serving LoRA adapters".
"""

import http.client
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import xxhash

from kit import durable
from kit.console import say
from kit.errors import LateError, Problem, UserError, first_line
from kit.model.locate import open_adapter
from kit.model.serving import why_not_served
from kit.model.token_rows import num_rows
from kit.strategy.rendezvous import from_main
from kit.strategy.weights import gather_trainable
from kit.train.generation import Completion

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.accelerator import Prepared

FIELD = "vllm_server_base_url"
FOLDER = "published"  # in output_dir: the adapter that the server reads
MAX_REQUESTS = 128  # prompts that are asked at once
MAX_ATTEMPTS = 5  # at one rollout, with a server that goes again and again
PROBE_SECONDS = 30.0  # of a call that takes no time
# The server would take what is not said from the model's generation_config.json. Beside ``stop_token_ids`` nothing ends
# an answer.
SAMPLING = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"logprobs": 0, "return_token_ids": True},  # logprobs 0: those of the tokens drawn alone
}


class _Gone(Exception):
    """The server does not answer, or has lost the adapter."""


class Client:
    """Calls of a vLLM server over HTTP."""

    def __init__(self, settings: "Recipe") -> None:
        parts = urlsplit(settings.vllm_server_base_url or "")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._wait_seconds = parts.netloc, settings.vllm_server_timeout
        self._open: set[http.client.HTTPConnection] = set()

    def status(self, path: str, body: Any = None, seconds: float = PROBE_SECONDS) -> tuple[int, bytes]:
        """Send ``body`` as JSON, or ask without one. Returns the status and the content of the answer."""
        connection = self._connect(self._host, timeout=seconds)
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open.add(connection)
        try:
            method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise _Gone(first_line(error)) from None
        finally:
            self._open.discard(connection)
            connection.close()

    def call(self, path: str, body: Any = None, seconds: float = PROBE_SECONDS, gone: Sequence[int] = ()) -> bytes:
        """Return what the server answers; a status of ``gone`` means that it has gone."""
        status, content = self.status(path, body, seconds)
        if status == 200:
            return content
        found = f"{path} gave status {status}: {content[:300].decode(errors='replace')}"
        if status in gone:
            raise _Gone(found)
        raise LateError(Problem(FIELD, f"{self.url}{found}", "status 200", "the server's own log says more"))

    def hang_up(self) -> None:
        """Let all calls that are under way fail."""
        for connection in list(self._open):
            with suppress(OSError, AttributeError):  # not connected yet
                connection.sock.shutdown(socket.SHUT_RDWR)

    def wait(self, why: str = "") -> Iterator[None]:
        """Wait until the server is up, and yield each second.

        Raises:
            LateError: it is not within ``vllm_server_timeout``.
        """
        end, is_said = time.monotonic() + self._wait_seconds, False
        while True:
            with suppress(_Gone):
                if self.status("/health")[0] == 200:
                    return
            found = f"{self.url} does not answer{why and f' ({why})'}"
            if time.monotonic() > end:
                fix = "start it (docs/rollouts.md), then type the same command again"
                raise LateError(Problem(FIELD, f"{found}, for {self._wait_seconds:g} s", fix=fix))
            if not is_said:
                say(f"{found}: waiting for it, at most {self._wait_seconds:g} s (--vllm_server_timeout)")
            is_said = True
            time.sleep(1)
            yield


def check_server(recipe: "Recipe") -> None:
    """Check that the server is up and can serve this run. Waits for it.

    Raises:
        UserError: it is not, or the run's adapters are of a kind that vLLM does not take.
    """
    if reason := why_not_served(_config_of(recipe)):
        raise UserError(Problem(FIELD, reason, fix="leave it out, and the model writes its answers itself"))
    client = Client(recipe)
    for _ in client.wait():
        pass
    try:
        models = json.loads(client.call("/v1/models"))["data"]
        longest = min(int(model["max_model_len"]) for model in models if not model.get("parent"))
        status, _ = client.status("/v1/load_lora_adapter", {})  # of no adapter
    except (_Gone, ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(FIELD, f"{client.url}: {first_line(error)}", "a vLLM server")) from None
    if longest < recipe.max_length:
        fix = f"vllm serve ... --max-model-len {recipe.max_length}"
        raise UserError(Problem(FIELD, f"{client.url} takes {longest} tokens", f"max_length {recipe.max_length}", fix))
    if status == 404:
        fix = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve ... --enable-lora --max-lora-rank R"
        raise UserError(Problem(FIELD, f"{client.url} takes no adapters while it runs", "one that does", fix))


def _config_of(recipe: "Recipe") -> Any:
    """What ``why_not_served`` asks of the adapter's config."""
    from peft import PeftConfig

    if recipe.adapter_name_or_path:
        config: Any = PeftConfig.from_pretrained(str(open_adapter(recipe.adapter_name_or_path)))
        return SimpleNamespace(**config.to_dict() | {"use_rslora": False})  # which vLLM takes
    return SimpleNamespace(
        peft_type=recipe.adapter_type,
        trainable_token_indices=recipe.trainable_tokens or recipe.new_tokens,
        modules_to_save=recipe.lora_modules_to_save,
        use_dora=recipe.use_dora,
        r=recipe.lora_r,
        rank_pattern=(recipe.adapter_options or {}).get("rank_pattern"),
        use_rslora=False,
    )


class VllmServer:
    """A vLLM server as an engine: see ``kit.train.engine.Engine``."""

    def __init__(
        self,
        prepared: "Prepared",
        recipe: "Recipe",
        prompt_of: Callable[[int], Sequence[int]],
        stops: Sequence[int],
        progress: Callable[..., Any],
    ) -> None:
        self._prepared, self._recipe, self._prompt_of, self._stops = prepared, recipe, prompt_of, stops
        self._progress, self._client = progress, Client(recipe)
        self._folder = Path(recipe.output_dir or "").resolve() / FOLDER
        self._loaded = ""  # the adapter that this process has given to the server
        self.published = ""

    def publish(self, step: int) -> None:
        """Write the adapter after ``step`` steps to where the server reads it."""
        from safetensors.torch import save

        accelerator, model = self._prepared.accelerator, self._prepared.model
        state = gather_trainable(accelerator, model)

        def write() -> str:
            tensors = {re.sub(r"\.default(?=\.|$)", "", name): each for name, each in state.items() if "lora_" in name}
            content = save({name: each.contiguous() for name, each in tensors.items()}, {"format": "pt"})
            folder = self._folder / f"step-{step:08d}-{xxhash.xxh3_64_hexdigest(content)}"
            durable.make_afresh(self._folder)
            folder.mkdir()
            (folder / "adapter_model.safetensors").write_bytes(content)
            accelerator.unwrap_model(model).peft_config["default"].save_pretrained(folder)
            return folder.name

        self.published = from_main(write)

    @contextmanager
    def answering(
        self, number: int, tasks: Sequence[tuple[int, int]]
    ) -> Iterator[Callable[[Sequence[int]], list[Completion]]]:
        """See ``kit.train.engine.Engine``. Raises ``LateError`` on all ranks if the server fails for good."""
        answers: list[Completion] = []

        def ask() -> list[Problem] | bool:
            try:
                return next(asking, True)
            except LateError as error:
                return error.problems

        with closing(self._asking(number, tasks, answers)) as asking:
            for _ in self._progress(itertools.repeat(None), "rollout", None):
                state = from_main(ask)
                if isinstance(state, list):
                    raise LateError(*state)
                if state:
                    break
        answers = from_main(lambda: answers)
        yield lambda places: [answers[place] for place in places]

    def _asking(self, number: int, tasks: Sequence[tuple[int, int]], answers: list[Completion]) -> Generator[bool]:
        """Ask for the answers to ``tasks``, and put them into ``answers``. Yields False about once a second."""
        for attempt in itertools.count(1):
            try:
                self._load()
                for found in self._replies(number, dict.fromkeys(sample for sample, _ in tasks)):
                    if found is None:
                        yield False
                    else:
                        answers += [found[sample][k] for sample, k in tasks]
                return
            except _Gone as error:
                self._loaded = ""
                if attempt == MAX_ATTEMPTS:
                    found_ = f"{self._client.url} failed {attempt} times in a rollout: {error}"
                    raise LateError(Problem(FIELD, found_, fix="the server's own log says why")) from None
                say(f"the vLLM server failed and is asked again: {error}")
                time.sleep(1)  # one that ends answers for a moment
                for _ in self._client.wait(str(error)):
                    yield False

    def _load(self) -> None:
        """Let the server load the adapter."""
        if self._loaded == self.published:
            return
        body = {"lora_name": self.published, "lora_path": str(self._folder / self.published), "load_inplace": True}
        self._client.call("/v1/load_lora_adapter", body, self._recipe.vllm_server_timeout)
        if self._loaded:
            self._client.status("/v1/unload_lora_adapter", {"lora_name": self._loaded})
        self._loaded = self.published

    def _replies(self, number: int, samples: Sequence[int] | dict[int, None]) -> Iterator[dict[int, Any] | None]:
        """Yield None each second, and then the answers to each sample."""
        pool = ThreadPoolExecutor(min(MAX_REQUESTS, len(samples)))
        futures = {sample: pool.submit(self._reply, number, sample) for sample in samples}
        try:
            while True:
                done, others = wait(futures.values(), 1.0, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if not others:
                    break
                yield None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _end(self._client, [*futures.values()])
        yield {sample: future.result() for sample, future in futures.items()}

    def _reply(self, number: int, sample: int) -> list[Completion]:
        """Return the answers to a prompt."""
        recipe = self._recipe
        seed = int(np.random.SeedSequence([recipe.seed, number, sample]).generate_state(1, np.uint64)[0] >> 2)
        body = {
            "model": self.published,
            "prompt": list(self._prompt_of(sample)),
            "n": recipe.num_generations,
            "seed": seed,
            "max_tokens": recipe.max_new_tokens,
            "stop_token_ids": sorted(self._stops),
            **SAMPLING,
        }
        content = self._client.call("/v1/completions", body, recipe.ddp_timeout, gone=(404, *range(500, 600)))
        try:
            choices = sorted(json.loads(content)["choices"], key=lambda choice: choice["index"])
            found = [
                Completion(each["token_ids"], each["finish_reason"] == "stop", each["logprobs"]["token_logprobs"])
                for each in choices
            ]
            size = num_rows(self._prepared.accelerator.unwrap_model(self._prepared.model))
            for ids, _, logps in found:
                are_ids = all(isinstance(each, int) and 0 <= each < size for each in ids)
                if not (are_ids and 0 < len(ids) == len(logps) and all(map(math.isfinite, logps))):
                    raise ValueError("ids of another model, or without log-probabilities")
            if len(found) != recipe.num_generations:
                raise ValueError(f"{len(found)} answers, not {recipe.num_generations}")
        except (ValueError, KeyError, TypeError) as error:
            found_ = f"{self._client.url}/v1/completions: {first_line(error)}"
            raise LateError(Problem(FIELD, found_, "a vLLM server with return_token_ids: 0.10.2 or later")) from None
        return found


def _end(client: Client, futures: Sequence["Future[Any]"]) -> None:
    """Wait until no call is under way."""
    while wait(futures, 0.1).not_done:
        client.hang_up()
