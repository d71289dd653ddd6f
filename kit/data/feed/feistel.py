"""A random permutation whose values are computed one by one, so that its memory does not grow with its size.

Promises: the values depend only on the keys, on all machines and in all versions of numpy. It is a Feistel network,
which permutes the numbers of an even number of bits, with cycle walking: a value outside is permuted again until it is
inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It shuffles well; it is no encryption.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


@dataclass(frozen=True)
class Feistel:
    """A permutation of the numbers from 0 to ``num`` - 1."""

    num: int
    keys: NDArray[np.uint64]  # [ROUNDS]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at ``positions``. [N] -> [N]"""
        values = positions.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):  # fewer than four times on average: the network has less than four times as many numbers
            values[outside] = self._permuted(values[outside])
            outside = outside[values[outside] >= np.uint64(self.num)]
        return values.astype(np.int64)

    def _permuted(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(max(1, -(-(self.num - 1).bit_length() // 2)))  # of each half
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << bits) | right


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word, as the last step of SplitMix64 does (Steele, Lea and Flood 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
