"""A copy of a run's folder in a store: ``mirror_to``. A start with an empty disk continues from it.

Promises:

- A checkpoint of the copy is complete or absent: its manifest is written last and deleted first, and what is taken from
  the copy is compared with the manifest's hashes.
- No step waits for the store: a thread copies the checkpoints that are complete on the disk. A request that fails is
  made again, and the run goes on without the copy until the next checkpoint.
- The copy keeps the checkpoints that ``save_total_limit`` and ``keep_best`` keep, whenever the disk is lost: a
  checkpoint is copied after those before it, which the disk of a run that continues from it does not have.
- Nothing of another run is overwritten. If two starts write to one copy, the later one does, and the other one stops.

The copy has the names of ``output_dir``, and ``mirror.json``: which start writes to it, and the hashes of ``final/``.
"""

import json
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from kit import durable
from kit.checkpoint.manifest import (
    MANIFEST,
    STATE,
    describe_file,
    digest_of,
    list_checkpoints,
    name_of,
    outdated,
    read_manifest,
)
from kit.config.recipe import Recipe
from kit.console import bar, is_main, say
from kit.errors import Problem, UserError, first_line
from kit.run.identity import differences
from kit.run.output_dir import OUTPUT_FILES
from kit.run.record import RUN_FILE
from kit.stores import FULL, is_address, open_filesystem, problem_of, retried

