"""The twin in fp64 of tests/test_learner_ranks.py: log-probs from a table instead of a model, so that rounding hides nothing.

Every method's gradient by log-prob and entropy is the same however the batch is split, to 1e-10.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.learner.update import estimate
from async_rl.learner.update.estimate import Estimator
from async_rl.learner.update.minibatches import Scored, batch_tensors, deal, scored
from async_rl.learner.update.objective import Objective, Step
from async_rl.learner.update.tally import Tally

from .learner_cases import distance, make_config
from .step_cases import METHODS, near_batch

CPU, BETA = torch.device("cpu"), 0.1
BATCH = near_batch()


def table(seed: int, around: np.ndarray | None = None) -> Tensor:
    """One number per response token, fp64, with gradient."""
    noise = np.random.default_rng((5, seed)).normal(0, 0.2, len(BATCH.mask))
    return torch.tensor(noise + (0.0 if around is None else around), dtype=torch.float64, requires_grad=True)


LOGP_R, ENTROPY_R, VALUES_R, REF_R = table(0, BATCH.logp_behav), table(1), table(2), table(3, BATCH.logp_behav)
POLICY, REFERENCE = SimpleNamespace(at_rest=lambda: None), SimpleNamespace(at_rest=lambda: None)
CRITIC = SimpleNamespace(values=lambda micro: (VALUES_R[micro.slots_T].float(), torch.zeros(len(micro.end_rows))))


def looked_up(model: Any, micro: Scored, config: Any) -> tuple[Tensor, Tensor]:
    logp_T = (LOGP_R if model is POLICY else REF_R)[micro.slots_T]
    return (logp_T if torch.is_grad_enabled() else logp_T.float()), ENTROPY_R[micro.slots_T]


def gradients(name: str, num_ranks: int, budget_tokens: int, monkeypatch: Any) -> dict[str, Tensor]:
    """Of every optimizer step, by its number: with respect to log-probs and to entropies."""
    monkeypatch.setattr(estimate, "forward", looked_up)
    config = make_config(METHODS[name], {"microbatch_tokens": budget_tokens})
    tensors, objective = batch_tensors(BATCH, CPU), Objective(config, num_ranks)
    shares = [deal(config, BATCH, tensors.num_tokens_N, 0, rank, num_ranks) for rank in range(num_ranks)]

    def whole() -> Any:
        first = [part for share in shares for part in share[: config.algorithm.num_minibatches]]
        return (scored(BATCH, indices, CPU) for part in first for indices in part.micro)

    a = config.algorithm
    estimator = Estimator(config, POLICY, REFERENCE if a.has_reference else None, None)  # pyright: ignore[reportArgumentType]
    found = estimator.run(tensors, whole, CRITIC if a.has_critic else None, 0, BETA)  # pyright: ignore[reportArgumentType]
    step, grads = Step(tensors, found, 0, a.kl.beta, torch.zeros_like(tensors.logp_behav_R)), {}
    for k in range(len(shares[0])):
        total = torch.zeros((), dtype=torch.float64)
        for part in (share[k] for share in shares):
            for micro in (scored(BATCH, indices, CPU) for indices in part.micro):
                total = total + objective(micro, step, part, *looked_up(POLICY, micro, config), Tally()) / num_ranks
        grad_R, entropy_R = torch.autograd.grad(total, (LOGP_R, ENTROPY_R), allow_unused=True)
        grads |= {f"{k} log-prob": grad_R} | ({} if entropy_R is None else {f"{k} entropy": entropy_R})
    return grads


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_in_fp64_is_that_of_one_rank_and_one_pass(name: str, monkeypatch: Any) -> None:
    expected = gradients(name, 1, 10_000, monkeypatch)
    assert all(grad.dtype == torch.float64 and bool(grad.any()) for grad in expected.values())
    for num_ranks, budget_tokens in ((1, 48), (1, 24), (2, 10_000), (2, 48), (4, 10_000), (4, 24)):
        assert distance(gradients(name, num_ranks, budget_tokens, monkeypatch), expected) <= 1e-10, (num_ranks, budget_tokens)
