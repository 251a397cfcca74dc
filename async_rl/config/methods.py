"""The options of each method by name: what `advantage_options`, `loss_options`, ... may hold, with their defaults.

Owns the names that a configuration may use; the functions behind them are the registries of async_rl.algorithms, and a test
compares the two. Defaults are those of the papers, see algorithms/ for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from async_rl.config.section import Section, refused

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


def _at_most_1(ratio: float) -> float:
    if ratio > 1:
        raise refused("must be at most 1, the ratio of a token that the policy itself sampled")
    return ratio


def _at_least_1(ratio: float) -> float:
    if ratio < 1:
        raise refused("must be at least 1, the ratio of a token that the policy itself sampled")
    return ratio


Low = Annotated[float, Field(ge=0), AfterValidator(_at_most_1)]  # bounds of a ratio
High = Annotated[float, AfterValidator(_at_least_1)]


class NoOptions(Section):
    pass


# ---- advantages


class GroupStd(Section):
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """1 divides the squares by n - 1, as verl and TRL do; 0 by n."""


class Returns(Section):
    gamma: Share = 1.0
    """Discount per sampled token."""


class Gae(Section):
    gamma: Share = 1.0
    """Discount per sampled token."""
    lam_policy: Share | Literal["adaptive"] = "adaptive"
    """Lambda of the advantages; adaptive is `1 - 1 / (alpha length)`, arXiv:2504.05118."""
    alpha: Positive = 0.05
    """Of the adaptive lambda."""
    lam_value: Share = 1.0
    """Lambda of the critic's targets; 1 lets the reward reach the first token."""
    whiten: bool = True
    """Advantages of mean 0 and std 1 over the tokens of the batch."""


class Vtrace(Section):
    gamma: Share = 1.0
    """Discount per sampled token."""
    lam: Share = 1.0
    """Lambda of targets and advantages."""
    rho_bar: High = 1.05
    """Cap of the ratio in a TD error; at least c_bar."""
    c_bar: High = 1.05
    """Cap of the ratio in a trace. Above 1, or the engine's rounding shortens traces."""
    max_trace: Annotated[float, Field(ge=1)] = 2.0
    """Cap of every product of ratios along a trace."""
    weighted: bool = False
    """Advantages times the ratio, for a loss without a weight of its own (`ppo`)."""
    whiten: bool = True
    """Advantages of mean 0 and std 1 over the tokens of the batch."""


class Hybrid(Section):
    grpo_end: Share = 0.2
    """Share of the steps that are pure GRPO."""
    ppo_start: Share = 0.7
    """Share of the steps after which all is PPO; in between both are blended, each of unit std."""
    critic_start: Share = 0.0
    """Share of the steps after which the critic is made and trained: early, or it has nothing to say when its time comes."""
    clip_start: Positive = 0.3
    """Clip range when the blend begins; eps_low and eps_high of the loss are scaled by it over clip_end."""
    clip_end: Positive = 0.2
    """Clip range of pure PPO, where eps_low and eps_high are as they are set."""
    ddof: Annotated[int, Field(ge=0, le=1)] = 1
    """Of the groups' std."""
    gamma: Share = 1.0
    """Discount per sampled token."""
    lam_policy: Share | Literal["adaptive"] = "adaptive"
    """As for `gae`."""
    alpha: Positive = 0.05
    """As for `gae`."""
    lam_value: Share = 1.0
    """As for `gae`."""


ADVANTAGES: dict[str, type[Section]] = {
    "grpo": GroupStd,
    "dr_grpo": NoOptions,
    "grpo_batch_std": GroupStd,
    "rloo": NoOptions,
    "opo": NoOptions,
    "remax": NoOptions,
    "reinforce_pp": Returns,
    "reinforce_pp_baseline": NoOptions,
    "gae": Gae,
    "vtrace": Vtrace,
    "hybrid": Hybrid,
}

# ---- losses


class Clip(Section):
    eps_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip of the ratio below 1."""
    eps_high: Positive = 0.28
    """Clip of the ratio above 1."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound of the loss for negative advantages, in units of the advantage; null turns it off."""


class Gspo(Section):
    eps_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Clip of the answer's mean ratio below 1."""
    eps_high: Positive = 4e-4
    """Clip of the answer's mean ratio above 1."""


class Cispo(Section):
    low: Low = 0.0
    """Lower bound of the ratio that weighs a token."""
    high: High = 5.0
    """Upper bound of it; a ratio, not an offset from 1."""


class Aipo(Section):
    delta: High = 2.0
    """Upper bound of the ratio to the behavior policy."""


class Sapo(Section):
    tau_pos: Positive = 1.0
    """Steepness of the gate where the advantage is above 0."""
    tau_neg: Positive = 1.05
    """Steepness of the gate elsewhere."""


