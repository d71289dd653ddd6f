"""A store in memory that fails, hangs or loses files when a test says so: ``faulty://``."""

from collections.abc import Callable

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


def _nothing(operation: str, path: str) -> None:
    pass


class FaultyStore(MemoryFileSystem):
    """Calls ``before`` with the name of each operation and its path; what that raises, the operation raises."""

    protocol = "faulty"
    store: dict[str, MemoryFile] = {}  # noqa: RUF012 as in the base class
    pseudo_dirs = [""]  # noqa: RUF012
    before: Callable[[str, str], None] = staticmethod(_nothing)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://", 1))

    def _open(self, path, mode="rb", **options):
        if mode != "rb":
            FaultyStore.before("open", path)
        file = super()._open(path, mode, **options)
        if mode != "rb":
            write = file.write
            file.write = lambda data: (FaultyStore.before("write", path), write(data))[1]
        return file

    def cat_file(self, path, **options):
        FaultyStore.before("read", path)
        return super().cat_file(path, **options)

    def get_file(self, path, to, **options):
        FaultyStore.before("get", path)
        return super().get_file(path, to, **options)

    def ls(self, path, detail=True, **options):
        FaultyStore.before("list", path)
        return super().ls(path, detail=detail, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        FaultyStore.before("write", path)
        return MemoryFileSystem.pipe_file(self, path, value, **options)

    def rm_file(self, path):
        FaultyStore.before("delete", path)
        return self._rm(path)


def empty_store() -> FaultyStore:
    """Return the store, empty and without faults."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.store.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    FaultyStore.before = staticmethod(_nothing)
    return fsspec.filesystem("faulty")
