"""Find credentials in text: secret values of environment variables, credentials in URLs, and tokens of known services.

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
    r"|(_KEY|_PWD|_PASS|_PAT|_DSN|SSHPASS|CONNECTION_?STRING|_CONN_STR)$"
)
# Variables with these endings hold where a secret is stored, or how long it is valid.
_NO_SECRET_NAME = re.compile(r"_(PATH|FILE|DIR|DIRECTORY|URL|URI|ENDPOINT|HOST|HELPER|NAME|TYPE|LIMIT|COUNT|TTL)$")
_PARAMETER = r"""[\w-]{0,40}(?:token|secret|password|passwd|credential|signature|(?:api|access|account)_?key)
                 |(?:[\w-]{0,40}[_-])?(?:pwd|key|sig|auth)"""
# Tokens that their beginning and their length give away wherever they stand: they may come from a file. No name of a
# model, no path and no hash looks like one.
_TOKENS = r"""hf_[A-Za-z0-9]{30,}                                         # Hugging Face
                 |gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}|glpat-[\w-]{20,}  # GitHub, GitLab
                 |sk-(?:(?:proj|svcacct|admin|ant-[a-z0-9]+|or-v1)-[\w-]{20,}|[A-Za-z0-9]{40,})  # OpenAI, Anthropic
                 |(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{35}|ya29\.[\w-]{20,}      # AWS, Google
                 |xox[abeoprs]-[A-Za-z0-9-]{10,}|gsk_[A-Za-z0-9]{40,}|nvapi-[\w-]{60,}  # Slack, Groq, NVIDIA
                 |npm_[A-Za-z0-9]{36}\b|pypi-AgE[\w-]{50,}                        # npm, PyPI
                 |(?<!-)eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}                        # JSON Web Token"""
_OTHER_CREDENTIALS = rf"""(?<=://)[^/\s'"<>]+(?=@)                           # scheme://user:password@host
                 |((?i:[?&;](?:{_PARAMETER})=))[^&;\s'"<>)]+         # ?token=..., and ;AccountKey=...
                 |\b(?:{_TOKENS}
                 )"""


def redacted(text: str) -> str:
    """Return ``text`` with each credential replaced by ``***``."""
    parts, last = [], 0
    for start, end in secret_spans(text):
        parts += [text[last:start], "***"]
        last = end
    return "".join([*parts, text[last:]])


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
