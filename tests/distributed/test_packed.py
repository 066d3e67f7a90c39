"""Rows of several tensors in one message per rank: unpacking restores each row and changes nothing else."""

import random

import pytest
import torch
from torch import Tensor

from qarl.distributed.packed import FILLED, Layout
from qarl.distributed.rows import cut

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_cut(dice: random.Random, count: int) -> list[range]:
    """Ranges in order, with gaps before, between and behind them; some are empty."""
    bounds = sorted(dice.randint(0, 12) for _ in range(2 * count))
    return [range(*bounds[2 * rank : 2 * rank + 2]) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("how", ["even", "rows", "units", "part", "gaps"])
def test_unpacking_restores_every_row(count: int, how: str) -> None:
    dice, generator = random.Random(count), torch.Generator().manual_seed(count)
    for turn in range(20):
        cuts: list[list[range]] = []
        owns: list[list[Tensor]] = [[] for _ in range(count)]
        outs, expected = [], []
        for which in range(dice.randint(1, 6)):
            rows = dice.randint(0, 12) * (count if how == "even" else 1)
            cuts.append(cut(rows, 4 if how == "units" else 1, count))
            if how == "part":  # some rows of each rank, as a block of which not all comes at once
                cuts[-1] = [range(min(own.start + 1, own.stop), min(own.start + 3, own.stop)) for own in cuts[-1]]
            if how == "gaps":
                cuts[-1] = random_cut(dice, count)
            shape = cuts[-1][-1].stop + dice.randint(0, 2), *dice.choice([(), (1,), (3,), (8,), (2, 4), (0,)])
            dtype, at = DTYPES[(turn + which) % len(DTYPES)], dice.randint(0, 3)
            memory = torch.zeros(at + torch.Size(shape).numel(), dtype=dtype)  # words do not begin with it
            outs.append(memory[at:].view(shape))
            whole = torch.randint(1, 100, shape, generator=generator).to(dtype)
            expected.append(torch.zeros(shape, dtype=dtype))
            for rank, own in enumerate(cuts[-1]):
                owns[rank].append(whole[own.start : own.stop].clone())
                expected[-1][own.start : own.stop] = owns[rank][-1]
        layout = Layout(cuts, [out[:1].nbytes if len(out) else out.itemsize for out in outs])
        messages = [layout.pack(own, rank) for rank, own in enumerate(owns)]
        lengths = [layout.largest] * count if layout.even else layout.sizes
        assert [len(message) for message in messages] == lengths and max(layout.sizes) == layout.largest
        assert layout.even == (layout.largest * count <= FILLED * sum(layout.sizes))
        assert how != "even" or layout.even
        layout.unpack(torch.cat(messages), outs)
        for out, right in zip(outs, expected, strict=True):
            assert bits(out) == bits(right), (how, turn)
