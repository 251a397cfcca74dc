"""The learner's log-probs and entropies on the golden logits: the temperature divides before the softmax."""

from __future__ import annotations

import torch

from async_rl.learner.update.logprobs import token_logprobs

from .estimator_cases import cases, close


def scored(logits, target: int, temperature: float) -> tuple[float, float]:
    """(log-prob, entropy) with an identity for the head, so that the hidden state is the logits."""
    hidden = torch.tensor([logits], dtype=torch.float32)
    logp, entropy = token_logprobs(hidden, torch.eye(len(logits)), torch.tensor([target]), temperature, 4)
    return float(logp), float(entropy)


@cases("logprob_from_logits")
def test_the_log_prob_is_the_golden_one(inputs, expected, tol):
    close(scored(inputs["logits"], inputs["token"], inputs["temperature"])[0], expected["logp"], 1e-5)


@cases("entropy_from_logits")
def test_the_entropy_is_the_golden_one(inputs, expected, tol):
    close(scored(inputs["logits"], 0, inputs["temperature"])[1], expected["entropy"], 1e-5)
