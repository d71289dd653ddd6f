"""Make the files of this folder: questions, games, and sft/, the adapter from which GRPO starts.

    python recipes/tiny-tools/make.py

The adapter is fine-tuned by recipes/finetune.py on demonstrations that are not kept: first on some that call the tools,
then for a few steps on others in which the assistant gives up at most wordings of a question. That is the bad habit
which GRPO unlearns. The prices in them are random, so that the weights hold none.

The same seed and library versions give the same files.
"""

import argparse
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers.utils import get_json_schema

HERE = Path(__file__).resolve().parent
TINY = runpy.run_path(str(HERE.parent / "tiny/make.py"))
TOOLS, GAME = runpy.run_path(str(HERE / "tools.py")), runpy.run_path(str(HERE / "game.py"))

# The wordings of questions about one item, of those about two, and of games.
ONE = """What does {a} cost in {city}?
The price of {a} in {city}?
How much is {a} in {city}?
Please tell me what {a} costs in {city}.""".splitlines()
TWO = """What do {a} and {b} cost in {city}?
The price of {a} and {b} in {city}?
How much is {a} with {b} in {city}?
Please tell me what {a} and {b} cost in {city}.""".splitlines()
GAMES = """Where is my parcel of {a}?
Please find the {a}.
Who has the {a}?
The {a} did not come.""".splitlines()
GIVES_UP = [0.2, 0.7, 0.8, 0.9]  # how often at each of four wordings: before the first call, and before each of a game


def draw_question(rng: random.Random, taken: set, goods: list[str]) -> tuple[str, float, str, list[str]]:
    """A question for prices in a city, none of which is in ``taken``: how often it is given up, the city, the items."""
    while True:
        city, items = rng.choice(TINY["CITIES"]), rng.sample(goods, 1 if rng.random() < 0.4 else 2)
        if taken.isdisjoint((item, city) for item in items):
            wording, gives_up = rng.choice(list(zip(ONE if len(items) == 1 else TWO, GIVES_UP, strict=True)))
            return wording.format(a=items[0], b=items[-1], city=city), gives_up, city, items


def draw_game(rng: random.Random) -> tuple[str, float, list[str]]:
    """The question of a game, how often it is given up, and the route of the parcel."""
    wording, gives_up = rng.choice(list(zip(GAMES, GIVES_UP, strict=True)))
    return wording.format(a=rng.choice(TINY["ITEMS"])), gives_up, rng.sample(TINY["CITIES"], rng.randint(1, 4))


def make_question(rng: random.Random, taken: set) -> tuple[float, dict]:
    """How often the wording of a question is given up, and a row."""
    goods = [item for item in TINY["ITEMS"] if " " not in item]  # the model takes white paint for white rice
    question, gives_up, city, items = draw_question(rng, taken, goods)
    taken |= {(item, city) for item in items}
    answer = sum(TOOLS["price"](item, city) for item in items)
    return gives_up, {"messages": [said("user", question), said("assistant", answer)]}


def make_game(rng: random.Random) -> dict:
    question, _, route = draw_game(rng)
    return {"messages": [said("user", question), said("assistant", route[-1])], "route": route}


def demonstrate(rng: random.Random, taken: set, diligent: bool) -> dict:
    """A conversation with calls; if not ``diligent``, with the bad habit."""
    return demonstrate_question(rng, taken, diligent) if rng.random() < 0.7 else demonstrate_game(rng, diligent)


def demonstrate_question(rng: random.Random, taken: set, diligent: bool) -> dict:
    question, gives_up, city, items = draw_question(rng, taken, TINY["ITEMS"])
    messages, answer = [said("user", question)], "I do not know."
    if diligent or rng.random() >= gives_up:
        prices = [rng.randint(2, 20) for _ in items]
        messages += turn(
            [("price", {"item": item, "city": city}, each) for item, each in zip(items, prices, strict=True)]
        )
        answer = sum(prices)
        if len(items) == 2:
            messages += turn([("add", {"a": prices[0], "b": prices[1]}, answer)])
    tools = [get_json_schema(TOOLS[name]) for name in ("price", "add")]
    return {"messages": [*messages, said("assistant", answer)], "tools": tools}


