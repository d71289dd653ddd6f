"""A copy of a run's folder in a store: ``mirror_to``. A start with an empty disk continues from it.

Promises:

- A checkpoint of the copy is complete or absent: its manifest is written last and deleted first, and what is taken from
  the copy is compared with the manifest's hashes.
- No step waits for the store: a thread copies what is complete on the disk. If a request fails, the run goes on, and
  the thread tries again.
- Nothing of another run is overwritten.

The copy has the names of ``output_dir``. Of a run that finished, ``final/`` is written again from the last checkpoint.
"""

import json
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kit import durable
from kit.checkpoint.manifest import (
    MANIFEST,
    STATE,
    list_checkpoints,
    name_of,
    outdated,
    read_manifest,
    verify,
)
from kit.config.recipe import Recipe
from kit.console import is_main, say
from kit.errors import Problem, UserError, first_line
from kit.run.identity import differences
from kit.run.output_dir import OUTPUT_FILES
from kit.run.record import RUN_FILE
from kit.stores import FULL, is_address, open_filesystem, problem_of, retried

_FIELD = "mirror_to"
_POLL_SECONDS, _PAUSE_SECONDS = 1.0, 60.0  # between two looks for a new checkpoint; after a request failed
STOPPED_SECONDS = 20.0  # for the copy after a signal or an error: schedulers kill after 30 s, or a few minutes
_CHUNK_BYTES = 1 << 23
_ANOTHER = "--mirror_to with another place"
_ANOTHER_OR_OVERWRITE = f"{_ANOTHER}; or --overwrite_output_dir true, which deletes it, and what output_dir holds"


