"""Correction of the mismatch between sampler and learner: importance weights, rejection of responses, and a veto.

Everything here multiplies the surrogate, without gradient. Bounds are on ratios learner over sampler, never on the
inverse. What is rejected keeps its place in the aggregation's denominators (VeXact, equations 8 to 11).
"""

from __future__ import annotations

from qarl.correction.combined import Combined, Correction
from qarl.correction.rejection import Rejection, kept, vetoed
from qarl.correction.weights import Weighting, importance_weights

__all__ = ["Combined", "Correction", "Rejection", "Weighting", "importance_weights", "kept", "vetoed"]
