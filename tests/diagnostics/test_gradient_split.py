import math

import pytest
import torch

from qarl.diagnostics.gradients import gradient_metrics


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(6)]


def gram(gradients: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(gradients)
    return stacked @ stacked.T


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_matches_the_vectors_themselves():
    a, b, c, d, e, f = vectors()
    ratio, score = c - a, b - a
    four = pytest.approx(
        {
            "gradients/ratio_rel": float(ratio.norm() / a.norm()),
            "gradients/score_rel": float(score.norm() / a.norm()),
            "gradients/interaction_rel": float((d - c - b + a).norm() / a.norm()),
            "gradients/total_rel": float((d - a).norm() / a.norm()),
            "gradients/cos_total": cosine(d, a),
            "gradients/cos_ratio_clean": cosine(ratio, a),
            "gradients/cos_score_clean": cosine(score, a),
            "gradients/cos_ratio_score": cosine(ratio, score),
        },
        rel=1e-12,
    )
    assert gradient_metrics(gram([a, b, c, d])) == four
    metrics = gradient_metrics(gram([a, b, c, d, e, f]))
    clipping = {name: metrics.pop(f"gradients/{name}") for name in ("clip_rel", "clipped_rel", "cos_clipped")}
    assert metrics == four
    assert clipping == pytest.approx(
        {
            "clip_rel": float((e - f).norm() / a.norm()),
            "clipped_rel": float((e - a).norm() / a.norm()),
            "cos_clipped": cosine(e, a),
        },
        rel=1e-12,
    )


def test_a_gradient_that_is_clipped_away_has_no_cosine():
    a = vectors()[0]
    metrics = gradient_metrics(gram([a, a, a, a, 0 * a, a]))
    assert metrics["gradients/clip_rel"] == metrics["gradients/clipped_rel"] == pytest.approx(1.0)
    assert "gradients/cos_clipped" not in metrics


def test_without_a_precision_gap_all_four_are_one_gradient():
    a = vectors()[0]
    metrics = gradient_metrics(gram([a, a, a, a]))
    assert metrics.pop("gradients/cos_total") == pytest.approx(1.0, rel=1e-15)
    assert metrics == {f"gradients/{name}_rel": 0.0 for name in ("ratio", "score", "interaction", "total")}


def test_small_errors_are_seen_down_to_a_millionth_and_rounding_errors_count_as_zero():
    a, noise = vectors()[:2]
    small, smaller = (gradient_metrics(gram([a, b, a, b])) for b in (a + 1e-6 * noise, a + 1e-9 * noise))
    assert small["gradients/score_rel"] == pytest.approx(1e-6 * float(noise.norm() / a.norm()), rel=1e-3)
    assert smaller["gradients/score_rel"] == 0.0 and "gradients/cos_score_clean" not in smaller


def test_a_zero_gradient_has_no_relative_errors_and_nan_stays_nan():
    assert gradient_metrics(torch.zeros(4, 4, dtype=torch.float64)) == {}
    broken = gram(vectors()[:4])
    broken[3, :] = broken[:, 3] = math.nan
    metrics = gradient_metrics(broken)
    assert math.isnan(metrics["gradients/total_rel"]) and math.isnan(metrics["gradients/cos_total"])
