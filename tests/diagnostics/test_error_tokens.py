import math
import random

import pytest
import torch

from qarl.diagnostics.error_tokens import Stretch, error_examples, error_token_metrics, stretches
from qarl.objectives.segments import Segments


def text(length: int, seed: int = 0) -> list[int]:
    """Token ids like those of a text: half from a handful of common ones."""
    rng = random.Random(seed)
    return [rng.randrange(12) if rng.random() < 0.5 else rng.randrange(5000) for _ in range(length)]


def by_definition(ids: list[int], logp: list[float]) -> tuple[set[int], set[int]]:
    """Positions in a repetitive and in a garbled stretch, by trying every start, period and window."""
    repetitive, garbled = set(), set()
    for period in range(1, 33):
        shortest = max(24, 4 * period)
        for start in range(len(ids)):
            stop = start + period
            while stop < len(ids) and ids[stop] == ids[stop - period]:
                stop += 1
            if stop - start >= shortest:
                repetitive |= set(range(start, stop))
    for start in range(len(ids) - 7):
        if math.fsum(min(0.0, max(-8.0, x)) for x in logp[start : start + 8]) / 8 < -4.0:
            garbled |= set(range(start, start + 8))
    return repetitive, garbled


def positions(found: list[Stretch], kind: str) -> set[int]:
    return {i for stretch in found if stretch.kind == kind for i in range(stretch.start, stretch.stop)}


@pytest.mark.parametrize("seed", range(4))
def test_finds_what_the_definition_finds(seed):
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 220:
        if rng.random() < 0.4:
            period = rng.choice([1, 2, 3, 4, 5, 9, 31, 32, 33])
            unit = [rng.randrange(4) for _ in range(period)]
            ids += (unit * 40)[: rng.randrange(period, 5 * period + 20)]
        else:
            ids += [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
    logp = [-rng.expovariate(0.25) for _ in ids]
    found = stretches(ids, logp)
    assert (positions(found, "repetitive"), positions(found, "garbled")) == by_definition(ids, logp)
    # and packed among others: a stretch never runs from one response into the next
    parts = [ids[:100], ids[100:100], ids[100:]]
    segments = Segments.from_lengths([len(p) for p in parts])
    exact = torch.tensor(logp, dtype=torch.float64)
    packed = error_token_metrics(torch.tensor(ids), exact, torch.tensor([1.0, 0.0, -1.0]), segments)
    cut = [by_definition(p, q) for p, q in ((ids[:100], logp[:100]), (ids[100:], logp[100:]))]
    n = len(ids)
    assert packed == pytest.approx(
        {
            "error_tokens/frac": sum(len(a | b) for a, b in cut) / n,
            "error_tokens/repetitive_frac": sum(len(a) for a, _ in cut) / n,
            "error_tokens/garbled_frac": sum(len(b) for _, b in cut) / n,
            "error_tokens/positive_frac": len(cut[0][0] | cut[0][1]) / 100,
            "error_tokens/negative_frac": len(cut[1][0] | cut[1][1]) / (n - 100),
            "error_tokens/responses_frac": sum(bool(a | b) for a, b in cut) / 3,
        }
    )


def test_improbable_tokens_in_a_row_are_garbled_and_one_very_improbable_is_not():
    ids = list(range(40))
    logp = [-0.2] * 10 + [-6.0] * 10 + [-0.2] * 20
    ((start, stop, kind),) = stretches(ids, logp)
    assert kind == "garbled" and start <= 10 and stop >= 20 and stop - start < 18
    assert stretches(ids, [-0.2] * 10 + [-60.0] + [-0.2] * 29) == []
    assert stretches(ids, [-math.inf] * 8 + [-0.2] * 32)[0].kind == "garbled"


def test_too_short_a_response_is_no_stretch():
    for n in (0, 1, 7):
        assert stretches([3] * n, [-9.0] * n) == []
    metrics = error_token_metrics(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1), Segments.from_lengths([0])
    )
    assert set(metrics.values()) == {0.0}


def test_examples_are_the_longest_stretch_of_each_response_with_what_stands_around_it():
    responses = [text(50), [1, 2, *[9] * 30, 3], [*[4, 5, 6, 7] * 20, 8], text(30, 1)]
    logp = [torch.full((len(r),), -0.5) for r in responses]
    found = error_examples(responses, logp, torch.tensor([0.0, 1.0, -1.0, 0.0]), lambda ids: " ".join(map(str, ids)), 5)
    assert [(row["response"], row["kind"], row["advantage"]) for row in found] == [
        (2, "repetitive", -1.0),
        (1, "repetitive", 1.0),
    ]
    assert found[1]["before"] == "1 2" and found[1]["text"] == " ".join(["9"] * 30) and found[1]["after"] == "3"
    assert len(error_examples(responses, logp, torch.zeros(4), str, 1)) == 1
