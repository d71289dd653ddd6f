"""A stand-in for the hub's HTTP API, for the unmodified client of ``huggingface_hub``: as much as an upload asks for.

It answers who a token is, makes a repository, says what it holds, which files are large and which it has, takes large
files by LFS (one part) and the others in a commit, and gives out its files. It lacks: Xet (tests switch it off), LFS in
several parts and with a check afterwards, branches, pull requests, licences to accept, quotas, limits of requests,
rules of ``.gitignore``, storage regions, and everything that a browser sees. A token has the role of its name, in a
world of two users: ``me``, who may write to ``lab`` and read ``club``.
"""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


class Repository:
    """A repository, with what it holds now."""

    def __init__(self, is_private, files=()):
        self.is_private, self.files = is_private, dict(files)
        self.commits = []  # the message of each


class FakeHub:
    """What the server holds, and what happened to it."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.repositories = {}  # by kind and id
        self.cards = {}  # metadata of the card, by id
        self.objects = {}  # large files, by SHA-256
        self.uploads = []  # SHA-256 of each large file, as often as it was sent
        self.requests = []
        self.fails_at = {}  # number of a large file from 0: the status for it, once
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # one packet for an answer; of two, the second would wait for a delayed acknowledgement
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _answer(self, status, values, **headers):
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status, code=""):
        self._answer(status, {"error": code or "no"}, **({"X_Error_Code": code} if code else {}))

    def _handle(self):
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].strip("/")
        role = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        with hub.lock:
            hub.requests.append(f"{self.command} {path}")
        if path.startswith("lfs/"):
            return self._take(hub, path.removeprefix("lfs/"), body)
        if role not in ("read", "write"):
            return self._refuse(401)
        words = path.split("/")
        if path == "api/whoami-v2":
            orgs = [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]
            auth = {"accessToken": {"role": role}}
            return self._answer(200, {"name": "me", "type": "user", "orgs": orgs, "auth": auth})
        if path == "api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self._answer(200, {"errors": [], "warnings": []})
        if path == "api/repos/create":
            return self._create(hub, json.loads(body))
        if words[2:3] == ["resolve"]:
            return self._give(hub.repositories.get(("model", "/".join(words[:2]))), "/".join(words[4:]))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(hub, json.loads(body))
        name = "/".join(words[2:4])
        found = hub.repositories.get((words[1].removesuffix("s"), name)) if words[0] == "api" else None
        if found is None:
            return self._refuse(404, "RepoNotFound")
        if words[4:5] == ["preupload"]:
            return self._answer(200, {"files": [_mode(file, found) for file in json.loads(body)["files"]]})
        if words[4:5] == ["commit"]:
            return self._commit(hub, name, found, [json.loads(line) for line in body.splitlines()])
        if words[4:5] == ["tree"]:
            if words[6:]:
                return self._refuse(404, "EntryNotFound")  # no repository has folders
            files = found.files.items()
            return self._answer(200, [{"type": "file", "path": f, "size": len(b), "oid": f} for f, b in files])
        siblings = [{"rfilename": each} for each in found.files]
        about = {"id": name, "private": found.is_private, "sha": _commit_of(found), "siblings": siblings}
        return self._answer(200, about | ({"cardData": hub.cards[name]} if name in hub.cards else {}))

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _give(self, found, name):
        body = found.files.get(name) if found else None
        if body is None:
            return self._refuse(404, "EntryNotFound" if found else "RepoNotFound")
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        return self._answer(200, body, ETag=etag, X_Repo_Commit=_commit_of(found))

    def _create(self, hub, asked):
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if name.partition("/")[0] not in ("me", "lab"):
            return self._refuse(403)
        with hub.lock:
            if (asked.get("type", "model"), name) in hub.repositories:
                return self._answer(409, {"error": "exists", "url": f"{hub.endpoint}/{name}"})
            hub.repositories["model", name] = Repository(asked.get("visibility") == "private" or asked.get("private"))
        return self._answer(200, {"url": f"{hub.endpoint}/{name}", "name": name})

    def _batch(self, hub, asked):
        objects = []
        for each in asked["objects"]:
            href = {"href": f"{hub.endpoint}/lfs/{each['oid']}"}
            objects.append(each if each["oid"] in hub.objects else each | {"actions": {"upload": href}})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _take(self, hub, oid, body):
        with hub.lock:
            number = len(hub.uploads)
            hub.uploads.append(oid)
            status = hub.fails_at.pop(number, 0)
        if status or hashlib.sha256(body).hexdigest() != oid:
            return self._refuse(status or 400)
        hub.objects[oid] = body
        return self._answer(200, {})

    def _commit(self, hub, name, found, lines):
        files = dict(found.files)
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                found.commits.append(value["summary"])
        found.files = files
        oid = _commit_of(found)
        self._answer(200, {"commitUrl": f"{hub.endpoint}/{name}/commit/{oid}", "commitOid": oid})


def _commit_of(found):
    return f"{len(found.commits):040}"


def _mode(file, found):
    """Whether a file is large, and the id of the one that the repository has at its path."""
    is_large = file["path"].endswith(".safetensors")
    mode = {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
    old = found.files.get(file["path"])
    if old is not None:
        blob = b"blob %d\0" % len(old) + old
        mode["oid"] = hashlib.sha256(old).hexdigest() if is_large else hashlib.sha1(blob).hexdigest()
    return mode


@contextmanager
def served():
    """Run a stand-in, and yield it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
