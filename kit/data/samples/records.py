"""What is known of samples beside their tokens: one record each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kit.data.read.image_files import Image

# One sample in the cache.
SAMPLE = np.dtype(
    [
        ("start", "<i8"),  # index of its first token among those of all samples
        ("length", "<i4"),  # tokens
        ("part", "<i4"),  # index of the part of the source, usually a file
        ("number", "<i8"),  # line or row in that part, from 1
        ("num_targets", "<i4"),  # supervised tokens that have a token before them
        ("target_weight", "<f8"),  # sum of their weights
        ("ids_hash", "<u8"),
    ]
)
# What pairs, and answers with a label, have besides. The tokens of a pair are the prompt with the chosen answer, then
# the prompt with the rejected one.
PREFERENCE = np.dtype(
    [
        ("prompt_length", "<i4"),  # tokens before the first supervised one
        ("first_length", "<i4"),  # tokens of the chosen half; of an answer with a label, all of them
        ("first_weight", "<f8"),  # sum of the weights of the supervised tokens in it
        ("label", "u1"),  # 0: the answer is a bad one
    ]
)

# An image of a sample, and where its content, or its path in UTF-8, is in ``image_data``.
IMAGE = np.dtype(
    [
        ("start", "<i8"),
        ("size", "<i4"),  # bytes
        ("is_path", "u1"),
        ("height", "<i4"),  # pixels, turned as EXIF asks
        ("width", "<i4"),
        ("digest", "<u8"),  # see ``kit.data.read.image_files.Image``
        ("stamp", "<u8"),
    ]
)


class StoredImages:
    """The images of samples, from the arrays ``images``, ``image_counts`` and ``image_data`` of a cache entry."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._images, self._data = arrays["images"], arrays["image_data"]
        self._firsts = np.concatenate([[0], np.cumsum(arrays["image_counts"], dtype=np.int64)])

    def __getitem__(self, i: int) -> list[Image]:
        """Return those of sample ``i``."""
        found = []
        for image in self._images[self._firsts[i] : self._firsts[i + 1]]:
            data = self._data[image["start"] : image["start"] + image["size"]].tobytes()
            numbers = (int(image[name]) for name in ("height", "width", "digest", "stamp"))
            found.append(Image(data, bool(image["is_path"]), *numbers))
        return found


class Table:
    """Samples, by their records. ``table[i]`` is ``(input_ids [T], weights float32 [T])``; subclasses have the tokens.

    A weight is that of the token in the loss, 0 if nothing is learned from it. A sample is one sequence of tokens. A
    pair is two, one behind the other.

    Attributes:
        lengths: int32 [N], the number of tokens of each sample.
        num_targets: int32 [N], the number of its supervised tokens that have a token before them.
        target_weights: float64 [N], the sum of their weights.
        dataset_ids: int [N], the index of its data set.
        preferences: PREFERENCE [N] of pairs and answers with a label; else None.
        sequence_lengths: int32 [N, 2] of pairs, [N, 1] of other samples, [N, G] of up to G texts that belong to each
            other, 0 for one that is not there: the tokens of each sequence.
        pooled: whether a head reads the states of the tokens with a weight; else these are predicted.
        head_values: float32 [N, L] of such samples: the margin of a pair, or numbers of labels; NaN for none.
        references: float64 [N, 2] or None: the log-probabilities that the reference of an objective gives to the two
            sequences of a pair, or to an answer with a label and to its mismatched one (``kit.data.feed.mismatched``).
        image_maker: what makes pixels of images (``kit.model.images.Images``); None if no sample has any.
    """

    image_maker: Any = None

    def __init__(
        self,
        records: np.ndarray | Mapping[str, np.ndarray],
        preferences: np.ndarray | None,
        dataset_ids: np.ndarray,
    ) -> None:
        """
        Args:
            records: SAMPLE [N], or those of its columns that are read here.
        """
        self.lengths = records["length"]
        self.num_targets = records["num_targets"]
        self.target_weights = records["target_weight"]
        self.dataset_ids = dataset_ids
        self.preferences = preferences
        self.sequence_lengths = self.lengths[:, None]
        self.references: np.ndarray | None = None
        self.pooled = False
        self.head_values: np.ndarray | None = None
        if preferences is not None and (preferences["first_length"] < self.lengths).any():
            firsts = preferences["first_length"]
            self.sequence_lengths = np.stack([firsts, self.lengths - firsts], axis=1)

    @property
    def row_lengths(self) -> np.ndarray:
        """The tokens of each sample's longest sequence, int32 [N]: of the rows that it takes without packing."""
        return self.sequence_lengths.max(axis=1)

    @property
    def are_answers(self) -> bool:
        """Whether the samples are answers to write, and neither compared nor for a head in the place of words."""
        return self.preferences is None and not self.pooled

    @property
    def labels(self) -> np.ndarray | None:
        """Whether each answer is a good one, bool [N], of answers with a label; of pairs true; else None."""
        return None if self.preferences is None else self.preferences["label"].astype(bool)

    @property
    def are_rated(self) -> bool:
        """Whether the samples are answers with a label."""
        return self.preferences is not None and self.sequence_lengths.shape[1] == 1

    def per_sequence(self, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """See ``kit.data.feed.batches.Rows``."""
        if self.head_values is not None:
            return {"values": self.head_values[members], "roles": numbers}
        if self.labels is None:
            return {}
        known = {} if self.references is None else {"references": self.references[members, numbers]}
        return {"labels": self.labels[members], **known}

    def per_token(self, i: int) -> dict[str, np.ndarray]:
        """See ``kit.data.feed.batches.Rows``: nothing."""
        return {}

    def image_inputs(self, input_ids: np.ndarray, segments: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
        """See ``kit.data.feed.batches.Rows``. Raises ``UserError`` if an image cannot be decoded."""
        if self.image_maker is None:
            return {}
        images = [self.images_with_origin(i) for _, _, i in segments]
        return dict(self.image_maker.inputs(input_ids, segments, images))

    def images_with_origin(self, i: int) -> list[tuple[Image, str, str]]:
        """Return the images of sample ``i``, each with the folder of its path, and where its row is from."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and weights of sample ``i``."""
        raise NotImplementedError

    def sequences(self, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and weights of each sequence of sample ``i``: of a pair the chosen one first."""
        lengths = self.sequence_lengths[i]
        bounds = np.cumsum(lengths[lengths > 0])[:-1]
        return list(zip(*(np.split(values, bounds) for values in self[i]), strict=True))