class Mirror:
    """The copy. Every rank creates one; only the main process makes the other calls."""

    def __init__(self, recipe: Recipe, folder: Path, identity: Mapping[str, Any]) -> None:
        """Look at the copy, and try whether it can be written to: a small file is made there and removed at once.

        Raises:
            UserError: the store refuses something or cannot be reached, or the copy is of another run.
        """
        assert recipe.mirror_to is not None
        self._recipe, self._folder = recipe, folder
        self.address = recipe.mirror_to.rstrip("/")
        self._filesystem, self._root = open_filesystem(recipe.mirror_to, _FIELD)
        self._is_local = not is_address(self.address) or self.address.startswith(("file://", "local://"))
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_last = threading.Event()
        self._absent: set[str] = set()  # checkpoints that were deleted, or damaged, before they were copied
        try:
            self._look()
            self._check_owner(identity)
            if is_main():
                self._write(".probe", "x")
                self._delete(".probe")
        except UserError:
            raise
        except Exception as error:  # each library has its own
            raise UserError(problem_of(error, self.address, _FIELD)) from None
        own = [path.name for path in list_checkpoints(folder / "checkpoints")]
        wanted = recipe.resume_from_checkpoint
        was_obeyed = self._record.get("recipe", {}).get("resume_from_checkpoint") == wanted
        is_asked = (wanted == "auto" or was_obeyed) and not recipe.overwrite_output_dir
        self.is_newer = bool(is_asked and self._complete and max(self._complete) > max(own, default=""))

    def _look(self) -> None:
        """Find out what the copy holds: its files, the text of run.json, and the names of checkpoints."""
        if self._is_local:
            copy, folder = Path(self._root).resolve(), self._folder.resolve()
            if copy == folder or copy in folder.parents or folder in copy.parents:
                found = f"{self.address} and output_dir {self._folder} lie in each other"
                raise UserError(Problem(_FIELD, found, "two places", _ANOTHER))
        self._filesystem.invalidate_cache()
        found = retried(partial(self._filesystem.find, self._root))
        self._names = {str(path).removeprefix(self._at("")) for path in found}
        self._text = self._read(RUN_FILE) if RUN_FILE in self._names else ""
        steps = {name.split("/")[1] for name in self._names if re.match(r"checkpoints/step-\d{8}/", name)}
        self._complete = {step for step in steps if f"checkpoints/{step}/{MANIFEST}" in self._names}
        self._partial = steps - self._complete  # what kills left

    def _check_owner(self, identity: Mapping[str, Any]) -> None:
        """Read the copy's run.json. Raises ``UserError`` if it is of another run, or there are files of no run."""
        self._record: dict[str, Any] = {}
        if not self._text:
            if others := sorted(name for name in self._names if not name.startswith(".")):  # a kill may leave those
                found = f"{self.address} is not empty and holds no run ({others[0]})"
                raise UserError(Problem(_FIELD, found, "a place for this run alone", _ANOTHER))
            return
        try:
            self._record = json.loads(self._text)
            changed = differences(self._record["identity"], identity)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{self.address}/{RUN_FILE} is no record of a run ({type(error).__name__})"
            raise UserError(Problem(_FIELD, found, fix=_ANOTHER)) from None
        if self._recipe.overwrite_output_dir:
            return
        if changed:
            found = f"{self.address} holds another run ({'; '.join(changed)})"
            raise UserError(Problem(_FIELD, found, fix=_ANOTHER_OR_OVERWRITE))
        if self._recipe.resume_from_checkpoint == "none":
            raise UserError(Problem(_FIELD, f"{self.address} holds this run already", fix=_ANOTHER_OR_OVERWRITE))

    def describe(self) -> str:
        """Return for ``--dry_run`` where the run would continue."""
        return f"would continue from {max(self._complete)} of the copy at {self.address}"

    # --- from the copy to the disk

    def restore(self) -> None:
        """Copy to the folder what the run needs to continue: its records, the newest checkpoint, and the best one.

        A damaged checkpoint is skipped. What a kill leaves half is copied again.

        Raises:
            UserError: the store refuses something, or no checkpoint is complete.
        """
        say(f"continuing from the copy at {self.address}")
        try:
            # First, so that after a kill the folder is recognised as that of this run.
            durable.write_text(self._folder / RUN_FILE, _unfinished(self._text))
            for name in (name for name in OUTPUT_FILES if name in self._names):
                durable.write_text(self._folder / name, self._read(name))
            checkpoints = self._folder / "checkpoints"
            own = [path.name for path in list_checkpoints(checkpoints)]
            for name in sorted(self._complete, reverse=True):
                if name <= max(own, default=""):
                    return
                if self._fetch(name):
                    best = self._best(checkpoints / name)
                    if best in self._complete and best != name and best not in own:
                        self._fetch(best)
                    return
                say(f"skipping {self.address}/checkpoints/{name}: a file is missing or was altered")
        except UserError:
            raise
        except Exception as error:  # each library has its own
            if isinstance(error, OSError) and error.errno in FULL:
                raise  # of output_dir
            raise UserError(problem_of(error, self.address, _FIELD)) from None
        raise UserError(Problem(_FIELD, f"no checkpoint of {self.address} is complete", fix=_ANOTHER))

    def _fetch(self, name: str) -> bool:
        """Copy a checkpoint to the disk. Returns whether all its files are as they should be."""
        target = self._folder / "checkpoints" / name
        staging = durable.staging_of(target)
        durable.make_afresh(staging)
        text = self._read(f"checkpoints/{name}/{MANIFEST}")
        durable.write_text(staging / MANIFEST, text)
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # ``verify`` finds what is wrong
            for file in json.loads(text)["files"]:
                if Path(file).name == file:
                    path = self._at(f"checkpoints/{name}/{file}")
                    retried(partial(self._filesystem.get_file, path, str(staging / file)))
        if verify(staging):
            return False
        durable.sync_tree(staging)
        durable.remove(target)
        staging.replace(target)
        durable.sync(target.parent)
        return True

    def _best(self, checkpoint: Path) -> str:
        """The name of the best checkpoint so far, which ``keep_best`` keeps; empty if there is none."""
        if self._recipe.keep_best:
            with suppress(OSError, ValueError, KeyError, TypeError):
                return name_of(json.loads(durable.read_small(checkpoint / STATE))["best"]["step"])
        return ""

    # --- from the disk to the copy

    def start(self, step: int) -> None:
        """Begin to copy in a thread. Checkpoints of the copy after ``step`` are deleted: their steps are repeated."""
        self._thread = threading.Thread(target=self._work, args=(name_of(step),), name="mirror", daemon=True)
        self._thread.start()

    def finish(self, is_stopped: bool = False) -> None:
        """Wait until all is copied; after a signal for at most ``STOPPED_SECONDS``.

        Raises:
            UserError: the copy is not complete. After a signal a line says so instead.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_last.set()
        thread.join(0.5)
        if thread.is_alive():
            say(f"copying to {self.address} ...")
            thread.join(STOPPED_SECONDS if is_stopped else None)
        if self._error is None and not thread.is_alive():
            return
        reason = first_line(self._error) if self._error else f"not done within {STOPPED_SECONDS:.0f} s"
        found = f"the copy at {self.address} is not complete ({reason}); {self._folder} is"
        if not is_stopped:
            raise UserError(Problem(_FIELD, found, fix="the same command again copies what is missing"))
        say(f"warning: {found}")

    def complete(self) -> None:
        """Copy what a finished run lacks in its copy. Raises as ``finish``."""
        if self._text != durable.read_small(self._folder / RUN_FILE):  # it is written last
            self.start(int(1e8) - 1)
            self.finish()

    def leave(self) -> None:
        """Wait for the copy for at most ``STOPPED_SECONDS``. For a run that ends with an error; never raises."""
        with suppress(Exception):
            self.finish(is_stopped=True)

    def _work(self, first: str) -> None:
        """Copy until the run ends: the thread. Later checkpoints than ``first`` are made again."""
        has_begun = False
        while True:
            is_last = self._is_last.is_set()
            try:
                if not has_begun:
                    self._begin(first)
                    has_begun = True
                self._copy_checkpoints()
                if is_last:
                    self._copy_end()
                self._error = None
            except Exception as error:  # each library has its own
                if not self._error:
                    say(f"warning: {_FIELD}: {problem_of(error, self.address, _FIELD).found}; the run goes on")
                self._error = error
            if is_last:
                return
            self._is_last.wait(_PAUSE_SECONDS if self._error else _POLL_SECONDS)

    def _begin(self, first: str) -> None:
        """Write run.json, and delete what the run writes again."""
        starts_again = self._recipe.overwrite_output_dir
        if starts_again:
            self._delete_folder("final")
        for name in self._partial | self._complete:
            if name in self._partial or name > first or starts_again:
                self._delete_checkpoint(name)
        self._write(RUN_FILE, _unfinished(durable.read_small(self._folder / RUN_FILE)))

    def _copy_checkpoints(self) -> None:
        """Copy the checkpoints that the copy lacks, the oldest first, and delete those that are outdated in it.

        The oldest first: a run that continues from the newest of the copy never makes those before it again.
        """
        while True:
            own = {path.name: path for path in list_checkpoints(self._folder / "checkpoints")}
            newest = max(own, default="")
            best = self._best(own[newest]) if own else ""
            kept = own.keys() - outdated(sorted(own), self._recipe.save_total_limit, best)
            name = min(kept - self._complete - self._absent, default="")
            if name:
                self._copy_checkpoint(own[name])
            for each in outdated(sorted(self._complete), self._recipe.save_total_limit, best):
                self._delete_checkpoint(each)
            if not name:
                return

    def _copy_checkpoint(self, path: Path) -> None:
        """Copy a checkpoint, its manifest last; nothing if a save deletes it before it is open."""
        with ExitStack() as stack:
            try:  # open files stay readable when a save deletes the checkpoint
                manifest = read_manifest(path)
                files = {name: stack.enter_context((path / name).open("rb")) for name in manifest["files"]}
            except FileNotFoundError as error:
                self._absent.add(path.name)
                if path.exists():
                    say(f"warning: {path} is not copied: no {Path(error.filename).name}")
                return
            for name, file in files.items():
                self._put(f"checkpoints/{path.name}/{name}", file)
        self._copy_records()
        self._write(f"checkpoints/{path.name}/{MANIFEST}", json.dumps(manifest, indent=1) + "\n")
        self._complete.add(path.name)

    def _copy_records(self) -> None:
        """Copy metrics.jsonl, and the other small files."""
        for name in OUTPUT_FILES:
            with suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
                self._put(name, file)

    def _copy_end(self) -> None:
        """Copy ``final/``, if there is one, and run.json after it."""
        final, text = self._folder / "final", durable.read_small(self._folder / RUN_FILE)
        self._copy_records()
        if json.loads(text)["finished_steps"] and final.is_dir():
            self._delete_folder("final")
            for path in sorted(final.rglob("*")):
                if path.is_file():
                    with path.open("rb") as file:
                        self._put(f"final/{path.relative_to(final)}", file)
        self._write(RUN_FILE, text)

    # --- requests

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _read(self, name: str) -> str:
        return bytes(retried(partial(self._filesystem.cat_file, self._at(name)))).decode()

    def _write(self, name: str, text: str) -> None:
        """Write a small file, which appears whole: in a store of objects each does."""
        if self._is_local:
            path = Path(self._at(name))
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(path, text)
        else:
            retried(partial(self._filesystem.pipe_file, self._at(name), text.encode()))

    def _put(self, name: str, file: Any) -> None:
        def put() -> None:
            if self._is_local:
                Path(self._at(name)).parent.mkdir(parents=True, exist_ok=True)
            file.seek(0)
            with self._filesystem.open(self._at(name), "wb") as out:
                shutil.copyfileobj(file, out, _CHUNK_BYTES)

        retried(put)

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            retried(partial(self._filesystem.rm_file, self._at(name)))

    def _delete_folder(self, name: str) -> None:
        self._filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            retried(partial(self._filesystem.rm, self._at(name), recursive=True))

    def _delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint, or what is there of one, its manifest first."""
        self._complete.discard(name)
        self._delete(f"checkpoints/{name}/{MANIFEST}")
        self._delete_folder(f"checkpoints/{name}")


def _unfinished(record: str) -> str:
    """The text of run.json without the end of the run: ``final/`` is not there yet."""
    return json.dumps(json.loads(record) | {"finished_steps": 0}, indent=1) + "\n"
