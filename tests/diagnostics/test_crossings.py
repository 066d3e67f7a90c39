import pytest
import torch
from qarl_formats.scheme import Scheme

from qarl.config import QuantConfig
from qarl.config.quant import scheme_of
from qarl.diagnostics.crossings import crossing_metrics, crossings, predicted_steps, sign_agreement
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import Snapshot, build_snapshot

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.mlp.up_proj.weight",
    "lm_head.weight",
)


def masters(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(8 if "norm" in n else (8, 32), generator=generator) for n in NAMES}


def snapshot(values: dict[str, torch.Tensor], scheme: Scheme | None) -> Snapshot:
    forms = []
    for name, value in values.items():
        low_bit = scheme if "up_proj" in name else None
        forms.append((name, quantize_parameter(name, value, low_bit, torch.bfloat16, 0)))
    return build_snapshot(0, forms)


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8"])
def test_codes_that_differ_are_counted_by_module(name):
    scheme = scheme_of(QuantConfig(scheme=name, **({"group_size": 32} if name == "w4a16" else {})))
    before = masters()
    after = {n: v.clone() for n, v in before.items()}
    weight = after["model.layers.1.mlp.up_proj.weight"]
    row = weight[3]
    sizes = row.abs()
    largest, chosen = sizes.max(), sizes.argsort()[:3]
    row[chosen] = 0.5 * largest  # three codes of one row, its scale unchanged
    after["model.embed_tokens.weight"] += 1.0
    found = crossings(snapshot(before, scheme), snapshot(after, scheme))
    assert found == {"model.layers.0.mlp.up_proj": (0, 256), "model.layers.1.mlp.up_proj": (3, 256)}
    assert crossing_metrics(found) == {"quant/codes_changed_frac": 3 / 512, "quant/codes_changed_count": 3.0}


E4M3 = sorted({abs(float(v)) for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn) if v == v})
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]  # 8: where the next one would be
LARGER = {"fp8": [*E4M3, 480.0], "nvfp4a16": E2M1}


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8", "nvfp4a16", None])
def test_the_predicted_steps_are_half_the_way_to_the_next_published_value(name):
    scheme = scheme_of(QuantConfig(scheme=name, **({"group_size": 32} if name == "w4a16" else {}))) if name else None
    taken, steps = snapshot(masters(), scheme), []
    for module in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"):
        weight = taken.weight(module)
        for value, code in zip(weight.dequantize(torch.float64).flatten(), codes_of(weight), strict=True):
            if value == 0:
                continue
            if name is None:
                beyond = torch.nextafter(value.bfloat16().abs(), torch.tensor(1e4).bfloat16()).double()
                steps.append(float(beyond - value.abs()))
            else:
                grid = LARGER.get(name)
                larger = code + 1 if grid is None else grid[grid.index(code) + 1]
                steps.append(float(value.abs()) * (larger - code) / code)
    expected = sum(steps) / len(steps) / (2 * 1e-6)
    assert predicted_steps(taken, 1e-6) == {"quant/crossing_steps": pytest.approx(expected, rel=1e-3)}
    assert predicted_steps(taken, 0.0) == {}


def codes_of(weight) -> list[float]:
    codes = weight.codes() if weight.quantized else weight.tensors["weight"]
    return [abs(float(code)) for code in codes.flatten()]


def test_codes_with_a_zero_point_have_no_predicted_steps():
    scheme = scheme_of(QuantConfig(scheme="w4a16", group_size=32, symmetric=False))
    assert predicted_steps(snapshot(masters(), scheme), 1e-6) == {}


@pytest.mark.parametrize("name", ["w4a16", "fp8", None])
def test_the_agreement_counts_changed_values_that_move_down_the_gradient(name):
    scheme = scheme_of(QuantConfig(scheme=name, **({"group_size": 32} if name == "w4a16" else {}))) if name else None
    before, module = masters(), "model.layers.0.mlp.up_proj"
    weight = before[f"{module}.weight"]
    weight[:, 0] = 10.0  # the scale of each row, which stays
    after = {n: v.clone() for n, v in before.items()}
    moves = {(0, 3): 4.0, (1, 5): -4.0, (2, 7): 4.0, (3, 9): -4.0}
    sign = torch.zeros_like(weight, dtype=torch.int8)
    for number, (place, move) in enumerate(moves.items()):
        weight[place] = 0.0
        after[f"{module}.weight"][place] = move
        sign[place] = -1 if (move > 0) == (number != 2) else 1  # three of four agree
    found = sign_agreement(snapshot(before, scheme), snapshot(after, scheme), {f"{module}.weight": sign})
    assert found == {"quant/sign_agreement": 0.75}
    assert sign_agreement(snapshot(before, scheme), snapshot(before, scheme), {f"{module}.weight": sign}) == {}
    assert sign_agreement(snapshot(before, scheme), snapshot(after, scheme), {}) == {}
