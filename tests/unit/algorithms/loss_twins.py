"""Slow twins of the policy losses: plain loops over numbers, close to the notation of the papers; no torch.

A step is a list of trajectories, a trajectory a list of Token. Token losses give (loss, slope, high, low, dual) of one
token. Sequence losses give the loss of one trajectory and its derivative by each of its tokens' log-probs.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Token(NamedTuple):
    logp: float
    prox: float
    behav: float
    adv: float
    weight: float
    trained: bool


def log_ratio(a: float, b: float) -> float:
    return max(-20.0, min(20.0, a - b))


def ratio(a: float, b: float) -> tuple[float, float]:
    """exp(a - b) and its derivative by a: clamped at 20, so flat beyond."""
    r = math.exp(log_ratio(a, b))
    return r, r if abs(a - b) <= 20 else 0.0


def _ppo(r, dr, adv, eps_low, eps_high, dual_clip):
    plain, clipped = -adv * r, -adv * min(max(r, 1 - eps_low), 1 + eps_high)
    loss, slope = (plain, -adv * dr) if plain >= clipped else (clipped, 0.0)
    high, low = adv > 0 and clipped > plain, adv < 0 and clipped > plain
    if dual_clip is not None and adv < 0 and loss > -dual_clip * adv:
        return -dual_clip * adv, 0.0, high, low, True
    return loss, slope, high, low, False


def ppo(t: Token, **clip):
    return _ppo(*ratio(t.logp, t.prox), t.adv, **clip)


def bypass_ppo(t: Token, **clip):
    return _ppo(*ratio(t.logp, t.behav), t.adv, **clip)


def decoupled_ppo(t: Token, **clip):
    loss, slope, *flags = _ppo(*ratio(t.logp, t.prox), t.adv, **clip)
    return t.weight * loss, t.weight * slope, *flags


def cispo(t: Token, low, high):
    r, _ = ratio(t.logp, t.prox)
    c = t.weight * max(low, min(high, r))
    return -c * t.adv * t.logp, -c * t.adv, r > high, r < low, False


def aipo(t: Token, delta):
    r, _ = ratio(t.logp, t.behav)
    c = r if r < delta else delta
    return -c * t.adv * t.logp, -c * t.adv, r > delta, False, False


def sapo(t: Token, tau_pos, tau_neg):
    r, dr = ratio(t.logp, t.behav)
    tau = tau_pos if t.adv > 0 else tau_neg
    x = tau * (r - 1)
    sigma = 1 / (1 + math.exp(-x)) if x > -500 else 0.0
    sigma_of_minus = 1 / (1 + math.exp(x)) if x < 500 else 0.0
    return -t.adv * 4 / tau * sigma, -t.adv * 4 * sigma * sigma_of_minus * dr, False, False, False


def dppo_tv(t: Token, tv_high, tv_low, kl_tau):
    rho, drho = ratio(t.logp, t.behav)
    moved = math.exp(t.logp) - math.exp(t.behav)
    high, low = t.adv > 0 and moved > tv_high, t.adv <= 0 and -moved > tv_low
    log = t.logp - t.behav
    loss, slope = kl_tau * log * log, 2 * kl_tau * log
    if not (high or low):
        loss, slope = loss - t.adv * rho, slope - t.adv * drho
    return loss, slope, high, low, False


TOKEN_TWINS = {f.__name__: f for f in (ppo, bypass_ppo, decoupled_ppo, cispo, aipo, sapo, dppo_tv)}


def gspo(trained: list[Token], eps_low, eps_high):
    """The loss of a trajectory is `w l_i`; its derivative by a token's log-prob has the 1/T of the mean in s."""
    adv, weight, length = trained[0].adv, trained[0].weight, len(trained)
    s = math.exp(sum(log_ratio(t.logp, t.prox) for t in trained) / length)
    plain, clipped = -adv * s, -adv * min(max(s, 1 - eps_low), 1 + eps_high)
    if clipped > plain:
        return weight * clipped, [0.0] * length
    return weight * plain, [weight * -adv * s / length] * length


def topr(trained: list[Token]):
    adv = trained[0].adv
    product = math.prod(ratio(t.logp, t.behav)[0] for t in trained)
    w = 1.0 if adv >= 0 else min(1.0, product)
    return -w * adv * sum(t.logp for t in trained), [-w * adv] * len(trained)


def kimi_k15(trained: list[Token], tau):
    adv, new, old = trained[0].adv, sum(t.logp for t in trained), sum(t.behav for t in trained)
    return -adv * new + tau / 2 * (new - old) ** 2, [-adv + tau * (new - old)] * len(trained)


def kimi_pmd(trained: list[Token], tau):
    adv, new, old = trained[0].adv, sum(t.logp for t in trained), sum(t.behav for t in trained)
    return (adv - tau * (new - old)) ** 2 / (2 * tau), [-(adv - tau * (new - old))] * len(trained)


SEQUENCE_TWINS = {f.__name__: f for f in (gspo, topr, kimi_k15, kimi_pmd)}


def sequence_step(name: str, rows: list[list[Token]], **options) -> tuple[float, list[float]]:
    """Mean over the trajectories with a trained token, and its derivative by every log-prob of the step."""
    count = sum(any(t.trained for t in row) for row in rows)
    total, slopes = 0.0, []
    for row in rows:
        trained = [t for t in row if t.trained]
        loss, mine = SEQUENCE_TWINS[name](trained, **options) if trained else (0.0, [])
        total += loss / count if count else 0.0
        each = iter(mine)
        slopes += [next(each) / count if t.trained else 0.0 for t in row]
    return total, slopes


def weight(trained: list[Token], level: str, mode: str, low: float, high: float) -> list[float]:
    """Importance weights of the trained tokens of one trajectory."""
    logs = [log_ratio(t.prox, t.behav) for t in trained]
    if level == "sequence":
        logs = [max(-20.0, min(20.0, sum(logs)))] * len(logs)
    elif level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    bound = {
        "none": lambda r: r,
        "truncate": lambda r: min(r, high),
        "clip": lambda r: max(low, min(high, r)),
        "mask": lambda r: r if low <= r <= high else 0.0,
    }[mode]
    return [bound(math.exp(log)) for log in logs]


def m2po_keep(tokens: list[Token], harmful_only: bool, tau: float) -> list[bool]:
    """Drop the largest square, and all equal to it, while the mean of the rest is not below tau."""
    square = [((t.logp if harmful_only else t.prox) - t.behav) ** 2 for t in tokens]
    moved = [t.logp > t.behav if t.adv > 0 else t.logp < t.behav for t in tokens]
    candidate = [t.trained and (not harmful_only or (t.adv != 0 and m)) for t, m in zip(tokens, moved, strict=True)]
    left = [i for i, c in enumerate(candidate) if c]
    while left and sum(square[i] for i in left) / len(left) >= tau:
        largest = max(square[i] for i in left)
        left = [i for i in left if square[i] != largest]
    return [t.trained and (not c or i in left) for i, (t, c) in enumerate(zip(tokens, candidate, strict=True))]
