"""Make everything in this folder: a tiny model that hears sounds, its tokenizer, train.jsonl and eval.jsonl.

    python recipes/tiny-audio/make.py

The base learns to write down the digits that a telephone dials, in plain sentences. It never sees a conversation or
JSON: those are what fine-tuning teaches. The new files are written only if the probe at the end passes. Same --seed,
--threads and library versions, same files.
"""

import argparse
import base64
import io
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast as Tokens
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

RATE = 8000  # Hz of the files; the model hears 16000
SECONDS = 2  # the most
FRAME = 0.08  # seconds of a feature of the language model
# The tones of a telephone's keys (ITU-T Q.23): each is the sum of one of a row and one of a column.
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = "123456789*0#"
DIGITS = "0123456789"
WORDS = "zero one two three four five six seven eight nine".split()
ASKED = "Which number is dialled?"
ROLES = ["<|user|>", "<|assistant|>"]
AUDIO = ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", *ROLES, *AUDIO]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Dialled = list[tuple[str, float, float]]  # each digit, and the seconds at which its tone begins and ends


def dial(rng: random.Random) -> tuple[bytes, Dialled]:
    """Dial three to five digits, in noise. Returns a WAV file with the codec of mobile telephones."""
    dialled: Dialled = []
    at = rng.uniform(0.02, 0.1)
    for _ in range(rng.randint(3, 5)):
        end = at + rng.uniform(0.13, 0.2)
        dialled.append((rng.choice(DIGITS), at, end))
        at = end + rng.uniform(0.08, 0.13)
    sound = np.random.default_rng(rng.getrandbits(32)).normal(size=int(at * RATE)) * rng.uniform(0.002, 0.02)
    level, pitch = rng.uniform(0.1, 0.4), rng.uniform(0.99, 1.01)
    for digit, start, end in dialled:
        row, column = divmod(KEYS.index(digit), 3)
        times = np.arange(int(start * RATE), int(end * RATE)) / RATE
        for frequency in (ROWS[row], COLUMNS[column]):
            sound[int(start * RATE) : int(end * RATE)] += level * np.sin(2 * np.pi * pitch * frequency * times)
    file = io.BytesIO()
    soundfile.write(file, sound, RATE, format="WAV", subtype="GSM610")
    return file.getvalue(), dialled


def described(rng: random.Random, dialled: Dialled) -> str:
    """A plain sentence, in one of several wordings."""
    if rng.random() < 0.5:
        return "I hear " + ", ".join(WORDS[int(digit)] for digit, *_ in dialled) + "."
    return "Keys: " + ", ".join(digit for digit, *_ in dialled) + "."


def answer(dialled: Dialled) -> str:
    """What fine-tuning teaches."""
    return json.dumps({"dialled": [int(digit) for digit, *_ in dialled]})


def conversation(rng: random.Random) -> dict:
    """A row of the data, with its sound in base64."""
    sound, dialled = dial(rng)
    audio = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": ASKED}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer(dialled)}]}


