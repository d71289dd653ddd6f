"""Reads the bytes of a file, or of one member of an archive, and decompresses them. Nothing is unpacked to disk.

Promises:

- Memory use does not grow with the size of the file.
- A file that is cut short or damaged is never taken for a complete one: ``Reader.damage`` says what happened.
- An archive is refused as a whole if one member is a link, or has a path that leads out of the folder.
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

from kit.durable import open_regular
from kit.errors import Problem, UserError

BUFFER_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 20  # of a name in a tar
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
class Location:
    """Where some bytes are stored: in a file, or in one member of an archive."""

    path: str  # of the file or the archive
    num_bytes: int  # size of the file on disk, or of the member after extraction
    member: str = ""  # name of the member; empty for a plain file
    offset: int = 0  # position of a tar member's header in the decompressed archive

    @property
    def suffix(self) -> str:
        """The suffix that names the format of the content: ``.jsonl`` for ``train.jsonl.gz``."""
        return split_name(self.member or self.path)[0]


def split_name(name: str) -> tuple[str, str]:
    """Split off the suffixes for format and compression: ``(".jsonl", ".gz")`` for ``train.jsonl.gz``.

    Both are in lower case. A suffix that the name does not have is an empty string.
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix in DECOMPRESSORS:
        return os.path.splitext(stem)[1], suffix
    return suffix, ""


class Reader(io.BufferedReader):
    """Decompressed bytes up to the end of the content, or up to the first damage. Supports reading only, no seeking."""

    def __init__(self, content: "_UpToDamage", raw: Any) -> None:
        self._content = content
        self._raw = raw  # as stored: before decompression
        super().__init__(content, BUFFER_BYTES)

    @property
    def damage(self) -> str:
        """Why the bytes ended too early, such as ``cut short``. Empty if no damage has been met so far."""
        return self._content.damage

    @property
    def num_bytes_read(self) -> int:
        """How many of the ``Location.num_bytes`` have been read so far.

        It runs a little ahead of what the caller has received, and is ``Location.num_bytes`` at the end.
        """
        return self._raw.tell()


class _UpToDamage(io.RawIOBase):
    """A decompressing stream that ends at the first error, and remembers the error, instead of raising it."""

    def __init__(self, stream: Any, damage: str) -> None:
        self._stream = stream
        self.damage = damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read1(len(buffer))  # read() would lose the bytes before the damage
        except Exception as error:  # each codec raises exceptions of its own
            is_short = isinstance(error, EOFError) or re.search("(?i)truncated|end of data", str(error))
            self.damage = "cut short" if is_short else f"damaged ({type_and_message(error)})"
            return 0
        buffer[: len(data)] = data
        return len(data)


def type_and_message(error: Exception) -> str:
    """The exception's type and the first line of its message: ``OSError: Truncated``. To quote it in a ``Problem``."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def open_location(location: Location) -> Iterator[Reader]:
    """Open ``location`` for reading from its start.

    Raises whatever the libraries raise if the file or the member cannot be opened at all. Damage that is met later,
    while reading, is not raised: see ``Reader.damage``.
    """
    with ExitStack() as stack:
        if not location.member:
            raw: Any = stack.enter_context(open_regular(location.path))
        elif _is_zip(location.path):
            raw = stack.enter_context(_zip(location.path).open(location.member))
        else:
            raw = stack.enter_context(_tar_member(location))
        stream, damage = raw, ""
        compression = split_name(location.member or location.path)[1]
        if compression:
            stream = stack.enter_context(DECOMPRESSORS[compression](raw))
            damage = "" if location.num_bytes else "cut short"  # some codecs take an empty file for empty content
        yield stack.enter_context(Reader(_UpToDamage(stream, damage), raw))


def is_archive(name: str) -> bool:
    """Whether the name has the suffix of a zip or a tar, compressed or not."""
    return _is_zip(name) or _tar_compression(name) is not None


def _is_zip(name: str) -> bool:
    return name.lower().endswith(".zip")


def _tar_compression(name: str) -> str | None:
    """The suffix of a tar's compression, empty for an uncompressed tar. None if ``name`` is not that of a tar."""
    content, compression = split_name(name)
    return compression if content == ".tar" else TAR_COMPRESSIONS.get(content)


