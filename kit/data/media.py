"""What is known of an image or audio of a row before its tensors are made."""

from typing import Literal, NamedTuple

MediaKind = Literal["image", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "audio")


class Media(NamedTuple):
    """An image or audio of a row, before its tensors are made."""

    kind: MediaKind
    data: bytes  # the content of the file; of one with a path, the path as the row has it, in UTF-8
    is_path: bool
    size: tuple[int, int]  # of an image: height and width, turned as EXIF asks; of audio: samples, and their rate
    digest: int  # of the content
    stamp: int  # of a file: of its size and its time; else 0
