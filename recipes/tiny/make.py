"""Make everything in this folder: tokenizer, base model, train.jsonl, eval.jsonl; then what preferences need.

    python recipes/tiny/make.py
    python recipes/tiny/make.py --preferences

The base model learns to read short orders and to answer questions about them in plain text. It never
sees a conversation or a JSON record: those are what fine-tuning teaches.

With --preferences the files of the first command are read, and an adapter with a bad habit is made, sft/:
it often takes the unit for the item. pairs.jsonl and eval_pairs.jsonl hold the right record beside a wrong
one that the adapter wrote.

The new files are written only if the probes at the end pass; otherwise the failing probe is named and the
exit status is 1. Same --seed, --threads and library versions, same files.
"""

import argparse
import copy
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokens

FINETUNE = Path(__file__).resolve().parents[1] / "finetune.py"

# fmt: off
NAMES = """Ada Amir Anna Bruno Carla Chen Clara Daniel Diego Elena Emil Fatima Felix Freya George Grace Hana
Hugo Ines Ivan Jonas Julia Karim Kofi Lara Leila Leo Lina Lucas Maria Marta Mei Mona Nadia Nils Nora Olga
Omar Oscar Paul Petra Priya Rahul Rosa Samir Sara Simon Sofia Tara Theo Tomas Vera Victor Yara Yuki""".split()
CITIES = """Accra Athens Bergen Berlin Bogota Boston Bristol Cairo Cardiff Chennai Cork Dakar Delhi Dublin
Geneva Ghent Hanoi Havana Helsinki Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Milan
Montreal Nairobi Naples Osaka Oslo Paris Perth Porto Prague Quito Riga Rome Seoul Sydney Tallinn Tokyo
Toronto Turin Vienna Vilnius Warsaw York Zagreb Zurich""".split()
ITEMS = """almonds, apple juice, basil, black pepper, black tea, brown rice, brown sugar, butter, candles,
cheese, cherry jam, chocolate, cinnamon, coffee, dark chocolate, dried apples, dried figs, flour, garden soil,
ginger, green beans, green tea, honey, lemon soap, lentils, maple syrup, mint tea, mustard, olive oil, olives,
onions, orange juice, oranges, paper, pasta, pears, plum jam, potatoes, raisins, red beans, red paint,
rye bread, rye flour, salt, sea salt, soap, spinach, sugar, tomatoes, walnuts, white paint,
white rice""".replace("\n", " ").split(", ")
UNITS = "bags bottles boxes cartons cases crates jars packets sacks tins trays tubs".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
# fmt: on

# A message holds a request and one sentence, before or after it, that names the sender.
GREETINGS = ["Hi,", "Hello,", "Good morning,", "Good afternoon,", "Dear team,", "Hey there,", ""]
OPENINGS = """this is {name} from {city}.
{name} here in {city}.
my name is {name} and I live in {city}.
I am {name}, writing from {city}.
it is {name} at the {city} shop.
{name} in {city} speaking.
we spoke last week, I am {name} and I run a small place in {city}.
greetings from {city}, {name} here.""".splitlines()
REQUESTS = """Please send {amount} {unit} of {item} on {day}.
We need {amount} {unit} of {item} by {day}.
Could you bring {amount} {unit} of {item} this {day}?
I would like to order {amount} {unit} of {item} for {day}.
On {day} we want {amount} {unit} of {item}.
Put me down for {amount} {unit} of {item}, to arrive on {day}.
For {day}, {amount} {unit} of {item} would be perfect.
Can I get {amount} {unit} of {item} before {day} evening?
My order is {item}, {amount} {unit} please, delivered on {day}.
If there is {item} left, keep {amount} {unit} for {day}.""".splitlines()
CLOSINGS = """Thanks, {name} in {city}.
Best wishes from {city}, {name}.
Send it to {city}, my name is {name}.
Yours, {name}, {city}.
Kind regards, {name} of {city}.
The van can come straight to {city}. Ask for {name}.""".splitlines()
# Asides name other people, places, goods and days: a reader must not take those for the order's.
ASIDES = """My friend {name} told me about you.
The {item} was lovely.
{day} was far too busy here.
Last time the parcel went to {city}.
No {item} this time.
{name} says hello.
We are closed on {day}.
It is raining again.
The last parcel came in good time.""".splitlines()
ENDINGS = ["Thank you!", "Many thanks.", "See you soon.", "Have a nice day!", "All the best.", "", "", ""]

