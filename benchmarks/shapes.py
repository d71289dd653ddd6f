"""How many shapes the micro-batches of a run have: padded to the longest row, rounded up as in a run, packed.

    python benchmarks/shapes.py --model_name_or_path MODEL --dataset FILE.jsonl [--dataset_columns a=b] [--rows 1 8]

Counts three epochs of the dataset, tokenised as a run does it, and of 20,000 log-normal lengths up to 4,096 tokens
(median 600, sigma 0.9), in global batches of 64 samples or 16 packs on one GPU. Prints a Markdown table. A shape is the
number of rows and the tokens of each.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator, Item
from kit.data.feed.order import Order
from kit.model.build import open_config
from kit.tools.plan.lengths import read_training_data

EPOCHS = 3
SAMPLES, PACKS = 64, 16  # of a global batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--dataset_columns", default={}, help="as in a recipe")
    parser.add_argument("--max_length", type=int, default=1024, help="of the dataset; longer rows are left out")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="of a micro-batch")
    args = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(600), 0.9, 20_000)
    sets = {
        args.dataset.rpartition("/")[-1]: (lengths_of(args), args.max_length),
        "log-normal": (np.clip(drawn, 16, 4096).astype(np.int64), 4096),
    }
    print("| lengths | batches | rows | micro-batches | shapes: longest row | rounded up | more tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, (lengths, max_length) in sets.items():
        for kind in ("padded", "packed"):
            for rows in args.rows:
                cells = table_cells(lengths, max_length, kind, rows)
                print(f"| {name} | {kind} | {rows} | {' | '.join(cells)} |")


def lengths_of(args: argparse.Namespace) -> np.ndarray:
    """Return the tokens of each sample of the dataset, int64 [N]."""
    recipe = Recipe(
        model_name_or_path=args.model_name_or_path,
        dataset=args.dataset,
        dataset_columns=args.dataset_columns,
        max_length=args.max_length,
        excess_length_strategy="drop",
    )
    data = read_training_data(recipe, open_config(recipe).vocab_size)
    return data.train.lengths.astype(np.int64)


def table_cells(lengths: np.ndarray, max_length: int, kind: str, rows: int) -> list[str]:
    packing = kind.endswith("packed")
    size = PACKS if packing else SAMPLES
    rows = min(rows, size)
    collator = Collator(rows, 0, packing, max_length)
    longest: list[tuple[int, int]] = []  # rows of each micro-batch, and the tokens of its longest
    rounded: list[tuple[int, int]] = []  # and those that are computed
    for items in ordered(lengths, size, max_length if packing else None):
        for (share,) in collator.deal(lengths, items, 1):
            filled = [int(lengths[item].sum()) for item in share]
            longest.append((len(share), max(filled)))
            rounded.append((len(share), collator.width(filled)))
    computed = [sum(num * width for num, width in shapes) for shapes in (longest, rounded)]
    return [
        f"{len(longest):,}",
        f"{len(set(longest)):,}",
        f"{len(set(rounded)):,}",
        f"{computed[1] / computed[0] - 1:.1%}",
    ]


def ordered(lengths: np.ndarray, size: int, capacity: int | None) -> Iterator[list[Item]]:
    """Yield the global batches of samples in the cache."""
    order = Order(lengths, np.zeros(len(lengths), np.int16), 0, size, capacity=capacity)
    yield from (order.batch(step) for step in range(order.total_steps(EPOCHS)))


if __name__ == "__main__":
    main()
