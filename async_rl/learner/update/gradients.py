"""Gradients of one optimizer step, added up over micro-batches and ranks, and the verdict whether they may be used.

Imports torch and the learner's models. Invariants: every rank runs the same backwards and collectives; gradients are reduced
once, in the last backward; what is not finite on any rank is discarded on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from async_rl.learner.update.minibatches import Scored
from async_rl.learner.update.model import DecoderModel
from async_rl.learner.update.optim import Optimizer
from async_rl.learner.update.tally import Tally


def accumulate(
    model: DecoderModel,
    optimizer: Optimizer,
    micro_batches: Iterable[tuple[bool, Scored]],
    loss_of: Callable[[Scored, Tally], Tensor],
    group: dist.ProcessGroup | None,
    names: tuple[str, str],
) -> tuple[Tally, str]:
    """Clipped gradients in the model, and their figures over all ranks; or none, and why: "" when all is well.

    `micro_batches` are those of this rank, each with whether it is the last. `loss_of` gives `D S / N` of one (algorithms.md
    §7) and adds its figures. `names` are those of the figures for the loss and for the norm before clipping.
    """
    loss_name, norm_name = names
    num_ranks = dist.get_world_size(group) if group else 1
    tally, bad_losses = Tally(), 0
    # Each rank counts 1/D of this step, so that sums over ranks and micro-batches give its loss.
    tally.add(loss_name, 0.0, 1.0 / num_ranks)
    for last, scored in micro_batches:
        model.sync_gradients(last)
        loss = loss_of(scored, tally)
        value = loss.item()
        tally.add(loss_name, value / num_ranks, 0.0)
        bad_losses += not math.isfinite(value)
        loss.backward()
    norm = optimizer.clip()
    tally.add(norm_name, norm)
    tally, flags = tally.reduce_sums(group, [bad_losses > 0, not math.isfinite(norm)])
    for name, count in zip(names, flags, strict=True):
        if count:
            optimizer.discard()
            return tally, f"{name} is not finite on {count} of {num_ranks} ranks"
    return tally, ""
