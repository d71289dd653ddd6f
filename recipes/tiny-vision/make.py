"""Make everything in this folder: a tiny model that reads pictures, its tokenizer, train.jsonl and eval.jsonl.

    python recipes/tiny-vision/make.py

The base learns to describe drawn shapes and digits in plain sentences, in the order in which one reads. It never sees a
conversation or a JSON list: those are what fine-tuning teaches. The new files are written only if the probe at the end
passes. Same --seed, --threads and library versions, same files.
"""

import argparse
import base64
import io
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast as Tokens
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CELL = 28  # pixels of a thing's cell: one feature for the language model
GRIDS = [(2, 2), (2, 3), (3, 2)]  # columns and rows
COLOURS = {"red": "#d22", "green": "#2a2", "blue": "#24d", "orange": "#f90", "purple": "#92c", "black": "#111"}
SHAPES = ["circle", "square", "triangle", "cross"]
DIGITS = "zero one two three four five six seven eight nine".split()
# Of each digit, the segments of a seven-segment display that are lit.
LIT = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]
SEGMENTS = {
    "a": (9, 5, 19, 5),
    "b": (19, 5, 19, 14),
    "c": (19, 14, 19, 23),
    "d": (9, 23, 19, 23),
    "e": (9, 14, 9, 23),
    "f": (9, 5, 9, 14),
    "g": (9, 14, 19, 14),
}
ASKED = "List what you see."
ROLES = ["<|user|>", "<|assistant|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", *ROLES, *VISION]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


Things = dict[int, tuple[str, str]]  # the colour and the name of each thing by the number of its cell, as one reads


def draw(rng: random.Random) -> tuple[Image.Image, Things]:
    """Draw a picture of two or three things."""
    columns, rows = rng.choice(GRIDS)
    picture = Image.new("RGB", (columns * CELL, rows * CELL), rng.choice(["#fff", "#eee", "#ffd", "#def"]))
    pen = ImageDraw.Draw(picture)
    cells = sorted(rng.sample(range(columns * rows), rng.randint(2, 3)))
    things: Things = {}
    for cell in cells:
        row, column = divmod(cell, columns)
        x, y = column * CELL + rng.randint(-1, 1), row * CELL + rng.randint(-1, 1)
        colour, name = rng.choice(list(COLOURS)), rng.choice(SHAPES + DIGITS)
        _draw_thing(pen, x, y, rng.randint(0, 1), COLOURS[colour], name)
        things[cell] = colour, name
    return picture, things


