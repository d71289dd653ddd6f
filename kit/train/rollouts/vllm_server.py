"""Answers from a vLLM server that runs apart: ``vllm serve``, which gets the run's adapter before each rollout.

Promises:

- Prompts go and answers come as ids, with their log-probabilities. They are drawn at temperature 1 from all tokens, by
  seeds of (seed, rollout, sample) to which vLLM adds the number of the answer: vLLM's draws, not those of the kit.
- Only the main process talks to the server. Each call ends within its time, and no more is read than was asked for.
  While it waits, all ranks meet once a second.
- An adapter is named after its content, so the server cannot answer with an earlier one. A server that was started
  again is given it again, and asked again for the whole rollout.

The API is that of vLLM 0.32: https://docs.vllm.ai/en/latest/features/lora.html, "Dynamically serving LoRA adapters".
"""

import http.client
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import xxhash
from pydantic import BaseModel, FiniteFloat

from kit.model.adapters.serving import why_not_served
from kit.model.adapters.token_rows import num_rows
from kit.strategy.processes.rendezvous import from_main
from kit.strategy.processes.tcp_store import call_within
from kit.strategy.weights import gather_trainable
from kit.system import durable
from kit.system.console import say
from kit.system.errors import LateError, Problem, UserError, first_line
from kit.train.rollouts.generation import Completion

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.accelerator import Prepared

FIELD = "vllm_server_base_url"
FOLDER = "published"  # in output_dir: the adapter that the server reads
MAX_REQUESTS = 128  # prompts that are asked at once
MAX_ATTEMPTS = 5  # at one rollout, with a server that goes again and again
PROBE_SECONDS = 30.0  # of a call that takes no time
MAX_BYTES, BYTES_OF_TOKEN = 1 << 20, 1 << 10  # of what it answers: without tokens, and for each token
# The server would take what is not said from the model's generation_config.json. With ignore_eos nothing but
# stop_token_ids ends an answer. Beside the tokens drawn, no others' log-probabilities are asked for.
SAMPLING = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"logprobs": 0, "return_token_ids": True},
}


class _Gone(Exception):
    """The server does not answer, or has lost the adapter."""


class _Model(BaseModel):
    max_model_len: int | None = None
    parent: str | None = None


class _Models(BaseModel):
    data: list[_Model]


class _Logprobs(BaseModel):
    token_logprobs: list[FiniteFloat]


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _Logprobs


class _Completions(BaseModel):
    choices: list[_Choice]


