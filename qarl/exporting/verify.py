"""Check that an export is the run's policy: compare its codes, and its results in the programs that read it.

    codes          compressed-tensors unpacks the files to the codes and scales of the run, and configuration and
                   tokenizer equal the record in qarl_export.json
    qarl           the native engine: on the CPU the same tokens and bit-identical log-probs
    transformers   greedy text and log-probs; its INT8 activations have the scale absmax / 127.5, here absmax / 127
    vllm           greedy text and log-probs, with vLLM's own kernels

Every reader scores the reference's greedy responses, so that one different token does not make the rest incomparable.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from qarl.config import QuantConfig
from qarl.config.quant import scheme_of
from qarl.errors import UserError
from qarl.exporting.readers import (
    Reading,
    Unsupported,
    fault_of_experts,
    greedy,
    read_native,
    read_transformers,
    read_vllm,
    release_memory,
)
from qarl.inference.export_record import read_export_record
from qarl.inference.opening import open_policy
from qarl.inference.target import Target
from qarl.inputs.json import read_json_object, strict
from qarl.inputs.tensors import OpenTensors, stored_tensors
from qarl.policy.skeleton import linear_names
from qarl.storage.disk import write_json
from qarl.storage.runs import read_records
from qarl.types import Prompt
from qarl.utils.expert_names import experts_of
from qarl.utils.packed_linears import fusion_fault
from qarl.weight_sync.snapshot import Snapshot

MAX_TOKENS = 24
PROMPTS = ("The capital of France is", "2 + 2 =", "Once upon a time, there was", "def add(a, b):\n    return")


@dataclass(frozen=True)
class Agreement:
    """Comparison of one reader with the run's policy. Differences of log-probs are in nats."""

    reader: str
    status: Literal["agrees", "differs", "skipped", "failed"]
    reason: str = ""
    version: str = ""
    prompts: int = 0
    same_text: int = 0  # greedy responses with the same tokens
    tokens: int = 0  # compared tokens: those of the reference's responses
    likeliest: int = 0  # how many of these the reader also finds most likely
    delta_abs_mean: float | None = None
    delta_abs_max: float | None = None
    bound: float | None = None  # on delta_abs_mean

    def line(self) -> str:
        """Return one line for the console."""
        name = f"{self.reader} {self.version}".strip()
        if self.delta_abs_mean is None:
            return f"{name}: {self.status}" + (f" ({self.reason})" if self.reason else "")
        found = (
            f"{self.same_text} of {self.prompts} greedy texts, {self.likeliest} of {self.tokens} tokens the same; "
            f"|delta log-prob| mean {self.delta_abs_mean:.2g} (bound {self.bound:g}), max "
            f"{self.delta_abs_max:.2g}"
        )
        return f"{name}: {self.status}: {found}" + (f"; {self.reason}" if self.reason else "")


def verify_export(target: Target, out: Path, *, device: str = "auto", say: Callable[[str], None]) -> dict[str, Any]:
    """Compare the checkpoint in `out` with the policy of `target`, and write `out`/verification.json.

    Args:
        target: The run, or the model that was quantized.
        out: The exported directory.
        device: auto, cpu or cuda.
        say: Called with one line per reader.

    Returns:
        Contents of verification.json. `ok` is False if a reader failed or differs.

    Raises:
        UserError: The target itself cannot be opened.
    """
    stored = read_json_object(out / "config.json", nonfinite=True)
    if "quantization_config" not in stored:
        target = replace(target, quant=QuantConfig(scheme="bf16"))
    # An export does not name a KV cache dtype, so every reader uses 16 bits.
    target = replace(target, quant=target.quant.model_copy(update={"kv_cache_dtype": "auto"}))
    opened = open_policy(target, device=device)
    prompts = [
        Prompt(index, opened.tokenizer(text)["input_ids"], text) for index, text in enumerate(_prompt_texts(target))
    ]
    found = [_codes(opened.policy.current, out)]
    say(found[0].line())
    reference = greedy(opened, prompts, MAX_TOKENS)
    exact, where, dtype = opened.policy.device.type == "cpu", opened.policy.device, stored["dtype"]
    texts = [str(opened.tokenizer.decode(ids, skip_special_tokens=True)) for ids in reference.token_ids]
    weights = opened.policy.current.weights
    shapes = {weight.shape for weight in weights.values()}
    mixed = any(experts_of(name.rpartition(".")[0]) for name in weights)
    scheme, model = scheme_of(target.quant), opened.policy.model
    rows: dict[str, Any] = {name: model.get_submodule(name).out_features for name in linear_names(model)}
    fault = fault_of_experts(stored["quantization_config"], rows) if scheme.quantized else None
    unfused = fusion_fault(scheme, target.quant.ignore, rows)
    opened.close()
    del opened, model
    release_memory()
    responses = reference.token_ids
    fault = next(filter(None, (fault, *(scheme.library_fault(*shape) for shape in sorted(shapes)))), None)
    readers: list[tuple[str, str | None, Callable[[], Reading]]] = [
        ("qarl", None, lambda: read_native(out, prompts, MAX_TOKENS, device)),
        ("transformers", fault, lambda: read_transformers(out, prompts, responses, MAX_TOKENS, where)),
        (
            "vllm",
            unfused and unfused[1],
            lambda: read_vllm(out, prompts, responses, MAX_TOKENS, dtype, mixed, out / "vllm.log"),
        ),
    ]
    for name, unreadable, read in readers:
        try:
            if unreadable is not None:
                raise Unsupported(unreadable)
            found.append(compare(name, reference, read(), 0.0 if name == "qarl" and exact else scheme.tolerance))
        except Unsupported as why:
            found.append(Agreement(name, "skipped", str(why)))
        except (UserError, ValueError, RuntimeError, OSError, ImportError, StrictDataclassError) as error:
            found.append(Agreement(name, "failed", " ".join(str(error).split())[:400]))
        say(found[-1].line())
    record = {
        "ok": all(a.status in ("agrees", "skipped") for a in found),
        "target": target.label,
        "max_tokens": MAX_TOKENS,
        "greedy": [{"prompt": p.text, "response": text} for p, text in zip(prompts, texts, strict=True)],
        "readers": [asdict(agreement) for agreement in found],
    }
    write_json(out / "verification.json", strict(record), "OUT")
    return record


