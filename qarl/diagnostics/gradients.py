"""Decompose the effect of a precision gap on the gradient into a ratio part and a score part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Coefficients of the gradients A, B, C, D, E, F in each vector of interest.
_VECTORS = {
    "clean": (1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "ratio": (-1.0, 0.0, 1.0, 0.0, 0.0, 0.0),
    "score": (-1.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    "interaction": (1.0, -1.0, -1.0, 1.0, 0.0, 0.0),
    "total": (-1.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    "full": (0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
}
_CLIPPED = {
    "clip": (0.0, 0.0, 0.0, 0.0, 1.0, -1.0),
    "clipped": (-1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    "clipped_full": (0.0, 0.0, 0.0, 0.0, 1.0, 0.0),
}


def gradient_metrics(gram: Tensor) -> dict[str, float]:
    """Compute the gradients/* metrics from the inner products of the gradients.

    TRL study, section 7.3, with ratio e^alpha or e^(alpha + beta) and the score of the shadow or of the learner:

        A  clean ratio, shadow score     B  clean ratio, learner score
        C  full ratio, shadow score      D  full ratio, learner score
        E  D, tokens clipped by full ratio excluded    F  D, tokens clipped by clean ratio excluded
        d_ratio = C - A    d_score = B - A    interaction = D - C - B + A

        gradients/ratio_rel, score_rel, interaction_rel  norms of d_ratio, d_score and interaction over |A|
        gradients/total_rel        |D - A| / |A|
        gradients/cos_total        cosine of D and A
        gradients/cos_ratio_clean, cos_score_clean   of d_ratio and A, of d_score and A
        gradients/cos_ratio_score  of d_ratio and d_score
        gradients/clip_rel     |E - F| / |A|: d_clip, effect of precision on the clip indicator (section 10.3)
        gradients/clipped_rel, cos_clipped  |E - A| / |A|, cosine of E and A: clipped gradient against the unclipped
                               clean gradient. `trained_metrics` compares the gradient that really trains

    Norms of differences come from differences of inner products, so norms below about 1e-8 |A| are rounding error and
    count as 0. Cosines with a zero vector are omitted, and all metrics are omitted if A is 0. NaN propagates.

    Args:
        gram: (6, 6) float64, symmetric, in the order A, B, C, D, E, F; (4, 4) if the objective does not clip.

    Returns:
        The metrics above by name.
    """
    assert gram.shape in ((4, 4), (6, 6)), f"inner products of four or six gradients, not {tuple(gram.shape)}"
    inner, chosen = gram.double().cpu(), _VECTORS | (_CLIPPED if len(gram) == 6 else {})
    vectors = {name: torch.tensor(values[: len(gram)], dtype=torch.float64) for name, values in chosen.items()}
    rounding = 64 * torch.finfo(torch.float64).eps * float(inner.abs().max())

    def product(a: str, b: str) -> float:
        return float(vectors[a] @ inner @ vectors[b])

    def norm(name: str) -> float:
        square = product(name, name)
        return 0.0 if square <= rounding and not math.isnan(square) else math.sqrt(square)

    norms = {name: norm(name) for name in vectors}
    clean = norms["clean"]
    if clean == 0.0:
        return {}
    errors = ("ratio", "score", "interaction", "total", "clip", "clipped")
    metrics = {f"gradients/{name}_rel": norms[name] / clean for name in errors if name in norms}
    pairs = {
        "cos_total": ("full", "clean"),
        "cos_ratio_clean": ("ratio", "clean"),
        "cos_score_clean": ("score", "clean"),
        "cos_ratio_score": ("ratio", "score"),
        "cos_clipped": ("clipped_full", "clean"),
    }
    for name, (a, b) in pairs.items():
        if norms.get(a) and norms[b]:
            # not min and max, which would turn NaN into a number
            cosine = product(a, b) / (norms[a] * norms[b])
            metrics[f"gradients/{name}"] = math.copysign(1.0, cosine) if abs(cosine) > 1.0 else cosine
    return metrics


def trained_metrics(gram: Tensor) -> dict[str, float]:
    """Compare the training gradient with the clean gradient (TRL study, section 8.4).

        gradients/cos_trained  cosine of the two; 0.55 in the study's failing run
        gradients/trained_rel  norm of the difference over the norm of the clean gradient; 0.68 to 0.85 in that run

    Args:
        gram: (2, 2) float64 inner products, training gradient first; see `trained_gram`.

    Returns:
        The metrics by name. Empty if the clean gradient is 0; without the cosine if the training gradient is 0.
    """
    (own, both), (_, base) = gram.double().tolist()
    if base == 0.0:
        return {}
    metrics = {"gradients/trained_rel": math.sqrt(max(own - 2.0 * both + base, 0.0) / base)}
    if own != 0.0:
        metrics["gradients/cos_trained"] = max(-1.0, min(1.0, both / math.sqrt(own * base)))
    return metrics
