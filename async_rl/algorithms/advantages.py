"""Advantages: how much better an answer is than its siblings, or than the greedy one. Imports torch only.

Invariant: a trajectory that cannot be compared (unscorable, or without what its baseline needs) has advantage 0 and enters
no statistic; a group without variance has advantage exactly 0 against its siblings. Statistics are float64 whatever the
input. Shape legend: M groups.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned
from async_rl.algorithms.filters import ZERO_STD


def comparable(rewards_N: Tensor, group_ids_N: Tensor, valid_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
    """bool [N]: valid, with a finite reward, and at least one sibling of which the same holds.

    With `greedy_N` (ReMax) the baseline is the reward of the greedy answer: that must be finite, and no sibling is needed.
    The others are to be left out of the loss *and* of its denominator.
    """
    check_aligned(rewards=rewards_N, group_ids=group_ids_N, valid=valid_N)
    usable_N = valid_N.bool() & rewards_N.isfinite()
    if greedy_N is not None:
        check_aligned(rewards=rewards_N, greedy=greedy_N)
        return usable_N & greedy_N.isfinite()
    _, index_N = torch.unique(group_ids_N, return_inverse=True)
    return usable_N & (_per_group(usable_N.double(), index_N)[index_N] >= 2)


def grpo(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
    eps: float = 1e-6,
    ddof: int = 1,
    norm_std: bool = True,
) -> Tensor:
    """`(R - mean) / (std + eps)` over the comparable siblings; float64 [N].

    GRPO, arXiv:2402.03300; `norm_std=False` is Dr.GRPO's `R - mean`, arXiv:2503.20783. Groups are found by id (integers),
    in any order. `ddof=1` divides by n-1, as verl and TRL do. Raises ValueError when shapes differ.
    """
    group = _centered(rewards_N, group_ids_N, valid_N)
    std_N = group.std(ddof)
    scaled_N = group.centered_N / (std_N + eps) if norm_std else group.centered_N
    return torch.where(std_N < ZERO_STD, torch.zeros_like(scaled_N), scaled_N)


def grpo_batch_std(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Tensor:
    """`(R - mean of the group) / (std of all comparable rewards + eps)`, float64 [N]; Lite-PPO, arXiv:2508.08221.

    A group whose answers barely differ is not blown up to unit size. Raises ValueError when shapes differ.
    """
    # All in one group: measured from the batch's own minimum and mean.
    together_N = torch.zeros_like(group_ids_N)
    keep_N = comparable(rewards_N, group_ids_N, valid_N)
    std_N = _centered(rewards_N, together_N, keep_N).std(ddof)
    centered_N = grpo(rewards_N, group_ids_N, valid_N, ddof=ddof, norm_std=False)
    return torch.where(keep_N & (std_N >= ZERO_STD), centered_N / (std_N + eps), torch.zeros_like(centered_N))


def rloo(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
) -> Tensor:
    """`R - mean of the other comparable siblings`, which is `k / (k - 1) (R - mean)`; float64 [N]. arXiv:2402.14740.

    Raises ValueError when shapes differ.
    """
    group = _centered(rewards_N, group_ids_N, valid_N)
    others_N = (group.count_N - 1).clamp(min=1)
    scaled_N = group.centered_N * group.count_N / others_N
    return torch.where(group.std(1) < ZERO_STD, torch.zeros_like(scaled_N), scaled_N)


def opo(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
) -> Tensor:
    """`R - sum(l R) / sum(l)` over the comparable siblings, l their trainable tokens; float64 [N]. OPO, arXiv:2505.23585.

    The length weights make the variance of the gradient least, where each token adds as much of it; the sum of `l A` is 0
    in each group. A group without a token gets 0. Raises ValueError without `lengths_N`, or when shapes differ.
    """
    if lengths_N is None:
        raise ValueError("opo weighs rewards by length: give lengths_N, the trainable tokens of each trajectory")
    check_aligned(rewards=rewards_N, lengths=lengths_N)
    group = _centered(rewards_N, group_ids_N, valid_N)
    zero = torch.zeros((), dtype=torch.float64, device=rewards_N.device)
    length_N = torch.where(group.keep_N, lengths_N.double(), zero)
    total_M = _per_group(length_N, group.index_N)
    baseline_M = _per_group(length_N * group.centered_N, group.index_N) / total_M.clamp(min=1)
    usable_N = group.keep_N & (total_M[group.index_N] > 0) & (group.std(1) >= ZERO_STD)
    return torch.where(usable_N, group.centered_N - baseline_M[group.index_N], zero)


def remax(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    lengths_N: Tensor | None = None,
    greedy_N: Tensor | None = None,
) -> Tensor:
    """`R - R(greedy answer to the same prompt)`, float64 [N]; ReMax, arXiv:2310.10505. Siblings are not needed.

    Raises ValueError without `greedy_N`, the greedy answer's reward for each trajectory, or when shapes differ.
    """
    if greedy_N is None:
        raise ValueError("remax compares with the greedy answer: give greedy_N, its reward for each trajectory")
    keep_N = comparable(rewards_N, group_ids_N, valid_N, greedy_N)
    return torch.where(keep_N, rewards_N.double() - greedy_N.double(), torch.zeros_like(rewards_N, dtype=torch.float64))


class _Group(NamedTuple):
    """The comparable siblings of each trajectory; what it holds of the others is 0."""

    keep_N: Tensor
    index_N: Tensor  # group of each trajectory, 0 .. M-1
    count_N: Tensor  # comparable members of its group
    centered_N: Tensor  # reward less the group's mean

    def std(self, ddof: int) -> Tensor:
        """[N], of the group of each trajectory."""
        squares_M = _per_group(self.centered_N**2, self.index_N)
        return (squares_M[self.index_N] / (self.count_N - ddof).clamp(min=1)).sqrt()


def _centered(rewards_N: Tensor, group_ids_N: Tensor, valid_N: Tensor) -> _Group:
    keep_N = comparable(rewards_N, group_ids_N, valid_N)
    _, index_N = torch.unique(group_ids_N, return_inverse=True)
    zero = torch.zeros((), dtype=torch.float64, device=rewards_N.device)
    # Measured from the group's minimum, equal rewards are exact zeros, however large they are.
    floor_N = _per_group(torch.where(keep_N, rewards_N.double(), torch.inf), index_N, "amin")[index_N]
    shifted_N = torch.where(keep_N, rewards_N.double() - floor_N, zero)
    count_M = _per_group(keep_N.double(), index_N)
    mean_M = _per_group(shifted_N, index_N) / count_M.clamp(min=1)
    return _Group(keep_N, index_N, count_M[index_N], torch.where(keep_N, shifted_N - mean_M[index_N], zero))


def _per_group(x_N: Tensor, index_N: Tensor, reduce: str = "sum") -> Tensor:
    """Sums (or minima, "amin") by group, [M]."""
    num_groups = int(index_N.max()) + 1 if len(index_N) else 0
    empty_M = torch.full((num_groups,), torch.inf if reduce == "amin" else 0.0, dtype=x_N.dtype, device=x_N.device)
    return empty_M.scatter_reduce_(0, index_N, x_N, reduce)


class Advantage(Protocol):
    """A baseline. The learner passes lengths and greedy rewards by name where it has them; a baseline uses those it knows."""

    def __call__(
        self,
        rewards_N: Tensor,
        group_ids_N: Tensor,
        valid_N: Tensor,
        *,
        lengths_N: Tensor | None = None,
        greedy_N: Tensor | None = None,
    ) -> Tensor: ...


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": partial(grpo, norm_std=False),
    "grpo_batch_std": grpo_batch_std,
    "rloo": rloo,
    "opo": opo,
    "remax": remax,
    "reinforce_pp_baseline": partial(grpo, norm_std=False),  # then `reinforce.reinforce_pp_baseline` over the tokens
}
"""name -> function of (rewards_N, group_ids_N, valid_N) that gives float64 [N]; opo needs lengths_N, remax greedy_N."""
