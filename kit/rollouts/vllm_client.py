"""HTTP calls to a vLLM server.

Promise: each call ends within its timeout, and reads no more bytes than allowed.

The API is that of vLLM 0.32: https://docs.vllm.ai/en/latest/features/lora.html, "Dynamically serving LoRA adapters".
"""

import http.client
import itertools
import json
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kit.strategy.processes.tcp_store import call_within
from kit.system.console import say
from kit.system.errors import LateError, Problem, first_line

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

FIELD = "vllm_server_base_url"
PROBE_SECONDS = 30.0  # the timeout of a quick call
MAX_BYTES = 1 << 20  # of a response, apart from its tokens
MAX_ATTEMPTS = 5  # if the server fails again and again


class Gone(Exception):
    """The server does not answer, or has lost the adapter."""


class Client:
    """HTTP calls to the vLLM server that the setting ``field`` names; ``fix`` is said of what it refuses."""

    def __init__(self, settings: "Recipe", field: str = FIELD, fix: str = "the server's own log says more") -> None:
        self.url = (getattr(settings, field) or "").rstrip("/")
        self.fix, self.field = fix, field
        self._wait_seconds = settings.vllm_server_timeout

    def ask(
        self, path: str, body: Any = None, seconds: float = PROBE_SECONDS, max_bytes: int = MAX_BYTES
    ) -> tuple[int, bytes]:
        """POST ``body`` as JSON, or GET without one. Returns the status and the content, at most one byte too long."""
        scheme, host, *_ = urlsplit(self.url)
        connect = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection = connect(host, timeout=seconds)

        def exchange() -> tuple[int, bytes]:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read(max_bytes + 1)

        try:
            return call_within(seconds, exchange)
        except (OSError, http.client.HTTPException) as error:
            raise Gone(first_line(error)) from None
        finally:
            with suppress(OSError, AttributeError):  # not connected, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)  # of a call that still waits
            connection.close()

    def call(
        self,
        path: str,
        body: Any = None,
        seconds: float = PROBE_SECONDS,
        may_go: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> bytes:
        """Return the content of a response. With ``may_go``, 404, 429 and server errors raise ``Gone``."""
        status, content = self.ask(path, body, seconds, max_bytes)
        if status == 200 and len(content) <= max_bytes:
            return content
        is_long = f", more than {max_bytes} bytes" if len(content) > max_bytes else ""
        found = f"{path} gave status {status}{is_long}: {content[:300].decode(errors='replace')}"
        if may_go and (status in (404, 429) or status >= 500):
            raise Gone(found)
        raise LateError(Problem(self.field, f"{self.url}{found}", "status 200", self.fix))

    def wait(self, why: str = "") -> None:
        """Wait until the server is up. Raises ``LateError`` if it is not within ``vllm_server_timeout``."""
        found = f"{self.url} does not answer{why and f' ({why})'}"
        begun = time.monotonic()
        for second in itertools.count():
            with suppress(Gone):
                # Below 500: other servers than vLLM may have no such path.
                if self.ask("/health", seconds=min(PROBE_SECONDS, self._wait_seconds))[0] < 500:
                    return
            if time.monotonic() - begun > self._wait_seconds:
                fix = "start it (`vllm serve`), then type the same command again"
                raise LateError(Problem(self.field, f"{found}, for {self._wait_seconds:g} s", fix=fix))
            if not second:
                say(f"{found}: waiting for it, at most {self._wait_seconds:g} s (--vllm_server_timeout)")
            time.sleep(1)

    def recover(self, error: Gone, attempt: int) -> None:
        """Wait until a server that failed is up. Raises ``LateError`` as ``wait``, or if this is the last attempt."""
        why = f"{self.url} failed: {error}"
        if attempt == MAX_ATTEMPTS:
            raise LateError(Problem(self.field, why, fix="the server's own log says why"))
        say(f"{why}; asking again")
        time.sleep(1)  # a server that is shutting down responds for a moment
        self.wait(str(error))
