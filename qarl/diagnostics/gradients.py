"""Gradient decomposition: what a precision gap does to the gradient through the ratio, and what through the score."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Coefficients of the four gradients A, B, C, D in each vector of interest.
_VECTORS = {
    "clean": (1.0, 0.0, 0.0, 0.0),
    "ratio": (-1.0, 0.0, 1.0, 0.0),
    "score": (-1.0, 1.0, 0.0, 0.0),
    "interaction": (1.0, -1.0, -1.0, 1.0),
    "total": (-1.0, 0.0, 0.0, 1.0),
    "full": (0.0, 0.0, 0.0, 1.0),
}


def gradient_metrics(gram: Tensor) -> dict[str, float]:
    """gradients/* from the inner products of four gradients: gram (4, 4) float64, symmetric, in the order A, B, C, D.

    TRL study, section 7.3, with ratio e^alpha or e^(alpha + beta) and the score of the shadow or of the learner:

        A  clean ratio, shadow score     B  clean ratio, learner score
        C  full ratio, shadow score      D  full ratio, learner score
        d_ratio = C - A    d_score = B - A    interaction = D - C - B + A

        gradients/ratio_rel, score_rel, interaction_rel  norms of the three over |A|
        gradients/total_rel        |D - A| / |A|
        gradients/cos_total        cosine of D and A
        gradients/cos_ratio_clean, cos_score_clean   of d_ratio and A, of d_score and A
        gradients/cos_ratio_score  of d_ratio and d_score

    Norms of differences come from differences of inner products, so what is below about 1e-8 |A| is rounding and
    reads as 0. A cosine with a zero vector is left out, and all of them are if A is 0. NaN stays NaN.
    """
    assert gram.shape == (4, 4), f"inner products of four gradients, not {tuple(gram.shape)}"
    inner = gram.double().cpu()
    vectors = {name: torch.tensor(values, dtype=torch.float64) for name, values in _VECTORS.items()}
    rounding = 64 * torch.finfo(torch.float64).eps * float(inner.abs().max())

    def product(a: str, b: str) -> float:
        return float(vectors[a] @ inner @ vectors[b])

    def norm(name: str) -> float:
        square = product(name, name)
        return 0.0 if square <= rounding and not math.isnan(square) else math.sqrt(square)

    norms = {name: norm(name) for name in _VECTORS}
    clean = norms["clean"]
    if clean == 0.0:
        return {}
    metrics = {f"gradients/{name}_rel": norms[name] / clean for name in ("ratio", "score", "interaction", "total")}
    pairs = {
        "cos_total": ("full", "clean"),
        "cos_ratio_clean": ("ratio", "clean"),
        "cos_score_clean": ("score", "clean"),
        "cos_ratio_score": ("ratio", "score"),
    }
    for name, (a, b) in pairs.items():
        if norms[a] and norms[b]:
            # not min and max, which would turn NaN into a number
            cosine = product(a, b) / (norms[a] * norms[b])
            metrics[f"gradients/{name}"] = math.copysign(1.0, cosine) if abs(cosine) > 1.0 else cosine
    return metrics
