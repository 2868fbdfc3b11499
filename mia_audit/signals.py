"""Signals as attacks see them: phi from logits, and what follows from phi alone."""

from __future__ import annotations

import numpy as np

from shadow_pool.signals import phi_from_logits

__all__ = ["loss_from_phi", "phi_from_logits", "probability_from_phi"]


def loss_from_phi(phi: np.ndarray) -> np.ndarray:
    """Cross-entropy of the label: softplus(-phi), any shape, float64."""
    return np.logaddexp(0.0, -np.asarray(phi, dtype=np.float64))


def probability_from_phi(phi: np.ndarray) -> np.ndarray:
    """Probability of the label: sigmoid(phi), any shape, float64."""
    return np.exp(-loss_from_phi(phi))
