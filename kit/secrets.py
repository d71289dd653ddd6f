"""Credentials in text: the values of environment variables that hold them, and those in URLs.

Promises: no line printed, no error, no traceback and no page holds one; and since no setting that holds one is taken
(``kit.config.command_line``), none is in what a run stores.
"""

import html
import json
import os
import re
from urllib.parse import quote

MIN_LENGTH = 8  # shorter values are words that any text may hold
_SECRET_NAME = re.compile(  # not TOKENIZERS_PARALLELISM, MAX_TOKENS or SECRETARY
    r"(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)(?![A-Z])"
    r"|(_KEY|_PWD|_PASS|SSHPASS)$"
)
# These say where a secret lies, or how long it lives.
_NO_SECRET_NAME = re.compile(r"_(PATH|FILE|DIR|DIRECTORY|URL|URI|ENDPOINT|HOST|HELPER|NAME|TYPE|LIMIT|COUNT|TTL)$")
_PARAMETER = r"""[\w-]{0,40}(?:token|secret|password|passwd|credential|signature|api_?key)
                 |(?:[\w-]{0,40}[_-])?(?:pwd|key|sig|auth)"""
_ELSEWHERE = rf"""(?<=://)[^/\s'"<>]+(?=@)                           # scheme://user:password@host
                 |((?i:[?&;](?:{_PARAMETER})=))[^&;\s'"<>)]+         # ?token=...
                 |\bhf_[A-Za-z0-9]{{30,}}                            # a token of the hub, which may come from a file"""


def redacted(text: str) -> str:
    """``text`` with ``***`` in place of each credential."""
    for start, end in reversed(secret_spans(text)):
        text = f"{text[:start]}***{text[end:]}"
    return text


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Where credentials stand in ``text``: [start, end) of each, in their order."""
    values = sorted(_values(), key=len, reverse=True)  # of two that begin alike, the longer one
    pattern = re.compile("|".join([*map(re.escape, values), _ELSEWHERE]), re.VERBOSE)
    return [(match.end(1) if match[1] else match.start(), match.end()) for match in pattern.finditer(text)]


def _values() -> set[str]:
    """What the environment keeps secret, line by line, as it stands in text, and in JSON, HTML, URLs and ``repr``."""
    values = set()
    for name, value in os.environ.items():
        is_secret = _SECRET_NAME.search(name.upper()) and not _NO_SECRET_NAME.search(name.upper())
        if is_secret and not (os.path.isabs(value) and os.path.exists(value)):  # a path, as of a file of credentials
            for line in map(str.strip, value.splitlines()):
                if len(line) >= MIN_LENGTH:
                    values |= {line, json.dumps(line)[1:-1], html.escape(line), quote(line, safe=""), repr(line)[1:-1]}
    return values
