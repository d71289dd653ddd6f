"""Rollouts by a separate vLLM server, ``vllm serve``, which loads the run's weights before each rollout.

Promises:

- Prompts and completions are token ids, with log-probabilities. vLLM samples equal prompts by the seed of the first's
  key, to which it adds 0, 1, ...: its own random numbers, not the kit's. Its log-probabilities are those before
  temperature and cuts: its default, ``--logprobs-mode raw_logprobs``.
- Only the main process talks to the server. While it waits, all ranks meet once a second.
- Weights are named after their content, so the server cannot use earlier ones. A restarted server gets them again, and
  all that was asked at once is asked again.
- Completions can be asked for ahead, before they are needed.
- Images are sent as decoded pixels, and vLLM's prompt, in which it puts the placeholders, must be the kit's.

vLLM's weight transfer (``/update_weights``) needs GPUs on both sides. Whole weights are read from files instead, by
the worker's ``reload_weights``, and get their name by ``/update_weight_version``.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import TimeoutError as NotYet
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, FiniteFloat

from kit.checkpoint.manifest import describe_file
from kit.checkpoint.tensor_files import write_tensors
from kit.data.chat.tokens import MediaCodec
from kit.data.read.image_files import as_data_uri
from kit.data.read.media_files import decoded
from kit.model.adapters.serving import why_not_served
from kit.model.adapters.token_rows import num_rows
from kit.rollouts.generation import Completion, Request
from kit.rollouts.vllm_client import FIELD, MAX_BYTES, Client, Gone
from kit.strategy.processes.rendezvous import from_main
from kit.strategy.weights import gather_trainable, gather_whole
from kit.system import durable
from kit.system.console import Progress, is_main
from kit.system.errors import LateError, Problem, UserError

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.train.policy import Policy

FOLDER = "published"  # in output_dir: the weights that the server reads
MAX_REQUESTS = 128  # concurrent prompts
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


Asked = AsyncResult[Sequence[Completion]]


class _Logprob(BaseModel):
    logprob: FiniteFloat


class _Logprobs(BaseModel):
    token_logprobs: list[FiniteFloat] = []
    content: list[_Logprob] = []  # the same of a prompt with images


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: _Logprobs


class _Completions(BaseModel):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None  # of a prompt with images


class VllmServer:
    """A vLLM server as a ``kit.rollouts.sampler.Sampler``.

    Attributes:
        ahead: the completions of the next ``sample``, if it was asked for them with ``begin``.
        step: of the weights that were published.
        then: called on all ranks at the end of ``sample``, while the environment works on the completions.
    """

    def __init__(
        self,
        prepared: "Policy",
        recipe: "Recipe",
        stops: Sequence[int],
        media_codec: MediaCodec | None,
        progress: Progress,
    ) -> None:
        """
        Raises:
            UserError: vLLM does not serve adapters of this kind; or the data have audio.
        """
        self._prepared, self._recipe, self._stops, self._progress = prepared, recipe, stops, progress
        self._plain: Any = prepared.accelerator.unwrap_model(prepared.model)
        self._client, self._media_codec = Client(recipe), media_codec
        self._folder = Path(recipe.output_dir or "").resolve() / FOLDER
        self._loaded = ""  # the adapter that this process has given to the server
        self.published, self.step = "", -1
        self.ahead: Asked | None = None
        self.then: Callable[[], None] = lambda: None
        self._is_away = False
        self._thread = ThreadPool(1)  # ends with the process, whatever it waits for
        self._adapter = getattr(self._plain, "peft_config", {}).get("default")  # None: all weights are published
        reason = why_not_served(self._adapter, by_vllm=True) if self._adapter else ""
        if media_codec and "audio" in media_codec.tokens:
            reason = "not supported with audio in the data yet"
        if reason:
            raise UserError(Problem(FIELD, reason, fix="leave it out, and the model generates the rollouts itself"))

    def publish(self, step: int) -> None:
        """Write the weights after ``step`` steps to where the server reads them."""
        model = self._prepared.model
        state = gather_trainable(self._prepared.accelerator, model) if self._adapter else gather_whole(model)

        def write() -> str:
            durable.make_afresh(self._folder)
            (folder := self._folder / "partial").mkdir()
            if self._adapter:
                name = "adapter_model"
                tensors = {re.sub(r"\.default(?=\.|$)", "", key): each for key, each in state.items() if "lora_" in key}
                self._adapter.save_pretrained(folder)
            else:
                from transformers.core_model_loading import revert_weight_conversion

                name = "model"
                # With both names of a tied head: on a CPU vLLM packs it apart from the embedding, and again only if its
                # own name comes, too.
                tensors = revert_weight_conversion(self._plain, state)
            file = folder / f"{name}.safetensors"
            write_tensors(file, tensors, {"format": "pt"})
            return folder.rename(self._folder / f"step-{step:08d}-{describe_file(file)['xxh3_128'][:16]}").name

        self.published, self.step = from_main(write), step

    def begin(self, requests: Sequence[Request], known: Sequence[Completion] = ()) -> Asked:
        """Ask for completions, unless they are known, and let ``wait`` return them."""
        return self._thread.apply_async(self._ask, [requests, known])

    def wait(
        self,
        asked: Asked,
        progress: Progress | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Sequence[Completion]:
        """Return completions that were asked for. Called by all ranks.

        Args:
            progress: in place of the run's, which a stop ends.
            is_stopping: whether it returns none while the server is away.

        Raises:
            LateError: on all ranks, if the server fails for good.
        """

        def look() -> tuple[Sequence[Completion] | None, list[Problem]]:
            try:
                return asked.get(1.0), []
            except NotYet:
                return [] if self._is_away and is_stopping() else None, []
            except LateError as error:
                return None, error.problems

        for _ in (progress or self._progress)(itertools.repeat(None), "rollout", None):
            completions, problems = from_main(look)
            if problems:
                raise LateError(*problems)
            if completions is not None:
                return completions
        raise AssertionError

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """See ``Sampler``. Raises as ``wait`` does."""
        completions, self.ahead = self.wait(self.ahead or self.begin(requests)), None
        rank = self._prepared.processes.index
        yield from ((i, each) for i, each in enumerate(completions) if requests[i].owner == rank)
        self.then()

    def _ask(self, requests: Sequence[Request], known: Sequence[Completion]) -> Sequence[Completion]:
        """Return the completions of ``requests``. Raises ``LateError`` if the server fails for good."""
        if known or not is_main():
            return known
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[request.key[:2], tuple(request.ids)].append(i)
        for attempt in itertools.count(1):
            try:
                self._load()
                with ThreadPool(min(MAX_REQUESTS, len(groups))) as pool:
                    replies = [*pool.imap(self._reply, [[requests[i] for i in group] for group in groups.values()])]
                found = dict(zip(itertools.chain(*groups.values()), itertools.chain(*replies), strict=True))
                return [found[i] for i in range(len(requests))]
            except Gone as error:
                self._loaded, self._is_away = "", True
                self._client.recover(error, attempt)
                self._is_away = False
        raise AssertionError

    def _load(self) -> None:
        """Let the server load the weights, unless it has them."""
        path, seconds = str(self._folder / self.published), self._recipe.vllm_server_timeout
        if self._adapter:
            if self._loaded != self.published:
                body = {"lora_name": self.published, "lora_path": path, "load_inplace": True}
                self._client.call("/v1/load_lora_adapter", body, seconds)
                if self._loaded:
                    self._client.ask("/v1/unload_lora_adapter", {"lora_name": self._loaded})
                self._loaded = self.published
        elif self.published.encode() not in self._client.call("/weight_info"):
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            self._client.call("/collective_rpc", body, seconds)
            if b"true" not in self._client.call("/reset_prefix_cache", {}):
                raise Gone("its prefix cache is in use")  # by requests that were given up
            if self._media_codec:  # the worker has dropped it, the scheduler has not: the next hit would end vLLM
                self._client.call("/reset_encoder_cache", {})
            self._client.call("/update_weight_version", {"new_version": self.published})

    def _reply(self, group: Sequence[Request]) -> list[Completion]:
        """Return the completions of a group, whose prompts are the same."""
        recipe, num, first = self._recipe, len(group), group[0]
        most = first.max_new_tokens
        placeholders = self._media_codec.placeholder_ids if self._media_codec else ()
        sampling = {
            "n": num,
            "seed": int(np.random.SeedSequence([recipe.seed, *first.key]).generate_state(1, np.uint64)[0] >> 2),
            "max_tokens": most,
            "stop_token_ids": list(self._stops),
            "temperature": recipe.rollout_temperature,
            "top_p": recipe.rollout_top_p,
            "top_k": recipe.rollout_top_k,
            "min_p": recipe.rollout_min_p,
            "logit_bias": dict.fromkeys(placeholders, -100),
            **SAMPLING,
        }
        path, body = "/v1/completions", {"prompt": list(first.ids), **sampling}
        if first.media:
            path, body = "/inference/v1/generate", self._with_images(first) | {"sampling_params": sampling}
        body |= {"model": self.published} if self._adapter else {}
        max_bytes = MAX_BYTES + BYTES_OF_TOKEN * num * (len(first.ids) + most)
        content = self._client.call(path, body, recipe.ddp_timeout, may_go=True, max_bytes=max_bytes)
        try:
            reply = _Completions.model_validate_json(content, strict=True)
            choices = sorted(reply.choices, key=lambda each: each.index)
            if reasons := {each.finish_reason for each in choices} - {"stop", "length"}:
                raise Gone(f"completions ended by {reasons}")  # abort: it is being stopped
            found = []
            for each in choices:
                logps = each.logprobs.token_logprobs or [of_token.logprob for of_token in each.logprobs.content]
                found.append(Completion(each.token_ids, each.token_ids[-1] in self._stops, logps))
            known = {*range(num_rows(self._plain))}.difference(placeholders)
            are_whole = len(found) == num and all(
                len(ids) == len(logps) <= most
                and known.issuperset(ids)
                and not {*ids[:-1]} & {*self._stops}
                and (ended or choice.finish_reason == "length")
                for choice, (ids, ended, logps) in zip(choices, found, strict=True)
            )
            if not are_whole:
                raise ValueError("not the requested completions")
        except (ValueError, IndexError) as error:
            why = f"{self._client.url}{path}: {type(error).__name__}: {str(error)[:300]}"
            raise LateError(Problem(FIELD, why, "a vLLM server with return_token_ids, as of 0.32")) from None
        if first.media and reply.prompt_token_ids != list(first.ids):
            fix = "vllm serve ... --mm-processor-kwargs with the run's min_pixels and max_pixels"
            why = f"{self._client.url} makes other tokens of the images of {first.media[0][2]}"
            raise LateError(Problem(FIELD, why, f"the {len(first.ids)} tokens of the run's prompt", fix))
        return found

    def _with_images(self, request: Request) -> dict[str, Any]:
        """A prompt in which images are as the chat template writes them, and PNG files. Raises ``LateError``."""
        codec, encode = self._media_codec, self._prepared.tokenizer.backend_tokenizer.encode
        assert codec

        def chars(text: str) -> str:
            return "".join(map(chr, encode(text, add_special_tokens=False).ids))

        prompt, parts = "".join(map(chr, request.ids)), []
        texts = codec.texts([each for each, _, _ in request.media])
        for (image, folder, origin), text in zip(request.media, texts, strict=True):
            prompt = prompt.replace(chars(text), chars(codec.tokens["image"]), 1)
            try:
                parts.append({"type": "image_url", "url": as_data_uri(decoded(image, folder), "PNG")})
            except UserError as error:
                raise LateError(*(replace(each, where=origin) for each in error.problems)) from None
        return {"token_ids": [*map(ord, prompt)], "content_parts": parts, "return_token_ids": True}