def compare(name: str, reference: Reading, reading: Reading, bound: float) -> Agreement:
    """Compare a reader with the reference. A response that only lacks the final stop token is the same text."""
    deltas = (
        [
            abs(theirs - ours)
            for pair in zip(reading.logprobs, reference.logprobs, strict=True)
            for theirs, ours in zip(*pair, strict=True)
        ]
        if reading.logprobs and list(map(len, reading.logprobs)) == list(map(len, reference.logprobs))
        else []
    )
    same = sum(
        theirs == ours or theirs == ours[:-1]
        for theirs, ours in zip(reading.token_ids, reference.token_ids, strict=True)
    )
    count = len(reference.token_ids)
    if not deltas:  # the native reader scores its own responses, so other lengths mean other texts
        return Agreement(name, "differs", "responses of other lengths", reading.version, count, same)
    mean = sum(deltas) / len(deltas)
    good = mean <= bound and (bound > 0 or same == count)  # false for NaN
    return Agreement(
        name,
        "agrees" if good else "differs",
        reading.note,
        reading.version,
        count,
        same,
        len(deltas),
        reading.likeliest,
        mean,
        max(deltas),
        bound,
    )


def _codes(snapshot: Snapshot, out: Path) -> Agreement:
    """Compare every tensor, as compressed-tensors unpacks it, with the run's; other files with qarl_export.json."""
    import compressed_tensors

    files = OpenTensors(stored_tensors(out))
    version = compressed_tensors.__version__
    for module, weight in snapshot.weights.items():
        names = {suffix: f"{module}.{suffix}" for suffix in (*weight.tensors, "weight")}
        if names["weight_scale"] not in files:
            return Agreement("codes", "differs", f"{module}: not in the files", version)
        stored = {suffix: files[name] for suffix, name in names.items() if name in files}
        codes = weight.scheme.library_codes(stored, weight.shape)
        same = torch.equal(codes.view(torch.int8), weight.codes().cpu().view(torch.int8))
        rest = stored.keys() - {"weight", "weight_packed"}
        if not same or any(not torch.equal(stored[suffix], weight.tensors[suffix].cpu()) for suffix in rest):
            return Agreement("codes", "differs", f"{module}: codes or scales are not those of the run", version)
    quantized = {f"{m}.{s}" for m, w in snapshot.weights.items() for s in w.tensors}
    for name, tensor in snapshot.tensors.items():
        if name not in quantized and (name not in files or not torch.equal(files[name], tensor.cpu())):
            return Agreement("codes", "differs", f"{name}: not the run's", version)
    if (record := read_export_record(out)) is not None:
        try:
            record.check_documents()
            record.check_names(stored_tensors(out))
        except UserError as error:
            return Agreement("codes", "differs", str(error), version)
    unpacked = f"{len(snapshot.weights)} layers as compressed-tensors unpacks them, {len(snapshot.tensors)} tensors"
    return Agreement("codes", "agrees", unpacked, version)


def _prompt_texts(target: Target) -> Sequence[str]:
    """Return up to four prompts of the run's latest recorded rollouts, then four fixed ones."""
    recorded: list[str] = []
    if target.run_dir is not None:
        latest = max((target.run_dir / "rollouts").glob("*.jsonl"), default=None)
        rows = [] if latest is None else read_records(latest)[0]
        prompts = (row.get("prompt") for row in rows)
        recorded = list(dict.fromkeys(text for text in prompts if isinstance(text, str) and text))
    return [*recorded[:4], *PROMPTS]
