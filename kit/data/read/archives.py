"""Bytes of a file or of a member of an archive, decompressed on the way. Nothing is ever unpacked to disk.

Promises:

- Memory stays flat, whatever the size.
- What is cut short or damaged is noticed, and never taken for the end.
- An archive with a link, or with a member that would be unpacked outside its folder, is refused whole.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kit.errors import Problem, UserError

BUFFER_BYTES = 1 << 18
TAR_COMPRESSIONS = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}


def _open_zst(stream: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where bytes lie: in a file, or in one member of an archive."""

    path: str
    num_bytes: int  # on disk; of a member: once taken out of its archive
    member: str = ""
    offset: int = 0  # of a tar member's header in the decompressed archive

    @property
    def suffix(self) -> str:
        """That of the content: ``.jsonl`` for ``train.jsonl.gz``."""
        return split_name(self.member or self.path)[0]


def split_name(name: str) -> tuple[str, str]:
    """The suffixes of the content and of the compression: ``.jsonl`` and ``.gz``, each empty where there is none."""
    stem, suffix = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1], suffix) if suffix in DECOMPRESSORS else (suffix, "")


class Reader(io.BufferedReader):
    """Decompressed bytes up to the end, or up to the first damage. The only methods to use are those that read."""

    def __init__(self, content: "_UpToDamage", stored: Any) -> None:
        self._content, self._stored = content, stored
        super().__init__(content, BUFFER_BYTES)

    @property
    def damage(self) -> str:
        """Why the bytes ended too early, such as ``cut short``; empty where they did not, or not yet."""
        return self._content.damage

    @property
    def num_bytes_read(self) -> int:
        """Of ``Stored.num_bytes``, up to now: a little ahead of what was handed out, all of them at the end."""
        return self._stored.tell()


class _UpToDamage(io.RawIOBase):
    def __init__(self, stream: Any, damage: str) -> None:
        self._stream, self.damage = stream, damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read1(len(buffer))  # read() would lose what comes before the damage
        except Exception as error:  # each codec has its own
            is_short = isinstance(error, EOFError) or re.search("(?i)truncated|end of data", str(error))
            self.damage = "cut short" if is_short else f"damaged ({first_line(error)})"
            return 0
        buffer[: len(data)] = data
        return len(data)


def first_line(error: Exception) -> str:
    """What a library says, short enough for a message of ours."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def opened(stored: Stored) -> Iterator[Reader]:
    """Read what ``stored`` names from its start. Raises what the libraries raise where nothing can be read at all."""
    with ExitStack() as stack:
        if not stored.member:
            raw: Any = stack.enter_context(open(stored.path, "rb"))
        elif _is_zip(stored.path):
            raw = stack.enter_context(stack.enter_context(zipfile.ZipFile(stored.path)).open(stored.member))
        else:
            raw = stack.enter_context(_tar_member(stored))
        stream, damage = raw, ""
        if compression := split_name(stored.member or stored.path)[1]:
            stream = stack.enter_context(DECOMPRESSORS[compression](raw))
            damage = "" if stored.num_bytes else "cut short"  # some take no bytes for no content
        yield stack.enter_context(Reader(_UpToDamage(stream, damage), raw))


def is_archive(name: str) -> bool:
    return _is_zip(name) or _tar_compression(name) is not None


def _is_zip(name: str) -> bool:
    return name.lower().endswith(".zip")


def _tar_compression(name: str) -> str | None:
    """The suffix of a tar's compression, an empty string if it has none; None for what is no tar."""
    content, compression = split_name(name)
    return compression if content == ".tar" else TAR_COMPRESSIONS.get(content)


def members(name: str, path: str) -> list[Stored]:
    """The files in an archive, hidden ones left out: of a zip in the order of their names, of a tar as they lie.

    ``name`` is the archive's for messages. Raises ``UserError`` for one that cannot be read or should not be.
    """
    try:
        if _is_zip(path):
            found = sorted(_zip_members(name, path), key=lambda stored: stored.member)
        else:
            found = list(_tar_members(name, path))
    except UserError:
        raise
    except Exception as error:  # the libraries raise nearly everything
        raise UserError(Problem(name, f"a damaged archive, or cut short ({first_line(error)})")) from None
    # As unpacked: of two members with the same name the later one is left.
    found = list({stored.member: stored for stored in found}.values())
    return [
        stored for stored in found if not any(part.startswith((".", "__MACOSX")) for part in stored.member.split("/"))
    ]


def _check_member(archive: str, member: str, is_special: bool) -> None:
    parts = re.split(r"[/\\]", member)
    if not parts[0] or ".." in parts or re.match("[A-Za-z]:", member):
        found = "a path that leaves the folder it is unpacked in"
    elif is_special:
        found = "a link or a special file"
    else:
        return
    fix = "do not unpack it: such an archive is damaged or made to do harm"
    raise UserError(Problem(f"{archive}!{member}", found, "an archive of plain files", fix))


def _zip_members(name: str, path: str) -> Iterator[Stored]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            _check_member(name, info.orig_filename, kind not in (0, stat.S_IFREG, stat.S_IFDIR))
            if info.flag_bits & 1:
                raise UserError(Problem(f"{name}!{info.filename}", "encrypted", "an archive without a password"))
            if not info.is_dir():
                yield Stored(path, info.file_size, info.filename)


def _tar_members(name: str, path: str) -> Iterator[Stored]:
    archive, files = _open_tar(path)
    with files:
        for info in archive:
            _check_member(name, info.name, not (info.isreg() or info.isdir()) or info.issparse())
            if info.isreg():
                yield Stored(path, info.size, info.name, info.offset)


class _TarInfo(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the mark at the end of an archive
            raise
        except tarfile.HeaderError as error:  # which the library would take for the end
            raise tarfile.ReadError(str(error)) from None


def _open_tar(path: str) -> tuple[tarfile.TarFile, ExitStack]:
    """As a stream: its members can be read in their order only. Close the stack after use."""
    with ExitStack() as stack:
        stream = stack.enter_context(open(path, "rb"))
        if compression := _tar_compression(path):
            stream = stack.enter_context(DECOMPRESSORS[compression](stream))
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER_BYTES, tarinfo=_TarInfo))
        return archive, stack.pop_all()


# The archive last read from, and where: the next member goes on from there, and decompresses nothing twice.
_idle: dict[tuple[str, int, int], tuple[int, tarfile.TarFile, ExitStack]] = {}


@contextmanager
def _tar_member(stored: Stored) -> Iterator[Any]:
    status = os.stat(stored.path)
    key = (stored.path, status.st_size, status.st_mtime_ns)
    if key in _idle and _idle[key][0] < stored.offset:
        _, archive, files = _idle.pop(key)
    else:
        archive, files = _open_tar(stored.path)
    with files:
        while (info := archive.next()) is not None and info.offset != stored.offset:
            pass
        if info is None:
            raise EOFError("it has fewer members than before")
        yield archive.extractfile(info)
        for _, _, others in _idle.values():
            others.close()
        _idle.clear()
        _idle[key] = (stored.offset, archive, files.pop_all())
