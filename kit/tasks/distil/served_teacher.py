"""A served teacher: a vLLM server gives the top-k log-probabilities of each token of a sample.

Promises:

- The server has the model under its name, room for the longest sample, and a tokenizer that gives the student's ids.
- A request that failed is repeated once the server is up again, and is proven again; the answers to others are kept.

The API is that of vLLM 0.32: ``prompt_logprobs`` of a completion by token ids.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import torch

from kit.config.recipe import Recipe
from kit.data.samples.samples import Samples
from kit.model.teacher import PROBES
from kit.rollouts.vllm_client import MAX_BYTES, Client, Gone
from kit.system.errors import LateError, Problem

MAX_REQUESTS = 32  # concurrent samples
BYTES_OF_TOKEN = 1 << 9  # of a response
LEAST_REST = 1e-7  # of a probability: it is 1 less a sum of float32 numbers


class ServedTeacher:
    """A teacher behind a vLLM server, for one process."""

    def __init__(self, recipe: Recipe, tokenizer: Any, samples: Samples, num_tokens: int, size: int) -> None:
        """
        Args:
            recipe: names the model and its server.
            tokenizer: the student's.
            num_tokens, size: see ``kit.tasks.distil.stored_teacher.StoredTeacher``.
        """
        self._recipe, self._tokenizer, self._samples = recipe, tokenizer, samples
        self._num_tokens, self._size = num_tokens, size
        command = f"vllm serve {recipe.teacher} --max-logprobs {num_tokens} --max-model-len {samples.lengths.max() + 1}"
        self._client = Client(recipe, "teacher_server", command)
        self._is_proven = False

    def top_k(self, chosen: np.ndarray) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the samples ``chosen`` with ids [S, K] and log-probabilities [S, K + 1] of their targets.

        Raises:
            LateError: it is not the teacher, or it fails for good.
        """
        missing, attempt = dict.fromkeys(chosen.tolist()), 0
        while missing:
            try:
                if not self._is_proven:
                    self._prove()
                with ThreadPool(MAX_REQUESTS) as pool:
                    for i, ids, logps in pool.imap_unordered(self._of_sample, [*missing]):
                        del missing[i]
                        attempt = 0
                        yield i, ids, logps
            except Gone as error:
                self._is_proven = False
                attempt += 1
                self._client.recover(error, attempt)

    def _prove(self) -> None:
        self._client.wait()
        core = self._tokenizer.backend_tokenizer
        tokens = core.decode_batch([[i] for i in range(len(self._tokenizer))], skip_special_tokens=False)
        lines = ["\n".join(tokens[i : i + 1000]) for i in range(0, len(tokens), 1000)]
        for text in (*PROBES, str(self._tokenizer.chat_template), *lines):
            with self._reading("/tokenize", prompt=text, add_special_tokens=False) as reply:
                if reply["tokens"] != core.encode(text, add_special_tokens=False).ids:
                    raise ValueError(f"gives {text!r:.80} other ids than {self._recipe.model_name_or_path}")
        self._of_sample(int(np.argmax(self._samples.lengths)))  # which needs the most positions
        self._is_proven = True

    def _of_sample(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        ids, weights = self._samples[i]
        k = self._num_tokens
        with self._reading("/v1/completions", prompt=ids.tolist(), max_tokens=1, prompt_logprobs=k) as reply:
            known = reply["choices"][0]["prompt_logprobs"]
            best = [
                sorted(((each["logprob"], int(token)) for token, each in known[at].items()), reverse=True)[:k]
                for at in (np.flatnonzero(weights[1:]) + 1).tolist()
            ]
            if {*map(len, best)} != {k}:
                raise ValueError(f"not {k} tokens at each place")
            logps, tokens = torch.tensor(best, dtype=torch.float64).view(len(best), k, 2).unbind(dim=2)
            rest = 1 - logps.exp().sum(dim=1, keepdim=True)
            if not ((tokens >= 0) & (tokens < self._size) & (rest > -1e-3)).all():
                raise ValueError(f"no log-probabilities of the {self._size} tokens that the student has")
        outcomes = torch.cat([logps, rest.clamp(min=LEAST_REST).log()], dim=1)
        return i, tokens, outcomes[:, : k + (k < self._size)]

    @contextmanager
    def _reading(self, path: str, **body: Any) -> Iterator[Any]:
        """The reply to a request; what is wrong with it raises ``LateError``."""
        max_bytes = MAX_BYTES + BYTES_OF_TOKEN * len(body["prompt"]) * (self._num_tokens + 1)
        body["model"] = self._recipe.teacher
        reply = self._client.call(path, body, self._recipe.ddp_timeout, "max_tokens" in body, max_bytes)
        try:
            yield json.loads(reply)
        except Exception as error:  # it may hold anything
            found = f"{self._client.url}{path}: {error}"
            raise LateError(Problem("teacher_server", found[:300], fix=self._client.fix)) from None
