"""What rank 0 decides anew before each step, beside the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Steering:
    lr_scale: float = 1.0  # times the scheduled rate
    kl_beta: float = 0.0  # coefficient of the KL to the reference