def train_tokenizer(rng: random.Random) -> Tokens:
    """Train a byte-level BPE tokenizer on what the model reads and writes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(2000):
        dialled = dial(rng)[1]
        texts += [described(rng, dialled), answer(dialled), ASKED]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = Tokens(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Tokens) -> Qwen2AudioForConditionalGeneration:
    """Build the model with random weights."""
    ids = tokenizer.get_vocab()
    ends = {"bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|end|>"], "pad_token_id": ids["<|pad|>"]}
    text = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        **ends,
    }
    audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
    audio |= {"num_mel_bins": 80, "max_source_positions": round(SECONDS / FRAME) * 2}
    config = Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_id=ids["<|AUDIO|>"], tie_word_embeddings=True, **ends
    )
    return Qwen2AudioForConditionalGeneration(config)


class Heard:
    """Sounds as inputs of the model."""

    def __init__(self, extractor: WhisperFeatureExtractor, sounds: list[bytes]) -> None:
        decoded = [soundfile.read(io.BytesIO(sound), dtype="float32")[0] for sound in sounds]
        resampled = [soxr.resample(sound, RATE, 2 * RATE) for sound in decoded]
        made = extractor(
            resampled, sampling_rate=2 * RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        self.inputs = {"input_features": made.input_features, "feature_attention_mask": made.attention_mask}
        self.counts = [(((length - 1) // 2 + 1) - 2) // 2 + 1 for length in made.attention_mask.sum(-1).tolist()]


def fit_tower(
    model: Qwen2AudioForConditionalGeneration, extractor: WhisperFeatureExtractor, rng: random.Random, steps: int
) -> None:
    """Teach the tower which tone sounds in each feature. What reads the features is thrown away."""
    reader = torch.nn.Linear(model.config.text_config.hidden_size, len(DIGITS) + 1)
    parts = torch.nn.ModuleList([model.model.audio_tower, model.model.multi_modal_projector])
    optimizer = torch.optim.AdamW([*parts.parameters(), *reader.parameters()], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for step in range(steps):
        sounds = [dial(rng) for _ in range(48)]
        heard = Heard(extractor, [sound for sound, _ in sounds])
        features = parts[1](parts[0](heard.inputs["input_features"]).last_hidden_state)
        targets = torch.zeros(features.shape[:2], dtype=torch.long)
        for i, (_, dialled) in enumerate(sounds):
            for digit, start, end in dialled:
                targets[i, round(start / FRAME) : round(end / FRAME)] = 1 + int(digit)
        loss = torch.nn.functional.cross_entropy(reader(features).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"tower: step {step} loss {loss.item():.4f}", flush=True)


def fit(
    model: Qwen2AudioForConditionalGeneration,
    tokenizer: Tokens,
    extractor: WhisperFeatureExtractor,
    rng: random.Random,
    steps: int,
) -> None:
    """Train the base on plain sentences."""
    model.model.audio_tower.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    start, end, pad = (tokenizer.convert_tokens_to_ids(token) for token in AUDIO)
    for step in range(steps):
        sounds = [dial(rng) for _ in range(48)]
        heard = Heard(extractor, [sound for sound, _ in sounds])
        rows, labels = [], []
        for (_, dialled), count in zip(sounds, heard.counts, strict=True):
            before = [tokenizer.bos_token_id, start, *[pad] * count, end]
            ids = [*tokenizer(described(rng, dialled)).input_ids, tokenizer.eos_token_id]
            rows.append(torch.tensor(before + ids))
            labels.append(torch.tensor([-100] * len(before) + ids))
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        target = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0)
        loss = model(input_ids=input_ids, attention_mask=mask, labels=target, **heard.inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def num_right(
    model: Qwen2AudioForConditionalGeneration,
    tokenizer: Tokens,
    extractor: WhisperFeatureExtractor,
    rng: random.Random,
    num: int,
) -> int:
    """How many of ``num`` new sounds the base writes down right."""
    start, end, pad = (tokenizer.convert_tokens_to_ids(token) for token in AUDIO)
    right = 0
    for _ in range(num):
        sound, dialled = dial(rng)
        heard = Heard(extractor, [sound])
        ids = torch.tensor([[tokenizer.bos_token_id, start, *[pad] * heard.counts[0], end]])
        made = model.generate(input_ids=ids, max_new_tokens=40, do_sample=False, **heard.inputs)[0, ids.shape[1] :]
        text = tokenizer.decode(made, skip_special_tokens=True)
        names = [WORDS.index(each) if each in WORDS else each for each in text.strip(".").replace(",", "").split()[1:]]
        right += [str(name) for name in names if str(name) in DIGITS] == [digit for digit, *_ in dialled]
    return right


def main() -> None:
    """Make the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1, help="part of the recipe: sums depend on it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = train_tokenizer(rng)
    # A frame of 20 ms, of which a feature has four.
    extractor = WhisperFeatureExtractor(feature_size=80, hop_length=320, n_fft=640, chunk_length=SECONDS)
    evaluation = [conversation(rng) for _ in range(100)]
    train = [conversation(rng) for _ in range(500)]
    model = make_model(tokenizer)
    print(f"{model.num_parameters()} parameters, {len(tokenizer)} tokens", flush=True)
    fit_tower(model, extractor, rng, 250)
    fit(model, tokenizer, extractor, rng, args.steps)
    model.requires_grad_(True)
    right = num_right(model.eval(), tokenizer, extractor, rng, 40)
    print(f"{right} of 40 new sounds written down right")
    if right < 36:
        sys.exit("the base does not hear well enough: nothing was written")
    fresh = args.out / "model.new"
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    extractor.save_pretrained(fresh)
    about = {"processor_class": "Qwen2AudioProcessor"}
    (fresh / "processor_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(args.out / "model", ignore_errors=True)
    fresh.rename(args.out / "model")
    for name, rows in (("train", train), ("eval", evaluation)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"wrote model/, train.jsonl and eval.jsonl in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
