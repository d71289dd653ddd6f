"""The ranks of a machine make the requests of one, and are refused together."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import ROOT
from huggingface_hub import constants

from kit.config.recipe import Recipe
from kit.errors import Problem, UserError
from kit.run import asking
from kit.run.asking import asked_once
from kit.strategy.launcher import LaunchedRank

NAME, COMMIT = "someone/small", "a" * 40


@pytest.fixture
def a_rank(monkeypatch, tmp_path):
    """This process becomes one of the ranks of a machine; each call begins another one."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def a_rank(number, world=8):
        monkeypatch.setattr(asking, "_asked_at", {})
        monkeypatch.setattr(asking, "launched_rank", lambda: LaunchedRank(number, world, number, world))

    return a_rank


@pytest.fixture
def opened():
    """Opens ``NAME``; says whether the hub could be asked."""

    def opened(error=None, **changes):
        with asked_once("config", Recipe(**{"model_name_or_path": NAME, "dataset": "d", **changes})):
            if error:
                raise error
            return not constants.HF_HUB_OFFLINE

    return opened


def test_one_rank_asks_whichever_comes_first(a_rank, opened):
    asked = []
    for number in (3, 0, 1, 2):
        a_rank(number)
        asked.append(opened())
    assert asked == [True, False, False, False] and constants.HF_HUB_OFFLINE is False


def test_all_ranks_raise_the_problems_of_the_first(a_rank, opened):
    a_rank(1)
    refused = UserError(
        Problem("model_name_or_path", "its licence is not accepted", fix="accept it"), Problem("dataset", "more")
    )
    with pytest.raises(UserError):
        opened(error=refused)
    a_rank(0)
    with pytest.raises(UserError) as caught:
        opened()
    assert caught.value.problems == refused.problems
    with pytest.raises(UserError, match="another"):  # the same process once more: perhaps it was accepted meanwhile
        opened(error=UserError(Problem("dataset", "another")))


def test_after_a_rank_that_failed_otherwise_the_next_one_asks(a_rank, opened):
    a_rank(0)
    with pytest.raises(KeyboardInterrupt):
        opened(error=KeyboardInterrupt())
    a_rank(1)
    assert opened()


def test_answers_from_before_this_process_are_not_taken(a_rank, opened, monkeypatch):
    a_rank(0)
    assert opened()
    a_rank(1)
    monkeypatch.setattr(asking.psutil.Process, "create_time", lambda self: asking.time.time())
    assert opened()


def test_another_recipe_asks_for_itself(a_rank, opened):
    """It may be refused for other reasons, and its files may not be in the cache."""
    a_rank(0)
    assert opened()
    a_rank(1)
    assert opened(model_revision="other") and not opened()


def test_alone_or_without_the_hub_nobody_waits(a_rank, opened, tmp_path, monkeypatch):
    a_rank(0, world=1)
    assert opened()
    a_rank(0)
    assert opened(model_name_or_path=str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not opened()
    assert not (tmp_path / "cache").exists()


def test_without_a_folder_for_the_lock_each_asks(a_rank, opened, tmp_path):
    (tmp_path / "cache").write_text("")
    for number in (0, 1):
        a_rank(number)
        assert opened()


def test_the_wait_for_a_rank_that_hangs_while_it_asks_ends_after_ddp_timeout(a_rank, opened, monkeypatch):
    acquire = asking.FileLock.acquire
    monkeypatch.setattr(asking.FileLock, "acquire", lambda lock, timeout: acquire(lock, timeout=timeout / 1000))
    a_rank(0)
    with asked_once("config", Recipe(model_name_or_path=NAME, dataset="d", ddp_timeout=10)):
        a_rank(1)
        assert opened(ddp_timeout=10)


def test_answers_of_old_runs_are_deleted(a_rank, opened, tmp_path):
    a_rank(0)
    assert opened(model_revision="first")
    first = set((tmp_path / "cache/asked").iterdir())
    for file in first:
        os.utime(file, (0, 0))
    a_rank(0)
    assert opened(model_revision="second")
    second = set((tmp_path / "cache/asked").iterdir())
    assert len(first) == len(second) == 2 and not first & second


# The real library, with a hub on this machine


class Hub(BaseHTTPRequestHandler):
    """One model, from a folder; ``asked`` has the method and the path of each request."""

    def do_GET(self):
        self.server.asked.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        files = {file.name: file for file in self.server.folder.iterdir()}
        if self.server.status:
            return self._send(self.server.status, b"", **self.server.headers)
        if path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": name} for name, file in files.items()
            ]
            is_root = path.count("/") == 6
            return self._json(entries) if is_root else self._send(404, b"", X_Error_Code="EntryNotFound")
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": NAME, "sha": COMMIT, "gated": False, "private": False, "siblings": siblings})
        name = path.rpartition("/")[2]
        if name not in files:
            return self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        self._send(200, files[name].read_bytes(), X_Repo_Commit=COMMIT, ETag=f'"{name}"')

    do_HEAD = do_GET

    def _json(self, value):
        self._send(200, json.dumps(value).encode())

    def _send(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(model_folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.folder, server.status, server.headers = [], model_folder, 0, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


OPEN = """
import sys
from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.config.recipe import Recipe
from kit.model.load import open_config, hub_options
from kit.model.tokenizer import open_tokenizer
from kit.run.asking import asked_once
recipe = Recipe(model_name_or_path=sys.argv[1], dataset="d")
for what, call in (("tokenizer", open_tokenizer), ("config", open_config)):
    try:
        with asked_once(what, recipe):
            call(recipe)
    except UserError as error:
        print(error)
print(hub_options(recipe, is_checked=True)["revision"])
"""


def start(hub, home, world):
    """What each of ``world`` ranks says."""
    hub.asked.clear()
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home)}
    env |= {"KIT_CACHE": str(home / "kit"), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    env |= {"PYTHONPATH": str(ROOT)}
    env.pop("HF_HUB_OFFLINE", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN, NAME],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    return [rank.communicate(timeout=120)[0] for rank in ranks]


@pytest.mark.slow
def test_two_ranks_fetch_each_file_once(hub, tmp_path):
    assert start(hub, tmp_path / "both", 2) == [f"{COMMIT}\n"] * 2
    fetched = [request for request in hub.asked if "/resolve/" in request]
    assert fetched and len(fetched) == len(set(fetched))


@pytest.mark.slow
@pytest.mark.long
def test_ranks_make_the_requests_of_one(hub, tmp_path):
    of_one = []
    for _ in range(2):  # with an empty cache, and with a full one
        start(hub, tmp_path / "one", 1)
        of_one.append(sorted(hub.asked))
    assert of_one[0] != of_one[1] != []
    for expected in of_one:
        start(hub, tmp_path / "all", 4)
        assert sorted(hub.asked) == expected


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (401, {"X_Error_Code": "RepoNotFound"}, "the hub has no such public model"),
        (403, {"X_Error_Code": "GatedRepo"}, "its licence is not accepted"),
        (404, {"X_Error_Code": "RepoNotFound"}, "the hub has no such public model"),
    ],
)
def test_ranks_get_the_same_message_as_one_process(hub, tmp_path, status, headers, message):
    hub.status, hub.headers = status, headers
    said = start(hub, tmp_path / "both", 2)
    assert message in said[0] and said[0] == said[1]
    of_both = len(hub.asked)
    assert start(hub, tmp_path / "one", 1) == said[:1] and of_both == len(hub.asked)