def _draw_thing(pen: ImageDraw.ImageDraw, x: int, y: int, margin: int, colour: str, name: str) -> None:
    left, top, right, bottom = x + 5 + margin, y + 5 + margin, x + 23 - margin, y + 23 - margin
    if name in DIGITS:
        for segment in LIT[DIGITS.index(name)]:
            x0, y0, x1, y1 = SEGMENTS[segment]
            pen.line((x + x0, y + y0, x + x1, y + y1), fill=colour, width=3)
    elif name == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif name == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    elif name == "triangle":
        pen.polygon([((left + right) // 2, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        pen.line((left, top, right, bottom), fill=colour, width=4)
        pen.line((left, bottom, right, top), fill=colour, width=4)


def described(rng: random.Random, things: Things) -> str:
    """A plain description, in one of several wordings."""
    words = [f"{colour} {name}" for colour, name in things.values()]
    if rng.random() < 0.5:
        return "There is a " + ", then a ".join(words) + "."
    return "; ".join(words) + "."


def answer(things: Things) -> str:
    """The list that fine-tuning teaches."""
    return json.dumps([{"colour": colour, "thing": name} for colour, name in things.values()])


def conversation(rng: random.Random) -> dict:
    """A row of the data, with its picture as a data: URI."""
    picture, things = draw(rng)
    file = io.BytesIO()
    picture.quantize(16).save(file, "PNG", optimize=True)
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": ASKED}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer(things)}]}


def train_tokenizer(rng: random.Random) -> Tokens:
    """Train a byte-level BPE tokenizer on what the model reads and writes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(2000):
        things = draw(rng)[1]
        texts += [described(rng, things), answer(things), ASKED]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = Tokens(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Tokens) -> Qwen2VLForConditionalGeneration:
    """Build the model with random weights."""
    ids = tokenizer.get_vocab()
    ends = {"bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|end|>"], "pad_token_id": ids["<|pad|>"]}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        **ends,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    vision |= {"temporal_patch_size": 1}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2VLForConditionalGeneration(config)


def fit_tower(model: Qwen2VLForConditionalGeneration, processor: object, rng: random.Random, steps: int) -> None:
    """Teach the tower to tell things apart: each feature is that of a cell. What reads the features is thrown away."""
    colours, names = list(COLOURS), SHAPES + DIGITS
    reader = torch.nn.Linear(model.config.text_config.hidden_size, len(colours) * len(names) + 1)
    tower = model.model.visual
    optimizer = torch.optim.AdamW([*tower.parameters(), *reader.parameters()], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for step in range(steps):
        drawn = [draw(rng) for _ in range(64)]
        inputs = processor([picture for picture, _ in drawn], return_tensors="pt")
        targets = []
        for (_, things), grid in zip(drawn, inputs["image_grid_thw"].tolist(), strict=True):
            for cell in range(grid[1] * grid[2] // 4):
                colour, name = things.get(cell, ("", ""))
                targets.append(colours.index(colour) * len(names) + names.index(name) + 1 if name else 0)
        features = torch.cat(model.model.get_image_features(**inputs, return_dict=True).pooler_output)
        loss = torch.nn.functional.cross_entropy(reader(features), torch.tensor(targets))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"tower: step {step} loss {loss.item():.4f}", flush=True)


def fit(
    model: Qwen2VLForConditionalGeneration, tokenizer: Tokens, processor: object, rng: random.Random, steps: int
) -> None:
    """Train the base on descriptions."""
    model.model.visual.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    image, start, end = (tokenizer.convert_tokens_to_ids(VISION[i]) for i in (2, 0, 1))
    for step in range(steps):
        drawn = [draw(rng) for _ in range(48)]
        inputs = processor([picture for picture, _ in drawn], return_tensors="pt")
        rows, labels = [], []
        for (_, things), grid in zip(drawn, inputs["image_grid_thw"].tolist(), strict=True):
            before = [tokenizer.bos_token_id, start, *[image] * (grid[1] * grid[2] // 4), end]
            ids = [*tokenizer(described(rng, things)).input_ids, tokenizer.eos_token_id]
            rows.append(torch.tensor(before + ids))
            labels.append(torch.tensor([-100] * len(before) + ids))
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        target = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0)
        kinds = (input_ids == image).int()
        loss = model(input_ids=input_ids, attention_mask=mask, labels=target, mm_token_type_ids=kinds, **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1, help="part of the recipe: sums depend on it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = train_tokenizer(rng)
    processor = Qwen2VLImageProcessorPil(
        patch_size=14, temporal_patch_size=1, size={"shortest_edge": CELL * CELL, "longest_edge": 16 * CELL * CELL}
    )
    evaluation = [conversation(rng) for _ in range(100)]
    train = [conversation(rng) for _ in range(1000)]
    model = make_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    fit_tower(model, processor, rng, 800)
    fit(model, tokenizer, processor, rng, args.steps)
    model.requires_grad_(True)
    fresh = args.out / "model.new"
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    settings = processor.to_dict()
    (fresh / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    about = {"processor_class": "Qwen2VLProcessor"}
    (fresh / "processor_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(args.out / "model", ignore_errors=True)
    fresh.rename(args.out / "model")
    for name, rows in (("train", train), ("eval", evaluation)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"wrote model/, train.jsonl and eval.jsonl in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