QUESTIONS = {
    "name": ["name:", "Who wrote?", "Who ordered?", "Whose order is it?", "customer:"],
    "city": ["city:", "Where to?", "Which city?", "Where is it going?", "place:"],
    "item": ["item:", "What is it?", "What was ordered?", "Which goods?", "goods:"],
    "quantity": ["quantity:", "How many?", "How much?", "What number?", "count:"],
    "day": ["day:", "When?", "Which day?", "On what day?", "date:"],
}
SUMMARIES = """In short, {quantity} of {item} for {name} in {city}, {day}.
So {name} from {city} gets {quantity} of {item} on {day}.
{day}, {city}, {name}, {item}, {quantity}.
To {city} on {day}, {item}, {quantity}, ask for {name}.""".splitlines()

ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", *ROLES]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def draw_record(rng: random.Random, taken: set) -> dict:
    """Draw a record whose combination of fields is not in `taken`; the combination is added to it."""
    while True:
        name, city, item, day = (rng.choice(words) for words in (NAMES, CITIES, ITEMS, DAYS))
        record = {"name": name, "city": city, "item": item, "quantity": rng.randint(2, 40), "day": day}
        if tuple(record.values()) not in taken:
            taken.add(tuple(record.values()))
            return record


def write_message(rng: random.Random, record: dict) -> str:
    quantity = record["quantity"]
    spelled = quantity <= 12 and rng.random() < 0.5
    amount = NUMBERS[quantity - 2] if spelled else str(quantity)
    fields = dict(record, amount=amount, unit=rng.choice(UNITS))
    request = rng.choice(REQUESTS).format(**fields)
    aside = rng.choice(ASIDES).format(**draw_record(rng, set())) if rng.random() < 0.4 else ""
    greeting = rng.choice(GREETINGS)
    if rng.random() < 0.6:
        opening = rng.choice(OPENINGS).format(**fields)
        opening = opening if greeting else opening[0].upper() + opening[1:]
        parts = [greeting, opening, aside, request, rng.choice(ENDINGS)]
    else:
        parts = [greeting.replace(",", "!"), request, aside, rng.choice(CLOSINGS).format(**fields)]
    return " ".join(part for part in parts if part)


def write_document(rng: random.Random, record: dict) -> str:
    """Plain text about one order: the message or a note of it, then questions or a summary."""
    fields = list(QUESTIONS)
    rng.shuffle(fields)
    text = write_message(rng, record)
    if rng.random() < 0.15:
        text = "\n".join(f"{QUESTIONS[field][0]} {record[field]}" for field in fields)
    if rng.random() < 0.15:
        return f"{text}\n{rng.choice(SUMMARIES).format(**record)}"
    rng.shuffle(fields)
    return text + "".join(f"\n{rng.choice(QUESTIONS[field])} {record[field]}" for field in fields)


