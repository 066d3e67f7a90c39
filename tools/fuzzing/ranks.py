"""Two ranks of one run, the second of which finds another file at the same path, as on a second machine."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from fuzzing.base import RUN, Base, lay_out
from fuzzing.case import Case
from fuzzing.tensorfiles import read_tensors, write_tensors


def mutate_ranks(rng: random.Random, base: Base, case: Case) -> None:
    """Lay out two ranks of a training run. A tenth of the cases change nothing, and must train."""
    lay_out(base, case, "model", "data", "reward", "objective")
    config = base.config(
        model={"path": "model"},
        data={"source": "rows.jsonl", "columns": {"prompt": "question"}},
        reward={"functions": [{"name": "reward.py:f"}]},
        objective={"name": "custom", "path": "objective.py:f"},
        train={"run_dir": str(case.cwd / RUN)},
        distributed={"timeout_s": 30},
    )
    del config["data"]["task"]
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(config))
    case.second_rank = case.directory / "second"
    shutil.copytree(case.cwd, case.second_rank)
    case.argv = ["train", "c.yaml"]
    if rng.random() < 0.1:
        case.mutation = "ranks: nothing differs"
        case.examine = _trained
        return
    kind = rng.choice(list(_CHANGES))
    case.mutation = f"ranks {kind}: {_CHANGES[kind](rng, case.second_rank)}"
    case.must_refuse = True


def _trained(cwd: Path) -> str | None:
    return None if (cwd / RUN / "metrics.jsonl").is_file() else "ranks with the same inputs did not train"


def _reward(rng: random.Random, place: Path) -> str:
    modulus = rng.randrange(4, 50)
    path = place / "reward.py"
    path.write_text(path.read_text().replace("% 3", f"% {modulus}"))
    return f"length modulo {modulus}"


def _objective(rng: random.Random, place: Path) -> str:
    factor = rng.uniform(1.1, 9.0)
    path = place / "objective.py"
    path.write_text(path.read_text().replace("inputs.token_advantages *", f"{factor} * inputs.token_advantages *"))
    return f"times {factor}"


def _row(rng: random.Random, place: Path) -> str:
    lines = (place / "rows.jsonl").read_text().splitlines()
    index, column = rng.randrange(len(lines)), rng.choice(("question", "answer"))
    lines[index] = json.dumps({**json.loads(lines[index]), column: str(rng.randrange(100, 1000))})
    (place / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return f"{column} of row {index}"


def _weight(rng: random.Random, place: Path) -> str:
    tensors = read_tensors(place / "model/model.safetensors")
    name = rng.choice(sorted(tensors))
    data = bytearray(tensors[name].data)
    bit = 32 * rng.randrange(len(data) // 4) + rng.randrange(23)  # of a mantissa, so that it stays finite
    data[bit // 8] ^= 1 << bit % 8
    tensors[name].data = bytes(data)
    write_tensors(place / "model/model.safetensors", tensors)
    return f"bit {bit} of {name}"


def _value(document: str, values: dict[str, Callable[[random.Random], object]]) -> Callable[[random.Random, Path], str]:
    def change(rng: random.Random, place: Path) -> str:
        path = place / "model" / document
        key = rng.choice(sorted(values))
        value = values[key](rng)
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        return f"{key} {value}"

    return change


def _template(rng: random.Random, place: Path) -> str:
    path = place / "model/chat_template.jinja"
    word = f"word{rng.randrange(10**6)}"
    path.write_text(path.read_text() + word)
    return f"ends with {word}"


_CHANGES: dict[str, Callable[[random.Random, Path], str]] = {
    "reward": _reward,
    "objective": _objective,
    "row": _row,
    "weight": _weight,
    "template": _template,
    "generation config": _value("generation_config.json", {"eos_token_id": lambda rng: [1, rng.randrange(3, 259)]}),
    "config": _value(
        "config.json",
        {
            "rms_norm_eps": lambda rng: rng.uniform(1e-5, 1e-3),
            "rope_parameters": lambda rng: {"rope_type": "default", "rope_theta": rng.uniform(2e4, 1e6)},
            "num_attention_heads": lambda rng: 8,
            "tie_word_embeddings": lambda rng: False,
        },
    ),
}