_OWNER = "mirror.json"
_FIELD = "mirror_to"
# Stores in which a file appears at once and whole, and which have no folders to make.
_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf", "memory")
_POLL_SECONDS = 1.0  # between two looks for a new checkpoint
_PAUSE_SECONDS = 60.0  # after all attempts failed; a new checkpoint or the end of the run does not wait for it
STOPPED_SECONDS = 20.0  # for the copy after a signal or an error: schedulers kill after 30 s, or a few minutes
_CHUNK_BYTES = 1 << 23
_NUM_AT_ONCE = 4  # files


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
        self._has_folders = not is_address(self.address) or self.address.partition("://")[0] not in _OBJECT_STORES
        if not is_address(self.address) or self.address.startswith(("file://", "local://")):
            self._check_apart(Path(self._root).resolve(), folder.resolve())
        self._token = ""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_last, self._is_aborted = threading.Event(), threading.Event()
        self._copied = 0  # bytes
        self._damaged: set[str] = set()  # the names of checkpoints on the disk
        self._stamps: dict[str, list[int]] = {}  # of the small files that were copied
        try:
            self._look()
            self._check_owner(identity)
            if is_main():
                self._write(".probe", b"x")
                self._delete(".probe")
        except UserError:
            raise
        except Exception as error:  # each library has its own
            raise UserError(problem_of(error, self.address, _FIELD)) from None
        own = [path.name for path in list_checkpoints(folder / "checkpoints")]
        wanted = recipe.resume_from_checkpoint
        obeyed = self.record and self.record.get("recipe", {}).get("resume_from_checkpoint") == wanted
        is_asked = (wanted == "auto" or obeyed) and not recipe.overwrite_output_dir
        self.is_newer = bool(is_asked and self._complete and max(self._complete) > max(own, default=""))

    def _check_apart(self, copy: Path, folder: Path) -> None:
        if copy == folder or copy in folder.parents or folder in copy.parents:
            found = f"{self.address} and output_dir {self._folder} lie in each other"
            outside = (copy if copy in folder.parents else folder).parent / "copies" / folder.name
            raise UserError(Problem(_FIELD, found, "two places", f"--mirror_to {shlex.quote(str(outside))}"))

    def _look(self) -> None:
        """Read what the copy holds: the text of run.json, and the manifests of complete checkpoints."""
        self._filesystem.invalidate_cache()
        self._names = self._list("")
        self._text = self._read(RUN_FILE) if RUN_FILE in self._names else b""
        self._complete: dict[str, dict[str, Any]] = {}
        self._partial: list[str] = []  # what kills left of checkpoints
        for name in self._list("checkpoints") if "checkpoints" in self._names else []:
            if re.fullmatch(r"step-\d{8}", name):
                self._partial.append(name)
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                manifest = json.loads(self._read(f"checkpoints/{name}/{MANIFEST}"))
                own = manifest.pop("xxh3_128")
                is_plain = all(Path(file).name == file for file in manifest["files"])
                if name in self._partial and own == digest_of(manifest) and is_plain:
                    self._complete[name] = {**manifest, "xxh3_128": own}
                    self._partial.remove(name)

    def _check_owner(self, identity: Mapping[str, Any]) -> None:
        """Read the copy's run.json. Raises ``UserError`` if it is of another run, or there are files of no run."""
        self.record: dict[str, Any] = {}
        fix = self._another()
        if not self._text:
            written_first = (".probe", _OWNER, RUN_FILE)  # a kill may leave each, or the temporary file that becomes it
            own = {*written_first, *(f".{name}.partial" for name in written_first)}
            if others := sorted(set(self._names) - own):
                found = f"{self.address} is not empty and holds no run ({others[0]})"
                raise UserError(Problem(_FIELD, found, "a place for this run alone", fix))
            return
        try:
            self.record = json.loads(self._text)
            changed = differences(self.record["identity"], identity)
            int(self.record["finished_steps"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{self.address}/{RUN_FILE} is no record of a run ({type(error).__name__})"
            raise UserError(Problem(_FIELD, found, fix=fix)) from None
        if self._recipe.overwrite_output_dir:
            return
        fix += "; or --overwrite_output_dir true, which deletes it, and what output_dir holds"
        if changed:
            raise UserError(Problem(_FIELD, f"{self.address} holds another run ({'; '.join(changed)})", fix=fix))
        if self._recipe.resume_from_checkpoint == "none":
            raise UserError(Problem(_FIELD, f"{self.address} holds this run already", fix=fix))

    def _another(self) -> str:
        return f"--mirror_to {shlex.quote(f'{self.address}-2')}"

    def describe(self) -> str:
        """Return for ``--dry_run`` where the run would continue."""
        return f"would continue from {max(self._complete)} of the copy at {self.address}"

    # --- from the copy to the disk

    def restore(self) -> None:
        """Copy to the folder what the run needs to continue: its records, the newest checkpoint, and the best one.

        Of a finished run also ``final/``. A damaged checkpoint is skipped. What a kill leaves half is copied again.

        Raises:
            UserError: the store refuses something, or no checkpoint is complete.
        """
        say(f"continuing from the copy at {self.address}")
        try:
            # First, so that after a kill the folder is recognised as that of this run.
            durable.write_text(self._folder / RUN_FILE, self._text.decode())
            for name in (name for name in OUTPUT_FILES if name in self._names):
                durable.write_text(self._folder / name, self._read(name).decode())
            if self.record["finished_steps"] and _OWNER in self._names:
                files = json.loads(self._read(_OWNER)).get("final", {})
                if files and not self._fetch("final", files):
                    say(f"warning: {self.address}/final is damaged: it will be written again")
            own = [path.name for path in list_checkpoints(self._folder / "checkpoints")]
            for name in sorted(self._complete, reverse=True):
                if name <= max(own, default=""):
                    break
                if self._fetch_checkpoint(name):
                    best = self._best(self._folder / "checkpoints" / name)
                    if best and best != name and best in self._complete and best not in own:
                        self._fetch_checkpoint(best)
                    break
                say(f"skipping {self.address}/checkpoints/{name}: a file is missing or was altered")
            else:
                found = f"no checkpoint of {self.address} is complete"
                raise UserError(Problem(_FIELD, found, fix=f"{self._another()}, which starts again"))
        except UserError:
            raise
        except Exception as error:  # each library has its own
            if isinstance(error, OSError) and error.errno in FULL:
                raise  # of output_dir
            raise UserError(problem_of(error, self.address, _FIELD)) from None

    def _fetch_checkpoint(self, name: str) -> bool:
        manifest = self._complete[name]
        return self._fetch(f"checkpoints/{name}", manifest["files"], json.dumps(manifest, indent=1) + "\n")

    def _fetch(self, name: str, files: Mapping[str, Mapping[str, Any]], manifest: str = "") -> bool:
        """Copy a folder, which appears when it is complete. Returns whether all its files are as they should be."""
        target = self._folder / name
        staging = durable.staging_of(target)
        durable.make_afresh(staging)
        num_bytes = sum(entry["bytes"] for entry in files.values())
        with bar(f"copying {target.name}", "B", num_bytes, scales=True) as shown:
            for file, entry in sorted(files.items()):
                path = staging / file
                if ".." in Path(file).parts or Path(file).is_absolute():
                    return False
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    retried(partial(self._filesystem.get_file, self._at(f"{name}/{file}"), str(path)))
                except FileNotFoundError:
                    return False
                if describe_file(path) != dict(entry):
                    return False
                shown.update(entry["bytes"])
        if manifest:
            durable.write_text(staging / MANIFEST, manifest)
        durable.sync_tree(staging)
        durable.remove(target)
        os.replace(staging, target)
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
        self._token = f"{socket.gethostname()} {os.getpid()} {os.urandom(8).hex()}"
        self._first_step = step
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, is_stopped: bool = False) -> None:
        """Wait until all is copied; after a signal for at most ``STOPPED_SECONDS``.

        Raises:
            UserError: the copy is not complete. After a signal a line says so instead.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        end = time.monotonic() + STOPPED_SECONDS if is_stopped else float("inf")
        self._is_last.set()
        thread.join(0.5)
        if thread.is_alive():
            say(f"copying to {self.address} ...")
        with bar("copied", "B", None, scales=True) as shown:
            while thread.is_alive() and time.monotonic() < end:
                thread.join(0.5)
                shown.update(self._copied - shown.n)
        if thread.is_alive():
            self._is_aborted.set()
            thread.join(2.0)
        if self._error is None and not thread.is_alive():
            return
        reason = first_line(self._error) if self._error else f"not done within {STOPPED_SECONDS:.0f} s"
        found = f"the copy at {self.address} is not complete ({reason}); {self._folder} is"
        if not is_stopped:
            raise UserError(Problem(_FIELD, found, fix="the same command again copies what is missing"))
        say(f"warning: {found}")

    def complete(self) -> None:
        """Copy what a finished run lacks in its copy. Raises as ``finish``."""
        if self._text != (self._folder / RUN_FILE).read_bytes():  # it is written last
            self.start(int(1e8) - 1)
            self.finish()

    def leave(self) -> None:
        """Wait for the copy for at most ``STOPPED_SECONDS``. For a run that ends with an error; never raises."""
        with suppress(Exception):
            self.finish(is_stopped=True)

    def _work(self) -> None:
        """Copy until the run ends. The thread."""
        last_try, seen = 0.0, ""
        has_begun = False
        while True:
            is_last = self._is_last.is_set()
            own = list_checkpoints(self._folder / "checkpoints")
            newest = own[-1].name if own else ""
            is_due = newest != seen or (self._error and time.monotonic() - last_try > _PAUSE_SECONDS)
            if is_due or is_last or not has_begun:
                seen, last_try = newest, time.monotonic()
                try:
                    if not has_begun:
                        self._take_over()
                        has_begun = True
                    self._copy_checkpoints(is_last)
                    if is_last:
                        self._copy_end()
                    if self._error:
                        say(f"the copy at {self.address} is up to date again")
                    self._error = None
                except Exception as error:  # each library has its own
                    if not self._error:
                        say(f"warning: {_FIELD}: {problem_of(error, self.address, _FIELD).found}; the run goes on")
                    self._error = error
                    if isinstance(error, _Taken):
                        return
            if is_last:
                return
            self._is_last.wait(_POLL_SECONDS)

    def _take_over(self) -> None:
        """Make this start the one that writes, and delete what it will write again."""
        self._write(_OWNER, json.dumps({"start": self._token}).encode())
        if self._recipe.overwrite_output_dir and self._text:
            self._delete(RUN_FILE)
            self._delete_folder("final")
        for name in self._partial:
            self._delete_checkpoint(name)
        for name in list(self._complete):
            if name > name_of(self._first_step) or self._recipe.overwrite_output_dir:
                self._delete_checkpoint(name)
        # It must not say that the run is finished before all else is copied.
        record = json.loads(durable.read_small(self._folder / RUN_FILE)) | {"finished_steps": 0}
        self._write(RUN_FILE, (json.dumps(record, indent=1) + "\n").encode())

    def _copy_checkpoints(self, is_last: bool) -> None:
        """Copy the checkpoints that the copy lacks, and delete those that are outdated in it."""
        self._check_token()
        limit = self._recipe.save_total_limit
        while True:
            paths = list_checkpoints(self._folder / "checkpoints")
            own = {path.name: path for path in paths if path.name not in self._damaged}
            if not own:
                break
            newest = max(own)
            stale = outdated(sorted(own), limit, self._best(own[newest]))
            lacking = [name for name in sorted(own) if name not in stale and not self._has(own[name])]
            # The oldest first: if the disk is lost, the run continues from the newest of the copy, and never makes
            # those before it again. If all are kept, which may be many, the newest first.
            name = lacking[0 if limit else -1] if lacking else newest
            best = self._best(own[name])
            begun = time.monotonic()
            if lacking and not self._copy_checkpoint(own[name]):
                continue
            for each in outdated(sorted(self._complete), limit, best):
                self._delete_checkpoint(each)
            if not lacking:
                break
            newer = [path.name for path in list_checkpoints(self._folder / "checkpoints") if path.name > newest]
            if newer and not is_last:
                seconds = time.monotonic() - begun
                say(f"the copy at {self.address} is behind: {name} took {seconds:.0f} s, and {newer[-1]} is complete")

    def _has(self, path: Path) -> bool:
        with suppress(OSError, ValueError, KeyError):  # the save that follows deleted it
            return bool(read_manifest(path)["xxh3_128"] == self._complete.get(path.name, {}).get("xxh3_128"))
        return True

    def _copy_checkpoint(self, path: Path) -> bool:
        """Copy a checkpoint, its manifest last. Returns whether it was: a damaged one is left out from here on."""
        with ExitStack() as stack:
            try:  # open files stay readable when a save deletes the checkpoint
                manifest = read_manifest(path)
                files = {name: stack.enter_context((path / name).open("rb")) for name in manifest["files"]}
            except FileNotFoundError as error:
                altered = [Path(error.filename).name]
            else:
                self._delete_checkpoint(path.name)  # what a kill left of it, or another attempt at the same step
                altered = self._copy_files(f"checkpoints/{path.name}", files, manifest["files"])
        if altered:
            if path.exists():  # else a save deleted it
                say(f"warning: {path} is not copied: {altered[0]} is missing or was altered")
                self._damaged.add(path.name)
            self._delete_checkpoint(path.name)
            return False
        self._copy_records()
        self._check_token()
        text = (json.dumps(manifest, indent=1) + "\n").encode()
        self._write(f"checkpoints/{path.name}/{MANIFEST}", text)
        self._complete[path.name] = manifest
        return True

    def _copy_files(
        self, folder: str, files: Mapping[str, BinaryIO], entries: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Copy open files, several at once. Returns the names of those of which the hash is not that of their entry."""
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            hashes = pool.map(lambda name: self._put(f"{folder}/{name}", files[name]), files)
            return [name for name, found in zip(files, hashes, strict=True) if found != entries[name]["xxh3_128"]]

    def _copy_records(self) -> None:
        """Copy metrics.jsonl, and the other small files, where they changed."""
        for name in OUTPUT_FILES:
            path = self._folder / name
            with suppress(FileNotFoundError), path.open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
                if self._stamps.get(name) != stamp:
                    content = file.read(status.st_size)
                    self._write(name, content)
                    self._stamps[name] = stamp

    def _copy_end(self) -> None:
        """Copy ``final/`` with its hashes, if there is one, and run.json after it."""
        final, record = self._folder / "final", json.loads(durable.read_small(self._folder / RUN_FILE))
        if record["finished_steps"] and final.is_dir():
            paths = {str(path.relative_to(final)): path for path in sorted(final.rglob("*")) if path.is_file()}
            entries = {name: describe_file(path) for name, path in paths.items()}
            self._delete_folder("final")
            with ExitStack() as stack:
                files = {name: stack.enter_context(path.open("rb")) for name, path in paths.items()}
                if altered := self._copy_files("final", files, entries):
                    raise OSError(f"{final / altered[0]} was altered while it was copied")
            owner = json.dumps({"start": self._token, "final": entries}).encode()
            self._write(_OWNER, owner)
        self._copy_records()
        self._write(RUN_FILE, (self._folder / RUN_FILE).read_bytes())

    def _check_token(self) -> None:
        """Raise ``_Taken`` if another start writes to the copy now."""
        with suppress(FileNotFoundError, ValueError):
            other = json.loads(self._read(_OWNER)).get("start", "")
            if other != self._token:
                raise _Taken(f"another start of this run writes there ({' '.join(other.split()[:2])})")

    # --- requests

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _list(self, name: str) -> list[str]:
        try:
            found = retried(partial(self._filesystem.ls, self._at(name), detail=False))
        except FileNotFoundError:
            return []
        return [each for path in found if (each := str(path).rstrip("/").removeprefix(self._at(name)).strip("/"))]

    def _read(self, name: str) -> bytes:
        return bytes(retried(partial(self._filesystem.cat_file, self._at(name))))

    def _write(self, name: str, content: bytes) -> None:
        """Write a small file, which appears whole."""
        if not self._has_folders:
            retried(partial(self._filesystem.pipe_file, self._at(name), content))
            return
        temporary = str(Path(name).with_name(f".{Path(name).name}.partial"))
        self._put(temporary, BytesIO(content))
        retried(partial(self._filesystem.mv, self._at(temporary), self._at(name)))

    def _put(self, name: str, file: BinaryIO) -> str:
        """Write a file, and return the hash of what was written."""
        return retried(partial(self._put_once, name, file))

    def _put_once(self, name: str, file: BinaryIO) -> str:
        if self._has_folders:
            self._filesystem.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        state = xxhash.xxh3_128()
        file.seek(0)
        out = self._filesystem.open(self._at(name), "wb")
        try:
            while chunk := file.read(_CHUNK_BYTES):
                if self._is_aborted.is_set():
                    raise _Taken("the process ends")
                out.write(chunk)
                state.update(chunk)
                self._copied += len(chunk)
        except BaseException:
            with suppress(Exception):  # a file that is closed, or collected, would be taken for complete
                out.discard()
            with suppress(AttributeError):
                out.closed = True
            raise
        out.close()
        return state.hexdigest()

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            retried(partial(self._filesystem.rm_file, self._at(name)))

    def _delete_folder(self, name: str) -> None:
        self._filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            retried(partial(self._filesystem.rm, self._at(name), recursive=True))

    def _delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint, or what is there of one, its manifest first."""
        self._complete.pop(name, None)
        self._delete(f"checkpoints/{name}/{MANIFEST}")
        self._delete_folder(f"checkpoints/{name}")


class _Taken(UserError):
    """Copying ends for good. (A ``UserError`` is not tried again.)"""

    def __init__(self, reason: str) -> None:
        super().__init__(Problem(_FIELD, reason))

    def __str__(self) -> str:
        return self.problems[0].found