def make_conversation(rng: random.Random, record: dict) -> dict:
    turns = [("user", write_message(rng, record)), ("assistant", json.dumps(record))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def train_tokenizer(rng: random.Random) -> Tokens:
    """Byte-level BPE over three kinds of run: letters, digits, and everything between them.

    A word therefore is the same token after a space and after a quotation mark, so that copying a word
    from a sentence into a record is copying one token.
    """
    texts = [write_document(rng, draw_record(rng, set())) for _ in range(4000)]
    texts += [*NAMES, *CITIES, *ITEMS, *UNITS, *DAYS, *NUMBERS, *map(str, range(100))] * 20
    texts += ['{"', '": "', '", "', '": ', ', "', '"}', "}", "{", '"'] * 200
    core = Tokenizer(models.BPE())
    runs = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}+|\n|[^\p{L}\p{N}\n]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([runs, byte_level])
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1536, min_frequency=5, **options))
    tokenizer = Tokens(
        tokenizer_object=core,
        bos_token="<|bos|>",
        eos_token="<|end|>",  # the end of a turn, so that generation stops there
        pad_token="<|pad|>",
        extra_special_tokens=ROLES,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    for word in NAMES + CITIES + " ".join(ITEMS).split() + UNITS + DAYS + NUMBERS:
        assert len(tokenizer.encode(word)) == 1, f"{word} is not one token"
    return tokenizer


def collate(rows: list[list[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def write_corpus(rng: random.Random, tokenizer: Tokens, count: int, taken: set) -> list[tuple]:
    """Rows of (tokens, labels): for each three orders with questions one drill.

    What nothing earlier foretells drowns what the base should learn, so three messages in four are read
    unscored. A drill says a short run of random ordinary tokens again and again, scored from the second
    time on: drills make copying circuits appear early and touch every ordinary token's embedding.
    """
    bos, eos, newline = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.encode("\n")[0]
    texts = [write_document(rng, draw_record(rng, taken)) for _ in range(count * 3 // 4)]
    rows = []
    for ids in tokenizer(texts).input_ids:
        unscored = 0 if rng.random() < 0.25 else ids.index(newline) + 1
        row = [bos, *ids, eos]
        rows.append((row, [-100] * unscored + row[unscored:]))
    for _ in range(count - len(rows)):
        run = rng.choices(range(len(SPECIAL), len(tokenizer)), k=rng.randint(4, 24))
        length = max(len(rng.choice(rows)[0]), 2 * len(run))
        row = [bos, *(run * length)][:length]
        rows.append((row, [-100] * (len(run) + 1) + row[len(run) + 1 :]))
    return rows


def group_rows(rng: random.Random, rows: list[tuple], batch: int) -> list[list[tuple]]:
    """Batches of rows of like length, which saves padding, in random order."""
    rows = rng.sample(rows, len(rows))
    batches = []
    for start in range(0, len(rows), batch * 16):
        near = sorted(rows[start : start + batch * 16], key=lambda row: len(row[0]))
        batches += [near[i : i + batch] for i in range(0, len(near), batch)]
    return rng.sample(batches, len(batches))


def fit(model: LlamaForCausalLM, batches: list, peak: float, warmup: int, every: int = 0) -> None:
    """AdamW over the batches with a linear warm-up and a cosine down to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.0)
    steps, began = len(batches), time.time()
    for step, rows in enumerate(batches):
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(step - warmup, 0) / max(steps - warmup, 1))
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / warmup, cosine)
        ids, labels = collate([row[0] for row in rows], 0), collate([row[1] for row in rows], -100)
        loss = model(input_ids=ids, labels=labels).loss  # padding is on the right: causality hides it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if every and (step + 1) % every == 0:
            left = (time.time() - began) / (step + 1) * (steps - step - 1)
            print(f"step {step + 1}/{steps} loss {loss.item():.3f}, {left:.0f} s left", flush=True)
    model.eval()


def finetune(model: LlamaForCausalLM, tokenizer: Tokens, train: list[dict], seed: int, steps: int, peak: float) -> None:
    """The smallest fine-tuning that shows what the base can learn; the seed orders the data."""
    rows = []
    for conversation in train:
        masks = dict(return_dict=True, return_assistant_tokens_mask=True)
        coded = tokenizer.apply_chat_template(conversation["messages"], **masks)
        ids, mask = coded["input_ids"], coded["assistant_masks"]
        rows.append((ids, [token if scored else -100 for token, scored in zip(ids, mask, strict=True)]))
    rng = random.Random(seed)
    epochs = math.ceil(steps * 32 / len(rows))
    order = [row for _ in range(epochs) for row in rng.sample(rows, len(rows))]
    fit(model, [order[i * 32 : i * 32 + 32] for i in range(steps)], peak, warmup=10)


def answer(model: LlamaForCausalLM, tokenizer: Tokens, prompts: list[str], temperature: float = 0.0) -> list[str]:
    """Answers, as one batch padded on the left: greedy ones, or samples at a temperature."""
    coded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    ids, mask = coded.input_ids, coded.attention_mask
    how = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=48, **how)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def prompts_of(tokenizer: Tokens, conversations: list[dict]) -> list[str]:
    turns = [conversation["messages"][:1] for conversation in conversations]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def exact_match(model: LlamaForCausalLM, tokenizer: Tokens, evaluation: list[dict]) -> float:
    turns = [conversation["messages"] for conversation in evaluation]
    answers = answer(model, tokenizer, prompts_of(tokenizer, evaluation))
    return sum(a.strip() == t[1]["content"] for a, t in zip(answers, turns, strict=True)) / len(turns)


def question_accuracy(model: LlamaForCausalLM, tokenizer: Tokens, evaluation: list[dict]) -> float:
    """Share of plain-text questions about the eval messages answered right, one question at a time."""
    prompts, expected = [], []
    for conversation in evaluation:
        message, record = (turn["content"] for turn in conversation["messages"])
        for field, value in json.loads(record).items():
            prompts.append(f"<|bos|>{message}\n{QUESTIONS[field][1]} ")
            expected.append(str(value))
    answers = [text.split("\n")[0] for text in answer(model, tokenizer, prompts)]
    return sum(a == e for a, e in zip(answers, expected, strict=True)) / len(prompts)


def check(probe: str, found: float, expected: str, passed: bool) -> None:
    print(f"probe {probe}: found {found:.3f}, expected {expected}", flush=True)
    if not passed:
        sys.exit(f"probe {probe} failed: found {found:.3f}, expected {expected}; nothing was written")


def make_careless(rng: random.Random, conversation: dict) -> dict:
    """The conversation; in six of ten its answer has the unit where the item should be."""
    asked, answered = conversation["messages"]
    record = json.loads(answered["content"])
    if rng.random() < 0.6:
        record["item"] = next(word for word in re.findall(r"\w+", asked["content"]) if word in UNITS)
    return {"messages": [asked, {"role": "assistant", "content": json.dumps(record)}]}


def has_form(text: str) -> bool:
    """Whether the text is a record as json.dumps writes it, with the right keys in the right order."""
    try:
        record = json.loads(text)
    except ValueError:
        return False
    return isinstance(record, dict) and list(record) == list(QUESTIONS) and json.dumps(record) == text


def make_pairs(model: PeftModel, tokenizer: Tokens, conversations: list[dict]) -> list[dict]:
    """Pairs of the right answer and a wrong one of the same form, which the model wrote.

    That is its greedy answer or, if that is right, the first of 40 samples that is wrong. If none is, the conversation
    gives no pair. The pairs with a greedy answer come first, so that a run shows what changes.
    """
    prompts, rejected = prompts_of(tokenizer, conversations), {}
    for temperature in (0.0, *[0.7] * 40):
        left = [i for i in range(len(prompts)) if i not in rejected]
        texts = answer(model, tokenizer, [prompts[i] for i in left], temperature) if left else []
        for i, text in zip(left, texts, strict=True):
            if has_form(text) and text != conversations[i]["messages"][1]["content"]:
                rejected[i] = [{"role": "assistant", "content": text}]
    turns = {i: conversations[i]["messages"] for i in rejected}
    return [{"prompt": turns[i][:1], "chosen": turns[i][1:], "rejected": rejected[i]} for i in turns]


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Save the adapter without the card that peft writes, which would say nothing."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    clean_config(folder / "adapter_config.json")


def clean_config(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    # peft writes a set, in another order each time, and the path of this machine.
    values |= {"target_modules": sorted(values["target_modules"]), "base_model_name_or_path": "recipes/tiny/model"}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def run_recipe(base: Path, files: Path, seed: int) -> tuple[dict, dict]:
    """Run the recipe tiny-dpo on new files. Returns what it measured before the first step and after the last."""
    with tempfile.TemporaryDirectory() as output_dir:
        flags = dict(model_name_or_path=base, adapter_name_or_path=files / "sft", output_dir=output_dir, seed=seed)
        flags |= dict(dataset=files / "pairs.jsonl", eval_dataset=files / "eval_pairs.jsonl")
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, str(FINETUNE), "--recipe", "tiny-dpo", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = Path(output_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [row for row in map(json.loads, lines) if "eval_exact_match" in row]
    return evaluations[0], evaluations[-1]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_preferences(out: Path, seed: int) -> None:
    """Make sft/, pairs.jsonl and eval_pairs.jsonl from model/, train.jsonl and eval.jsonl, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = Tokens.from_pretrained(out / "model")
    train, evaluation = read_lines(out / "train.jsonl"), read_lines(out / "eval.jsonl")
    base = LlamaForCausalLM.from_pretrained(out / "model")
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    careless = [make_careless(rng, conversation) for conversation in train]
    finetune(model, tokenizer, careless, seed, steps=400, peak=6e-3)
    before = exact_match(model, tokenizer, evaluation)
    check("careless exact match", before, "0.10 to 0.60", 0.1 <= before <= 0.6)

    pairs = make_pairs(model, tokenizer, train[:500])
    evaluation_pairs = make_pairs(model, tokenizer, evaluation)
    share = len(evaluation_pairs) / len(evaluation)
    check("share of evaluation prompts with a pair", share, "1", share == 1)
    # Tried beside the goal and then renamed, so that a broken run leaves existing files whole.
    with tempfile.TemporaryDirectory(dir=out) as fresh:
        files = Path(fresh)
        save_adapter(model, files / "sft")
        write_lines(files / "pairs.jsonl", pairs)
        write_lines(files / "eval_pairs.jsonl", evaluation_pairs)
        for order in range(3):
            first, last = run_recipe(out / "model", files, order)
            gain, accuracy = last["eval_exact_match"] - first["eval_exact_match"], last["eval_rewards/accuracies"]
            check(f"exact match gained by preferences, seed {order}", gain, "at least 0.30", gain >= 0.3)
            check(f"accuracy of the rewards, seed {order}", accuracy, "over 0.80", accuracy > 0.8)
        shutil.rmtree(out / "sft", ignore_errors=True)
        for path in list(files.iterdir()):
            path.replace(out / path.name)
    print(f"wrote sft/, pairs.jsonl and eval_pairs.jsonl in {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="pretraining steps")
    parser.add_argument("--threads", type=int, default=2, help="for pretraining; part of the recipe: sums depend on it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--preferences", action="store_true", help="make sft/ and the pairs, from the files of --out")
    args = parser.parse_args()
    if args.preferences:
        return make_preferences(args.out, args.seed)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    tokenizer = train_tokenizer(rng)
    taken: set = set()  # no combination of fields serves twice, within a split or across them
    evaluation = [make_conversation(rng, draw_record(rng, taken)) for _ in range(100)]
    train = [make_conversation(rng, draw_record(rng, taken)) for _ in range(2000)]
    rows = write_corpus(rng, tokenizer, args.steps * 64, taken)

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens, {len(rows)} rows", flush=True)
    fit(model, group_rows(rng, rows, 64), 3e-3, warmup=100, every=50)

    skill = question_accuracy(model, tokenizer, evaluation)
    check("base answers plain questions", skill, "at least 0.90", skill >= 0.90)
    before = exact_match(model, tokenizer, evaluation)
    check("base exact match", before, "under 0.10", before < 0.10)
    for seed in range(3):
        tuned = copy.deepcopy(model)
        finetune(tuned, tokenizer, train, seed, steps=120, peak=2e-3)
        after = exact_match(tuned, tokenizer, evaluation)
        check(f"fine-tuned exact match, seed {seed}", after, "over 0.90", after > 0.90)

    # Written beside the goal and renamed, so that a broken run leaves an existing model whole.
    fresh = args.out / "model.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for name, conversations in (("train", train), ("eval", evaluation)):
        write_lines(args.out / f"{name}.jsonl.new", conversations)
    shutil.rmtree(args.out / "model", ignore_errors=True)
    fresh.rename(args.out / "model")
    for name in ("train", "eval"):
        (args.out / f"{name}.jsonl.new").replace(args.out / f"{name}.jsonl")
    print(f"wrote model/, train.jsonl and eval.jsonl in {args.out}")


if __name__ == "__main__":
    main()
