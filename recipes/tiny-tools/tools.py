"""The tools of the recipe tiny-tools: prices that no model knows, and sums that this model cannot do."""

import zlib


def price(item: str, city: str) -> int:
    """Look up what an item costs in a city.

    Args:
        item: The name of the item.
        city: The name of the city.
    """
    return 2 + zlib.crc32(f"{item} in {city}".encode()) % 19


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
