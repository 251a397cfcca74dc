"""The policy losses by name: `LOSSES[name](terms, **options)` gives a loss per token, to be minimised. Imports torch only.

Invariants: the loss and its gradient are exactly 0 at masked positions; a token's loss carries the gradient of its own
log-prob alone, so that scaling or dropping tokens afterwards means what it says; weights and advantages are constants of
the loss. A NaN at a trainable token stays NaN, so that the learner's finite guard sees it.
"""

from __future__ import annotations

from collections.abc import Callable

from async_rl.algorithms.losses_clipped import bypass_ppo, decoupled_ppo, gspo, ppo
from async_rl.algorithms.losses_reinforce import aipo, cispo, topr
from async_rl.algorithms.losses_soft import dppo_tv, kimi_k15, kimi_pmd, sapo
from async_rl.algorithms.terms import TokenLoss

LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo": ppo,
    "bypass_ppo": bypass_ppo,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "cispo": cispo,
    "aipo": aipo,
    "topr": topr,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "kimi_k15": kimi_k15,
    "kimi_pmd": kimi_pmd,
}
"""name -> function of (terms, options by keyword, none with a default); each lists its own options."""

AGGREGATION_OF: dict[str, str] = {
    "gspo": "seq_mean_token_mean",
    "topr": "seq_mean_token_sum",
    "kimi_k15": "seq_mean_token_sum",
    "kimi_pmd": "seq_mean_token_sum",
}
"""The aggregation under which a sequence-level loss is its paper's; the others are per token and take any."""

WEIGHTED: frozenset[str] = frozenset({"decoupled_ppo", "gspo", "cispo"})
"""The losses that multiply by `weight_R`. The others ignore it: they have no ratio to mu (ppo), or already their own."""