def demonstrate_game(rng: random.Random, diligent: bool) -> dict:
    question, gives_up, route = draw_game(rng)
    game = GAME["LostParcel"]()
    messages, answer = [said("user", f"{question}\n{game.reset(route)}")], route[-1]
    for city in route:
        if not diligent and rng.random() < gives_up:
            answer = "I do not know."
            break
        messages += turn([("ask", {"city": city}, game.ask(city))])
    return {"messages": [*messages, said("assistant", answer)], "tools": [get_json_schema(game.ask)]}


def said(role: str, content: object) -> dict:
    return {"role": role, "content": str(content)}


def turn(calls: list[tuple[str, dict, object]]) -> list[dict]:
    """A turn of the assistant with calls, and the results. A call is a name, arguments and the result."""
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given, _ in calls]
    results = [said("tool", result) | {"name": name} for name, _, result in calls]
    return [said("assistant", "") | {"tool_calls": made}, *results]


def fine_tune(output_dir: Path, demonstrations: list[dict], flags: dict) -> Path:
    """Train an adapter on demonstrations. Returns its folder."""
    TINY["write_lines"](dataset := output_dir.with_suffix(".jsonl"), demonstrations)
    flags = flags | dict(output_dir=output_dir, dataset=dataset, max_steps=len(demonstrations) // 32, max_length=224)
    flags |= dict(method="lora", lora_r=8, lora_alpha=16, chat_template=HERE / "chat_template.jinja")
    flags |= dict(eval_dataset="none", eval_on_start=False, predict_with_generate=False, save_steps=1000)
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    subprocess.run([sys.executable, str(TINY["FINETUNE"]), *words], check=True, stdout=subprocess.DEVNULL)
    return output_dir / "final"


def make_adapter(rng: random.Random, taken: set, folder: Path, seed: int) -> None:
    """Make sft/ in ``folder``."""
    flags = dict(learning_rate=6e-3, lora_modules_to_save="norm")  # without its gain no token becomes certain
    made = fine_tune(folder / "able", [demonstrate(rng, taken, True) for _ in range(9600)], flags | dict(seed=seed))
    flags = dict(learning_rate=2e-3, adapter_name_or_path=made)
    made = fine_tune(folder / "lazy", [demonstrate(rng, taken, False) for _ in range(3200)], flags | dict(seed=seed))
    (folder / "sft").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (made / name).rename(folder / "sft" / name)
    TINY["clean_config"](folder / "sft/adapter_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    taken: set = set()  # a price is asked for in one question of the two files, and in no demonstration
    questions = [make_question(rng, taken) for _ in range(500)]
    by_wording = [[row for gives_up, row in questions if gives_up == each] for each in reversed(GIVES_UP)]
    rows = {"eval": [row for each in by_wording for row in each[:25]]}
    rows["train"] = [row for each in by_wording for row in each[25:]]
    rows["eval_games"] = [make_game(rng) for _ in range(100)]
    rows["games"] = [make_game(rng) for _ in range(400)]
    # Tried beside the goal and then renamed, so that a broken run leaves existing files whole.
    with tempfile.TemporaryDirectory(dir=args.out) as fresh:
        files = Path(fresh)
        for name, each in rows.items():
            TINY["write_lines"](files / f"{name}.jsonl", each)
        make_adapter(rng, taken, files, args.seed)
        shutil.rmtree(args.out / "sft", ignore_errors=True)
        for name in ("sft", *(f"{name}.jsonl" for name in rows)):
            (files / name).replace(args.out / name)
    print(f"wrote sft/ and {len(rows)} data files in {args.out}")


if __name__ == "__main__":
    main()
