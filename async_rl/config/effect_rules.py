"""What is set in `algorithm` but has no effect beside the rest of it: refused, or a run would not be what its file says.

Owns those sentences; each names key, what it belongs to, and fix. A key at its default is not set: what a run writes down
says them all. `algorithm.critic` is exempt, for a file may hold it for several methods.
"""

from __future__ import annotations

from typing import Any

from async_rl.config.algorithm import KLConfig
from async_rl.config.methods import ADVANTAGES
from async_rl.config.schema import Config
from async_rl.config.section import Section

Rules = list[tuple[bool, str]]  # (broken, sentence)


def effect_rules(c: Config) -> Rules:
    return [*_kl(c.algorithm.kl), *_methods(c)]


def _kl(kl: KLConfig) -> Rules:
    gated = [(key, kl.gate is not None) for key in ("gate_patience", "gate_resume_ratio", "gate_action", "gate_timeout_s")]
    return [
        *[_unused(kl, "algorithm.kl.", key, kl.beta > 0, "algorithm.kl.beta is 0", "set beta") for key in ("into", "cap")],
        _unused(
            kl,
            "algorithm.kl.",
            "cap",
            kl.into not in ("reward", "attached_k3"),
            f"into={kl.into} has no cap",
            "use detached_k2 or straight_through_k3",
        ),
        _unused(kl, "algorithm.kl.", "horizon", kl.target is not None, "algorithm.kl.target is not set", "set target"),
        *[_unused(kl, "algorithm.kl.", key, used, "algorithm.kl.gate is not set", "set gate") for key, used in gated],
        _unused(
            kl,
            "algorithm.kl.",
            "gate_timeout_s",
            kl.gate_action == "wait",
            f"gate_action={kl.gate_action} waits for nobody",
            "use gate_action=wait",
        ),
    ]


def _methods(c: Config) -> Rules:
    a, o = c.algorithm, c.algorithm.advantage_options
    options = ADVANTAGES[a.advantage].model_construct(**o)
    adaptive = o.get("lam_policy", "adaptive") == "adaptive"
    clipped = "eps_low" in a.loss_options
    of = "algorithm.advantage_options."
    return [
        _unused(options, of, "alpha", adaptive, f"lam_policy={o.get('lam_policy')} is not adaptive", "use lam_policy=adaptive"),
        *[
            _unused(options, of, key, clipped, f"algorithm.loss={a.loss} has no clip range to scale", "use decoupled_ppo")
            for key in ("clip_start", "clip_end")
        ],
    ]


def _unused(section: Section, prefix: str, key: str, used: bool, why: str, fix: str) -> tuple[bool, str]:
    field = type(section).model_fields.get(key)
    if field is None:
        return False, ""
    value: Any = getattr(section, key)
    changed = value != field.get_default(call_default_factory=True)
    return changed and not used, f"{prefix}{key} is {value}, but has no effect, as {why}: {fix}, or leave {key} out"
