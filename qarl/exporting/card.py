"""README.md of an exported checkpoint: what it is, how it was trained, how to load it. Does not import torch."""

import json
from collections.abc import Sequence
from pathlib import Path

from qarl_formats.scheme import Scheme

from qarl.config.model import PREFIX
from qarl.config.yaml_io import dump_yaml
from qarl.exporting.training import EVALUATION_HEAD, SUPERVISED, evaluations_of, training_facts
from qarl.inference.export_record import Prompting
from qarl.inference.target import Target
from qarl.storage.runs import read_run
from qarl.utils.versions import VERSION

_LOADING = """\
## Use

In the directory of this file:

```sh
vllm serve .{options}
```
"""
_TRANSFORMERS = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""

_METHODS = {  # by `quant.init`
    "rtn": "quantized by rounding to nearest, without training: a baseline",
    "gptq": "quantized with GPTQ, without training",
    "awq": "quantized with AWQ, without training; its norms differ from the base model's",
}
_SERVING = {  # by `Prompting.chat_template`
    True: "`qarl generate` and `qarl eval` prompt it that way. In vLLM, use the chat completions API.\n",
    False: (
        "`qarl generate` and `qarl eval` prompt it that way. In vLLM, use the completions API: the chat completions "
        "API would put prompts in the tokenizer's chat template, which the run did not train with.\n"
    ),
}


def model_card(
    target: Target,
    scheme: Scheme,
    dtype: str,
    file_format: str | None,
    tensor_bytes: int,
    bf16_bytes: int,
    fault: str | None = None,
) -> str:
    """Return the model card. Raises UserError if the run's records cannot be read.

    Args:
        target: The exported run or model.
        scheme: Scheme of the export.
        dtype: Dtype of unquantized tensors.
        file_format: Name of the format in compressed-tensors; None for bf16.
        tensor_bytes: Bytes of the exported tensors.
        bf16_bytes: Bytes of the same model in bfloat16.
        fault: Why transformers 5 cannot load the export; None if it can.
    """
    base = _base_name(target)
    training: list[tuple[str, str]] = []
    evaluations: list[tuple[str, ...]] = []
    title = f"{base}-{scheme.name}"
    if target.run is not None and target.run_dir is not None and target.step is not None:
        record = read_run(target.run_dir)
        training = training_facts(target.run, record.metrics, target.step)
        evaluations = evaluations_of(record, target.step, target.quant)
        title = f"{target.run_dir.resolve().name}-{scheme.name}"
    weights = _weights(target, scheme, dtype, file_format, tensor_bytes, bf16_bytes)
    parts = [
        _front_matter(target, scheme),
        f"# {_inline(title)}\n",
        _summary(target, scheme, _inline(base)),
        "## Weights\n",
        _table(weights),
    ]
    if training:
        parts += ["## Training\n", _table([("Base model", base), *training])]
    if evaluations:
        parts += [
            "## Evaluation\n",
            "Means over prompts, with their 95% confidence intervals.\n",
            _table(evaluations, EVALUATION_HEAD),
        ]
    if target.prompting is not None:
        parts += [
            "## Prompts\n",
            _table(_prompts(target.prompting)),
            _SERVING[target.prompting.chat_template],
        ]
    fp8 = target.quant.kv_cache_dtype == "fp8"
    parts.append(_LOADING.format(options=" --kv-cache-dtype fp8" if fp8 else ""))
    parts.append(_TRANSFORMERS if fault is None else f"transformers 5 cannot load it: {fault}.\n")
    if fp8:
        parts.append(
            "It was trained with a KV cache of FP8 (e4m3, scale 1), which `--kv-cache-dtype fp8` gives it in vLLM; "
            "transformers keeps keys and values in 16 bits.\n"
        )
    if scheme.quantized and fault is None:
        rounded = "" if scheme.scale_dtype == dtype else f", with their scales rounded to {dtype}"
        parts.append(f"transformers needs the `compressed-tensors` package; it dequantizes the weights{rounded}.\n")
    oldest = "" if fault is not None else f", transformers {_oldest_transformers(scheme)}"
    parts.append(f"Oldest readers: vLLM 0.24{oldest}.\n")
    parts.append("`qarl_export.json` lists where the tensors come from, with a SHA-256 of each.\n")
    return "\n".join(parts)