class Client:
    """Calls of a vLLM server over HTTP."""

    def __init__(self, settings: "Recipe") -> None:
        self.url = (settings.vllm_server_base_url or "").rstrip("/")
        self._wait_seconds = settings.vllm_server_timeout
        self._open: set[http.client.HTTPConnection] = set()

    def ask(
        self, path: str, body: Any = None, seconds: float = PROBE_SECONDS, max_bytes: int = MAX_BYTES
    ) -> tuple[int, bytes]:
        """Send ``body`` as JSON, or ask without one. Returns the status and the content, one byte too long at most."""
        scheme, host, *_ = urlsplit(self.url)
        connect = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection = connect(host, timeout=seconds)
        self._open.add(connection)

        def exchange() -> tuple[int, bytes]:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read(max_bytes + 1)

        try:
            return call_within(seconds, exchange)
        except (OSError, http.client.HTTPException) as error:
            raise _Gone(first_line(error)) from None
        finally:
            self._open.discard(connection)
            _hang_up(connection)
            connection.close()

    def call(
        self,
        path: str,
        body: Any = None,
        seconds: float = PROBE_SECONDS,
        may_go: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> bytes:
        """Return what the server answers. With ``may_go``, 404 and errors of its own mean that it has gone."""
        status, content = self.ask(path, body, seconds, max_bytes)
        if status == 200 and len(content) <= max_bytes:
            return content
        is_long = f", more than {max_bytes} bytes" if len(content) > max_bytes else ""
        found = f"{path} gave status {status}{is_long}: {content[:300].decode(errors='replace')}"
        if may_go and (status == 404 or status >= 500):
            raise _Gone(found)
        raise LateError(Problem(FIELD, f"{self.url}{found}", "status 200", "the server's own log says more"))

    def hang_up(self) -> None:
        """Let all calls that are under way fail."""
        for connection in list(self._open):
            _hang_up(connection)

    def wait(self, why: str = "") -> Iterator[None]:
        """Wait until the server is up, and yield each second.

        Raises:
            LateError: it is not within ``vllm_server_timeout``.
        """
        found = f"{self.url} does not answer{why and f' ({why})'}"
        begun = time.monotonic()
        for second in itertools.count():
            with suppress(_Gone):
                if self.ask("/health", seconds=min(PROBE_SECONDS, self._wait_seconds))[0] == 200:
                    return
            if time.monotonic() - begun > self._wait_seconds:
                fix = "start it (docs/rollouts.md), then type the same command again"
                raise LateError(Problem(FIELD, f"{found}, for {self._wait_seconds:g} s", fix=fix))
            if not second:
                say(f"{found}: waiting for it, at most {self._wait_seconds:g} s (--vllm_server_timeout)")
            time.sleep(1)
            yield


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # not connected, or not any more
        connection.sock.shutdown(socket.SHUT_RDWR)


def check_server(recipe: "Recipe") -> None:
    """Check that the server is up and can serve this run. Waits for it.

    Raises:
        UserError: it is not, or cannot.
    """
    client = Client(recipe)
    for _ in client.wait():
        pass
    try:
        models = _Models.model_validate_json(client.call("/v1/models"), strict=True).data
        longest = min(model.max_model_len or 0 for model in models if not model.parent)
        takes_adapters = client.ask("/v1/load_lora_adapter", {})[0] != 404  # of no adapter
    except (_Gone, ValueError) as error:
        raise UserError(Problem(FIELD, f"{client.url}: {str(error)[:300]}", "a vLLM server")) from None
    if longest < recipe.max_length:
        fix = f"vllm serve ... --max-model-len {recipe.max_length}"
        raise UserError(Problem(FIELD, f"{client.url} takes {longest} tokens", f"max_length {recipe.max_length}", fix))
    if not takes_adapters:
        fix = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve ... --enable-lora --max-lora-rank R"
        raise UserError(Problem(FIELD, f"{client.url} takes no adapters while it runs", "one that does", fix))


class VllmServer:
    """A vLLM server as an engine: see ``kit.train.rollouts.engine.Engine``."""

    def __init__(
        self,
        prepared: "Prepared",
        recipe: "Recipe",
        prompt_of: Callable[[int], Sequence[int]],
        stops: Sequence[int],
        progress: Callable[..., Any],
    ) -> None:
        """
        Raises:
            UserError: vLLM does not take adapters of this kind.
        """
        self._accelerator, self._model = prepared.accelerator, prepared.model
        self._plain: Any = prepared.accelerator.unwrap_model(prepared.model)
        self._recipe, self._prompt_of, self._stops, self._progress = recipe, prompt_of, stops, progress
        self._client = Client(recipe)
        self._folder = Path(recipe.output_dir or "").resolve() / FOLDER
        self._loaded = ""  # the adapter that this process has given to the server
        self.published = ""
        if reason := why_not_served(self._plain.peft_config["default"], by_vllm=True):
            raise UserError(Problem(FIELD, reason, fix="leave it out, and the model writes its answers itself"))

    def publish(self, step: int) -> None:
        """Write the adapter after ``step`` steps to where the server reads it."""
        from safetensors.torch import save

        state = gather_trainable(self._accelerator, self._model)

        def write() -> str:
            tensors = {re.sub(r"\.default(?=\.|$)", "", name): each for name, each in state.items() if "lora_" in name}
            content = save({name: each.contiguous() for name, each in tensors.items()}, {"format": "pt"})
            folder = self._folder / f"step-{step:08d}-{xxhash.xxh3_64_hexdigest(content)}"
            durable.make_afresh(self._folder)
            folder.mkdir()
            (folder / "adapter_model.safetensors").write_bytes(content)
            self._plain.peft_config["default"].save_pretrained(folder)
            return folder.name

        self.published = from_main(write)

    @contextmanager
    def answering(
        self, number: int, tasks: Sequence[tuple[int, int]]
    ) -> Iterator[Callable[[Sequence[int]], list[Completion]]]:
        """See ``kit.train.rollouts.engine.Engine``. Raises ``LateError`` on all ranks if the server fails for good."""

        def ask() -> tuple[list[Completion] | None, list[Problem]]:
            try:
                return next(asking), []
            except LateError as error:
                return None, error.problems

        answers: list[Completion] | None = None
        with closing(self._asking(number, tasks)) as asking:
            for _ in self._progress(itertools.repeat(None), "rollout", None):
                answers, problems = from_main(ask)
                if problems:
                    raise LateError(*problems)
                if answers is not None:
                    break
        known = answers or []
        yield lambda places: [known[place] for place in places]

    def _asking(self, number: int, tasks: Sequence[tuple[int, int]]) -> Generator[list[Completion] | None]:
        """Yield None about once a second, and then the answers to ``tasks``."""
        for attempt in itertools.count(1):
            try:
                self._load()
                found = yield from self._replies(number, list(dict.fromkeys(sample for sample, _ in tasks)))
                yield [found[sample][k] for sample, k in tasks]
            except _Gone as error:
                self._loaded = ""
                why = f"{self._client.url} failed in a rollout: {error}"
                if attempt == MAX_ATTEMPTS:
                    raise LateError(Problem(FIELD, why, fix="the server's own log says why")) from None
                say(f"{why}; it is asked again for all of it")
                time.sleep(1)  # one that ends answers for a moment
                yield from self._client.wait(str(error))

    def _load(self) -> None:
        """Let the server load the adapter."""
        if self._loaded == self.published:
            return
        body = {"lora_name": self.published, "lora_path": str(self._folder / self.published), "load_inplace": True}
        self._client.call("/v1/load_lora_adapter", body, self._recipe.vllm_server_timeout)
        if self._loaded:
            self._client.ask("/v1/unload_lora_adapter", {"lora_name": self._loaded})
        self._loaded = self.published

    def _replies(self, number: int, samples: Sequence[int]) -> Generator[None, None, dict[int, list[Completion]]]:
        """Return the answers to each sample; yields each second until they are there."""
        pool = ThreadPoolExecutor(min(MAX_REQUESTS, len(samples)))
        futures = {sample: pool.submit(self._reply, number, sample) for sample in samples}
        try:
            while not all(future.done() for future in futures.values()):
                for future in wait(futures.values(), 1.0, FIRST_EXCEPTION).done:
                    future.result()
                yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # One that was cancelled before it began is done, and yet `wait` would wait for it for ever.
            while wait([future for future in futures.values() if not future.done()], 0.1).not_done:
                self._client.hang_up()
        return {sample: future.result() for sample, future in futures.items()}

    def _reply(self, number: int, sample: int) -> list[Completion]:
        """Return the answers to a prompt."""
        recipe, prompt = self._recipe, list(self._prompt_of(sample))
        body = {
            "model": self.published,
            "prompt": prompt,
            "n": recipe.num_generations,
            "seed": int(np.random.SeedSequence([recipe.seed, number, sample]).generate_state(1, np.uint64)[0] >> 2),
            "max_tokens": recipe.max_new_tokens,
            "stop_token_ids": list(self._stops),
            **SAMPLING,
        }
        num_tokens = recipe.num_generations * (len(prompt) + recipe.max_new_tokens)
        max_bytes = MAX_BYTES + BYTES_OF_TOKEN * num_tokens
        content = self._client.call("/v1/completions", body, recipe.ddp_timeout, may_go=True, max_bytes=max_bytes)
        try:
            choices = sorted(
                _Completions.model_validate_json(content, strict=True).choices, key=lambda each: each.index
            )
            if reasons := {each.finish_reason for each in choices} - {"stop", "length"}:
                raise _Gone(f"answers ended by {reasons}")  # abort: it is being stopped
            found = [
                Completion(each.token_ids, each.token_ids[-1] in self._stops, each.logprobs.token_logprobs)
                for each in choices
            ]
            known = range(num_rows(self._plain))
            are_whole = len(found) == recipe.num_generations and all(
                len(ids) == len(logps) <= recipe.max_new_tokens
                and all(token_id in known for token_id in ids)
                and not {*ids[:-1]} & {*self._stops}
                and (ended or choice.finish_reason == "length")
                for choice, (ids, ended, logps) in zip(choices, found, strict=True)
            )
            if not are_whole:
                raise ValueError("other answers than were asked for")
        except (ValueError, IndexError) as error:
            why = f"{self._client.url}/v1/completions: {type(error).__name__}: {str(error)[:300]}"
            raise LateError(Problem(FIELD, why, "a vLLM server with return_token_ids, as of 0.32")) from None
        return found