class DppoTv(Section):
    tv_high: Share = 0.2
    """Furthest that a probability may have risen for a token with advantage above 0."""
    tv_low: Share = 0.2
    """Furthest that it may have fallen for one with advantage below."""
    kl_tau: Annotated[float, Field(ge=0)] = 1e-3
    """Coefficient of the squared log-ratio."""


class Kimi(Section):
    tau: Positive = 0.1
    """Coefficient of the squared log-ratio of an answer."""


LOSSES: dict[str, type[Section]] = {
    "ppo": Clip,
    "bypass_ppo": Clip,
    "decoupled_ppo": Clip,
    "gspo": Gspo,
    "cispo": Cispo,
    "aipo": Aipo,
    "topr": NoOptions,
    "sapo": Sapo,
    "dppo_tv": DppoTv,
    "kimi_k15": Kimi,
    "kimi_pmd": Kimi,
}

# ---- corrections and masks


class Cap(Section):
    high: High = 2.0
    """Upper bound of the weight."""


class ClipTo(Section):
    low: Low = 0.5
    """Lower bound of the weight."""
    high: High = 2.0
    """Upper bound of the weight."""


class TokenRange(Section):
    low: Low = 0.5
    """Smallest ratio that is kept."""
    high: High = 5.0
    """Largest ratio that is kept."""


class SequenceRange(Section):
    low: Low = 0.0
    """Smallest product of ratios that is kept."""
    high: High = 3.0
    """Largest product of ratios that is kept."""


class GeometricRange(Section):
    low: Low = 0.99
    """Smallest mean ratio (geometric) that is kept."""
    high: High = 1.01
    """Largest mean ratio that is kept."""


CORRECTIONS: dict[str, type[Section]] = {
    "none": NoOptions,
    "token_none": NoOptions,
    "token_truncate": Cap,
    "token_clip": ClipTo,
    "token_mask": TokenRange,
    "sequence_none": NoOptions,
    "sequence_truncate": Cap,
    "sequence_clip": ClipTo,
    "sequence_mask": SequenceRange,
    "geometric_none": NoOptions,
    "geometric_truncate": Cap,
    "geometric_clip": ClipTo,
    "geometric_mask": GeometricRange,
}


class Veto(Section):
    threshold: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """An answer with a ratio below this at any token is dropped."""


class K3Range(Section):
    low: Annotated[float, Field(ge=0, le=0)] | None = None
    """Smallest mean k3 that is kept; null or 0: any. Above 0 it would drop the answers of the policy itself."""
    high: Positive = 0.01
    """Largest mean k3 that is kept, in nats."""


class Opsm(Section):
    delta: Positive = 0.5
    """Mean drift, in nats per token, beyond which an answer with negative advantage is dropped."""


class M2po(Section):
    tau: Positive = 0.04
    """The largest squared log-ratios are dropped until the mean of the rest is below this."""


MASKS: dict[str, type[Section]] = {
    "veto": Veto,
    "icepop": TokenRange,
    "sequence_product": SequenceRange,
    "sequence_geomean": GeometricRange,
    "sequence_k3_mean": K3Range,
    "opsm": Opsm,
    "m2po": M2po,
    "m2po_all": M2po,
}

# ---- rewards


class Normalizer(Section):
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the past in the running moments."""
    clip: Positive = 5.0
    """Bound of a normalised reward."""
    scale_only: bool = True
    """Divide by the std but leave the mean: to subtract one that moves shifts what a critic must learn."""
    min_std: Positive = 1e-2
    """Smallest divisor."""


NORMALIZERS: dict[str, type[Section]] = {"none": NoOptions, "ema": Normalizer, "debiased_ema": Normalizer}


def completed(kind: str, name: str, given: Any, table: Mapping[str, type[Section]]) -> dict[str, Any]:
    """The options of a method with its defaults filled in. Raises PydanticCustomError, one sentence, for what it does not
    take; an unknown name is left to the field that holds it."""
    if name not in table:
        return given if isinstance(given, dict) else {}
    if not isinstance(given, dict):
        raise refused(f"algorithm.{kind}_options is {given!r}: it holds options by name")
    return validated(f"algorithm.{kind}_options", f"algorithm.{kind}={name}", given, table[name])


def validated(key: str, method: str, given: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Raises PydanticCustomError that names key, method and what it takes."""
    try:
        return section.model_validate(given).model_dump()
    except ValidationError as e:
        first = e.errors()[0]
        option = str(first["loc"][0]) if first["loc"] else ""
        known = ", ".join(section.model_fields) or "no options"
        if first["type"] == "extra_forbidden":
            raise refused(f"{key} holds {option!r}, but {method} takes {known}") from None
        raise refused(f"{key}.{option} is {first['input']!r}: {first['msg']}") from None
