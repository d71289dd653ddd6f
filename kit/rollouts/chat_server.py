"""Completions of an OpenAI-compatible server, by its chat completions: it gets messages, not token ids.

Promises: completions come in the order of the requests; those that a server did not give before it failed are asked for
again. They are not repeatable: a server may ignore the seed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from kit.data.chat.messages import Message
from kit.rollouts.generation import Completion, Request
from kit.rollouts.vllm_client import MAX_BYTES, Client, Gone
from kit.system.errors import LateError, Problem, UserError, listed

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

MAX_REQUESTS = 64  # at a time
BYTES_OF_TOKEN = 1 << 8  # of a response
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Reply(BaseModel):
    choices: tuple[_Choice]


Read = TypeVar("Read", bound=BaseModel)


class ChatServer:
    """A server as a ``kit.rollouts.sampler.Sampler``.

    Attributes:
        replies: the messages of the answers, by the keys of their requests. A completion has the ids that the tokenizer
            here makes of the content.
    """

    published = ""

    def __init__(
        self, recipe: "Recipe", model: str, tokenizer: Any, question: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """
        Args:
            model: its name at the server.
            question: returns the messages of a prompt, and its tools if it has any.

        Raises:
            UserError: the server is not up, or has no such model.
        """
        self._recipe, self._model, self._tokenizer, self._question = recipe, model, tokenizer, question
        self._client = Client(recipe)
        self._client.field = "--server"
        self.replies: dict[tuple[int, ...], Message] = {}
        self._client.wait()
        names = [each.id for each in self._read(_Models, self._client.call("/v1/models")).data]
        if model not in names:
            raise UserError("--server_model", f"{self._client.url} has no model {model!r}", listed(names, 20))

    def publish(self, step: int) -> None:
        """Do nothing: the server has its own weights."""

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """See ``Sampler``. Raises ``LateError`` if the server fails for good."""
        bodies = [
            {
                **self._question(request.key[1]),
                "model": self._model,
                "max_tokens": request.max_new_tokens,
                "seed": self._recipe.seed + request.key[2],  # else all answers to a prompt may be the same
                # OpenAI's own server knows no others than the first two, which are never 0.
                **{key: value for key in _SAMPLING if (value := getattr(self._recipe, f"rollout_{key}"))},
            }
            for request in requests
        ]
        place = attempt = 0
        while place < len(bodies):
            try:
                with ThreadPool(MAX_REQUESTS) as pool:
                    for content in pool.imap(self._ask, bodies[place:]):
                        yield place, self._completion(requests[place].key, content)
                        place, attempt = place + 1, 0
            except Gone as error:
                attempt += 1
                self._client.recover(error, attempt)

    def _ask(self, body: dict[str, Any]) -> bytes:
        max_bytes = MAX_BYTES + BYTES_OF_TOKEN * body["max_tokens"]
        return self._client.call("/v1/chat/completions", body, self._recipe.ddp_timeout, True, max_bytes)

    def _completion(self, key: tuple[int, ...], content: bytes) -> Completion:
        (choice,) = self._read(_Reply, content).choices
        said = {"role": "assistant", "content": "", **choice.message.model_dump(exclude_none=True)}
        self.replies[key] = said
        ids = self._tokenizer.backend_tokenizer.encode(said["content"], add_special_tokens=False).ids
        ended = choice.finish_reason == "stop"
        return Completion([*ids, self._tokenizer.eos_token_id] if ended else ids, ended)

    def _read(self, kind: type[Read], content: bytes) -> Read:
        try:
            return kind.model_validate_json(content)
        except ValueError:
            found = f"{self._client.url} gave {content[:200]!r}"
            raise LateError(Problem(self._client.field, found, "a server with OpenAI's chat completions")) from None
