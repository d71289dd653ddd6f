"""Find credentials in text: secret values of environment variables, credentials in URLs, and tokens of the hub.

Promises: no printed line, error, traceback or page holds a credential. A setting that holds one is refused
(``kit.config.command_line``), so nothing that a run stores holds one either.
"""

import html
import json
import os
import re
from urllib.parse import quote

MIN_LENGTH = 8  # characters; a shorter value may occur by chance in any text
_SECRET_NAME = re.compile(  # does not match TOKENIZERS_PARALLELISM, MAX_TOKENS or SECRETARY
    r"(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)(?![A-Z])"
    r"|(_KEY|_PWD|_PASS|SSHPASS)$"
)
# Variables with these endings hold where a secret is stored, or how long it is valid.
_NO_SECRET_NAME = re.compile(r"_(PATH|FILE|DIR|DIRECTORY|URL|URI|ENDPOINT|HOST|HELPER|NAME|TYPE|LIMIT|COUNT|TTL)$")
_PARAMETER = r"""[\w-]{0,40}(?:token|secret|password|passwd|credential|signature|api_?key)
                 |(?:[\w-]{0,40}[_-])?(?:pwd|key|sig|auth)"""
_OTHER_CREDENTIALS = rf"""(?<=://)[^/\s'"<>]+(?=@)                           # scheme://user:password@host
                 |((?i:[?&;](?:{_PARAMETER})=))[^&;\s'"<>)]+         # ?token=...
                 |\bhf_[A-Za-z0-9]{{30,}}                            # a token of the hub, which may come from a file"""


def redacted(text: str) -> str:
    """Return ``text`` with each credential replaced by ``***``."""
    for start, end in reversed(secret_spans(text)):
        text = f"{text[:start]}***{text[end:]}"
    return text


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans ``[start, end)`` of the credentials in ``text``, in order."""
    values = sorted(_values(), key=len, reverse=True)  # if two values begin alike, the longer one must match
    pattern = re.compile("|".join([*map(re.escape, values), _OTHER_CREDENTIALS]), re.VERBOSE)
    return [(match.end(1) if match[1] else match.start(), match.end()) for match in pattern.finditer(text)]


def _values() -> set[str]:
    """The lines of all secret environment variables, as written in plain text, JSON, HTML, URLs and ``repr``."""
    values = set()
    for name, value in os.environ.items():
        is_secret = _SECRET_NAME.search(name.upper()) and not _NO_SECRET_NAME.search(name.upper())
        if is_secret and not (os.path.isabs(value) and os.path.exists(value)):  # not secret: the path of a file
            for line in map(str.strip, value.splitlines()):
                if len(line) >= MIN_LENGTH:
                    values |= {line, json.dumps(line)[1:-1], html.escape(line), quote(line, safe=""), repr(line)[1:-1]}
    return values