def _oldest_transformers(scheme: Scheme) -> str:
    """Return the oldest transformers that reads `scheme`, and the compressed-tensors it needs."""
    if scheme.name.startswith("nvfp4") or (scheme.zero_points and not scheme.symmetric):
        return "5.16 with compressed-tensors 0.17"
    return "4.57 with compressed-tensors 0.12" if scheme.quantized else "4.57"


def _front_matter(target: Target, scheme: Scheme) -> str:
    tags = ["qarl", *(["compressed-tensors"] if scheme.quantized else []), scheme.name]
    values = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if _on_hub(target):  # the hub rejects other names, and a directory's name may be another model on it
        kind = "finetune" if target.run is not None else "quantized"
        values = {"base_model": target.model.path, "base_model_relation": kind} | values
    if target.run is not None:
        name = target.run.objective.name
        tags += [name] if name in SUPERVISED else ["reinforcement-learning", name]
    return f"---\n{dump_yaml(values | {'tags': tags})}---\n"


def _summary(target: Target, scheme: Scheme, base: str) -> str:
    made = f"qarl {VERSION}"
    if target.run is None:
        how = _METHODS[target.quant.init] if scheme.quantized else "unquantized, its weights rounded to the dtype below"
        return f"{base}, {how}. Made by {made}.\n"
    how = SUPERVISED.get(target.run.objective.name, "reinforcement learning")
    trained = f"{base}, trained by {how} for {target.step} steps with {made}"
    if not scheme.quantized and target.run.quant.scheme != "bf16":
        return (
            f"{trained} to be served in {target.run.quant.scheme}. These are its master weights, unquantized: not the "
            "policy that generated in training, which had quantized weights.\n"
        )
    if not scheme.quantized:
        return f"{trained}.\n"
    return (
        f"{trained} to be served in {scheme.name}. The codes and scales are those with which the policy generated in "
        "training, bit for bit.\n"
    )


def _weights(
    target: Target, scheme: Scheme, dtype: str, file_format: str | None, tensor_bytes: int, bf16_bytes: int
) -> list[tuple[str, str]]:
    rows = [("Scheme", scheme.text)]
    if file_format is not None:
        rows.append(("Format", f"compressed-tensors, {file_format}"))
        rows.append((f"In {dtype}", ", ".join(["embeddings, norms, biases", *target.quant.ignore])))
    else:
        rows.append(("Dtype", dtype))
    return [*rows, ("Size", f"{tensor_bytes / 1e6:,.1f} MB, {tensor_bytes / bf16_bytes:.3f} of that in bfloat16")]


def _prompts(prompting: Prompting) -> list[tuple[str, str]]:
    """Rows about how the run prompted its policy and what ended a response."""
    rows = [("Chat template", "the tokenizer's" if prompting.chat_template else "none: prompts are plain text")]
    if prompting.chat_template_kwargs:
        rows.append(("Arguments of the template", json.dumps(prompting.chat_template_kwargs, ensure_ascii=False)))
    if prompting.system_prompt is not None:
        rows.append(("System message", json.dumps(prompting.system_prompt, ensure_ascii=False)))
    if prompting.prompt_template is not None:
        rows.append(("Prompt template", json.dumps(prompting.prompt_template, ensure_ascii=False)))
    ends = [*(json.dumps(text, ensure_ascii=False) for text in prompting.stop), *map(str, prompting.stop_token_ids)]
    if ends:
        rows.append(("Responses also end at", ", ".join(ends)))
    return rows


def _on_hub(target: Target) -> bool:
    path = target.model.path
    return not path.startswith(PREFIX) and path.count("/") <= 1 and not Path(path).expanduser().exists()


def _base_name(target: Target) -> str:
    """Return the model's name without this machine's directories."""
    path = target.model.path
    return path if _on_hub(target) or path.startswith(PREFIX) else Path(path).expanduser().resolve().name


def _table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = ("", "")) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(_inline, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _inline(text: str) -> str:
    """Escape text as one line of Markdown that cannot end a table cell or begin markup."""
    escaped = "".join(f"\\{char}" if char in "\\`*[]<>|" else char for char in text)
    return " ".join(escaped.split())
