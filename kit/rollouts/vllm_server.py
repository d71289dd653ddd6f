"""Rollouts by a separate vLLM server, ``vllm serve``, which loads the run's adapter before each rollout.

Promises:

- Prompts and completions are token ids, with log-probabilities. vLLM samples by seeds of (seed, rollout, sample) to
  which it adds the number of the completion: its own random numbers, not the kit's. Its log-probabilities are those
  before temperature and cuts: its default, ``--logprobs-mode raw_logprobs``.
- Only the main process talks to the server. While it waits, all ranks meet once a second.
- An adapter is named after its content, so the server cannot use an earlier one. A restarted server gets the adapter
  again, and the whole rollout is retried.
"""

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import TimeoutError as NotYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from pydantic import BaseModel, FiniteFloat

from kit.model.adapters.serving import why_not_served
from kit.model.adapters.token_rows import num_rows
from kit.rollouts.generation import Completion, Request
from kit.rollouts.vllm_client import FIELD, MAX_BYTES, Client, Gone
from kit.strategy.processes.rendezvous import from_main
from kit.strategy.weights import gather_trainable
from kit.system import durable
from kit.system.console import Progress, is_main, say
from kit.system.errors import LateError, Problem, UserError

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.accelerator import Prepared

FOLDER = "published"  # in output_dir: the adapter that the server reads
MAX_REQUESTS = 128  # concurrent prompts
MAX_ATTEMPTS = 5  # at one rollout, if the server fails again and again
BYTES_OF_TOKEN = 1 << 10  # of a response
# The server would take missing values from the model's generation_config.json. With ignore_eos only stop_token_ids end
# a completion. logprobs 0: those of the sampled tokens alone.
SAMPLING = {
    "ignore_eos": True,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,
    "return_token_ids": True,
}


class _Logprobs(BaseModel):
    token_logprobs: list[FiniteFloat]


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _Logprobs


class _Completions(BaseModel):
    choices: list[_Choice]


class VllmServer:
    """A vLLM server as a ``kit.rollouts.sampler.Sampler``."""

    def __init__(self, prepared: "Prepared", recipe: "Recipe", stops: Sequence[int], progress: Progress) -> None:
        """
        Raises:
            UserError: vLLM does not serve adapters of this kind.
        """
        self._prepared, self._recipe, self._stops, self._progress = prepared, recipe, stops, progress
        self._plain: Any = prepared.accelerator.unwrap_model(prepared.model)
        self._client = Client(recipe)
        self._folder = Path(recipe.output_dir or "").resolve() / FOLDER
        self._loaded = ""  # the adapter that this process has given to the server
        self.published = ""
        if reason := why_not_served(self._plain.peft_config["default"], by_vllm=True):
            raise UserError(Problem(FIELD, reason, fix="leave it out, and the model generates the rollouts itself"))

    def publish(self, step: int) -> None:
        """Write the adapter after ``step`` steps to where the server reads it."""
        from safetensors.torch import save

        state = gather_trainable(self._prepared.accelerator, self._prepared.model)

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

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """See ``Sampler``. Requests whose keys differ in the last number alone have the same prompt.

        Raises:
            LateError: on all ranks, if the server fails for good.
        """

        def look() -> tuple[list[Completion] | None, list[Problem]]:
            assert asking is not None
            try:
                return asking.get(1.0), []
            except NotYet:
                return None, []
            except LateError as error:
                return None, error.problems

        answers: list[Completion] | None = None
        with ThreadPool(1) as pool:  # its threads end with the process, whatever they wait for
            asking = pool.apply_async(self._ask, [requests]) if is_main() else None
            for _ in self._progress(itertools.repeat(None), "rollout", None):
                answers, problems = from_main(look)
                if problems:
                    raise LateError(*problems)
                if answers is not None:
                    break
        rank = self._prepared.processes.index
        yield from ((i, answer) for i, answer in enumerate(answers or []) if requests[i].owner == rank)

    def _ask(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of ``requests``. Raises ``LateError`` if the server fails for good."""
        groups: dict[tuple[int, ...], dict[int, Request]] = defaultdict(dict)
        for request in requests:
            groups[request.key[:-1]][request.key[-1]] = request
        for attempt in itertools.count(1):
            try:
                self._load()
                with ThreadPool(min(MAX_REQUESTS, len(groups))) as pool:
                    replies = dict(zip(groups, pool.imap(self._reply, groups.values()), strict=True))
                return [replies[request.key[:-1]][request.key[-1]] for request in requests]
            except Gone as error:
                self._loaded = ""
                why = f"{self._client.url} failed in a rollout: {error}"
                if attempt == MAX_ATTEMPTS:
                    raise LateError(Problem(FIELD, why, fix="the server's own log says why")) from None
                say(f"{why}; retrying the whole rollout")
                time.sleep(1)  # a server that is shutting down responds for a moment
                self._client.wait(str(error))
        raise AssertionError

    def _load(self) -> None:
        """Let the server load the adapter."""
        if self._loaded == self.published:
            return
        body = {"lora_name": self.published, "lora_path": str(self._folder / self.published), "load_inplace": True}
        self._client.call("/v1/load_lora_adapter", body, self._recipe.vllm_server_timeout)
        if self._loaded:
            self._client.ask("/v1/unload_lora_adapter", {"lora_name": self._loaded})
        self._loaded = self.published

    def _reply(self, group: Mapping[int, Request]) -> list[Completion]:
        """Return the completions of a group, whose prompts are the same."""
        recipe, num, first = self._recipe, len(group), group[0]
        most = first.max_new_tokens
        body = {
            "model": self.published,
            "prompt": list(first.ids),
            "n": num,
            "seed": int(np.random.SeedSequence([recipe.seed, *first.key[:-1]]).generate_state(1, np.uint64)[0] >> 2),
            "max_tokens": most,
            "stop_token_ids": list(self._stops),
            "temperature": recipe.rollout_temperature,
            "top_p": recipe.rollout_top_p,
            "top_k": recipe.rollout_top_k,
            "min_p": recipe.rollout_min_p,
            **SAMPLING,
        }
        max_bytes = MAX_BYTES + BYTES_OF_TOKEN * num * (len(first.ids) + most)
        content = self._client.call("/v1/completions", body, recipe.ddp_timeout, may_go=True, max_bytes=max_bytes)
        try:
            choices = sorted(
                _Completions.model_validate_json(content, strict=True).choices, key=lambda each: each.index
            )
            if reasons := {each.finish_reason for each in choices} - {"stop", "length"}:
                raise Gone(f"completions ended by {reasons}")  # abort: it is being stopped
            found = [
                Completion(each.token_ids, each.token_ids[-1] in self._stops, each.logprobs.token_logprobs)
                for each in choices
            ]
            known = range(num_rows(self._plain))
            are_whole = len(found) == num and all(
                len(ids) == len(logps) <= most
                and all(token_id in known for token_id in ids)
                and not {*ids[:-1]} & {*self._stops}
                and (ended or choice.finish_reason == "length")
                for choice, (ids, ended, logps) in zip(choices, found, strict=True)
            )
            if not are_whole:
                raise ValueError("not the requested completions")
        except (ValueError, IndexError) as error:
            why = f"{self._client.url}/v1/completions: {type(error).__name__}: {str(error)[:300]}"
            raise LateError(Problem(FIELD, why, "a vLLM server with return_token_ids, as of 0.32")) from None
        return found