def members(name: str, path: str) -> list[Location]:
    """List the files in the archive at ``path``, without hidden ones.

    The files of a zip are sorted by name, those of a tar keep their order. ``name`` is what messages call the archive.
    Raises ``UserError`` if the archive is damaged, encrypted, or has a member that is unsafe to unpack.
    """
    try:
        if _is_zip(path):
            found = sorted(_zip_members(name, path), key=lambda location: location.member)
        else:
            found = list(_tar_members(name, path))
    except UserError:
        raise
    except Exception as error:  # the libraries raise many types
        raise UserError(Problem(name, f"a damaged archive, or cut short ({type_and_message(error)})")) from None
    # As if unpacked: of two members with the same name, the later one replaces the earlier.
    found = list({location.member: location for location in found}.values())
    return [location for location in found if not any(_is_hidden(part) for part in location.member.split("/"))]


def _is_hidden(part: str) -> bool:
    """Whether a part of a path is hidden; `.` is not: `tar -C folder .` puts it before each name."""
    return part != "." and part.startswith((".", "__MACOSX"))


def _check_member(archive: str, member: str, is_special: bool) -> None:
    """Raise ``UserError`` if unpacking the member could write outside the folder, or make a link or a device."""
    parts = re.split(r"[/\\]", member)
    if not parts[0] or ".." in parts or re.match("[A-Za-z]:", member):
        found = "a path that leaves the folder it is unpacked in"
    elif is_special:
        found = "a link or a special file"
    else:
        return
    fix = "do not unpack it: such an archive is damaged or made to do harm"
    raise UserError(Problem(f"{archive}!{member}", found, "an archive of plain files", fix))


def _zip_members(name: str, path: str) -> Iterator[Location]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            is_special = kind not in (0, stat.S_IFREG, stat.S_IFDIR)
            _check_member(name, info.orig_filename, is_special)
            if info.flag_bits & 1:
                raise UserError(Problem(f"{name}!{info.filename}", "encrypted", "an archive without a password"))
            if not info.is_dir():
                yield Location(path, info.file_size, info.filename)


def _tar_members(name: str, path: str) -> Iterator[Location]:
    archive, files = _open_tar(path)
    with files:
        for info in archive:
            is_plain = info.isreg() or info.isdir()
            _check_member(name, info.name, is_special=not is_plain or info.issparse())
            if info.isreg():
                yield Location(path, info.size, info.name, info.offset)


# Headers that hold a long name, or other entries, of the member after them.
_TEXT_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class _TarInfo(tarfile.TarInfo):
    """Raises an error for a broken header, where ``tarfile`` would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, *args: Any) -> Any:
        """Raises an error for a long header, which ``tarfile`` would read into memory as a whole."""
        info = super().frombuf(*args)
        if info.type in _TEXT_TYPES and info.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {info.size} bytes")
        return info

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the regular end of an archive
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


def _open_tar(path: str) -> tuple[tarfile.TarFile, ExitStack]:
    """Open a tar as a stream, whose members can be read only in their order. The caller closes the ``ExitStack``."""
    with ExitStack() as stack:
        stream = stack.enter_context(open(path, "rb"))
        compression = _tar_compression(path)
        if compression:
            stream = stack.enter_context(DECOMPRESSORS[compression](stream))
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|", bufsize=BUFFER_BYTES, tarinfo=_TarInfo))
        return archive, stack.pop_all()


_open_zips: dict[tuple[str, int, int, int], zipfile.ZipFile] = {}


def _zip(path: str) -> zipfile.ZipFile:
    """A zip, open: the one opened last stays so, because its list of members is read as a whole each time."""
    status = os.stat(path)
    key = (path, status.st_size, status.st_mtime_ns, os.getpid())  # a forked process must not move the file's position
    if key not in _open_zips:
        _open_zips.clear()  # a member that is still read keeps its file open
        _open_zips[key] = zipfile.ZipFile(path)
    return _open_zips[key]


# The tar that was read last, still open, and the offset of the last member read: a later member is read from there on,
# so that nothing is decompressed twice.
_idle: dict[tuple[str, int, int], tuple[int, tarfile.TarFile, ExitStack]] = {}


@contextmanager
def _tar_member(location: Location) -> Iterator[Any]:
    """The content of a tar's member as a file object. Keeps the archive open afterwards, see ``_idle``."""
    status = os.stat(location.path)
    key = (location.path, status.st_size, status.st_mtime_ns)
    if key in _idle and _idle[key][0] < location.offset:
        _, archive, files = _idle.pop(key)
    else:
        archive, files = _open_tar(location.path)
    with files:
        info = archive.next()
        while info is not None and info.offset != location.offset:
            info = archive.next()
        if info is None:
            raise EOFError("it has fewer members than before")
        yield archive.extractfile(info)
        for _, _, others in _idle.values():
            others.close()
        _idle.clear()
        _idle[key] = (location.offset, archive, files.pop_all())
