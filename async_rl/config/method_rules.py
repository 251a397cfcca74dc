"""What cannot be right in `algorithm`, whatever the model: methods that need what is not there, or that undo each other.

Owns those sentences; each names key, value and fix.
"""

from __future__ import annotations

import math

from async_rl.config.schema import Config

Rules = list[tuple[bool, str]]  # (broken, sentence)

SIBLINGS = {"grpo", "dr_grpo", "grpo_batch_std", "rloo", "opo", "reinforce_pp_baseline", "hybrid"}
SCALE_FREE = {"grpo", "grpo_batch_std", "reinforce_pp", "reinforce_pp_baseline"}  # any scale of the rewards cancels out
BY_TOKEN = {"gae", "vtrace", "reinforce_pp"}  # advantages that can take a reward at each token
OWN_RATIO = {"bypass_ppo", "aipo", "topr", "sapo", "dppo_tv", "kimi_k15", "kimi_pmd"}  # they look at the behavior policy
OF_ANSWERS = {"topr", "kimi_k15", "kimi_pmd"}
WHOLE_BATCH_MASKS = {"m2po", "m2po_all"}


def method_rules(c: Config) -> Rules:
    return [*_advantages(c), *_hybrid(c), *_staleness(c), *_reference(c), *_group_sizes(c)]


def _advantages(c: Config) -> Rules:
    a, vtrace = c.algorithm, c.algorithm.advantage_options
    smallest, size_key = min(
        (c.group_size, "group_size"),
        (c.group_size_end or c.group_size, "group_size_end"),
        (min(c.adaptive_group_sizes or (c.group_size,)), "the smallest of adaptive_group_sizes"),
        key=lambda named: named[0],
    )
    hybrid = a.advantage == "hybrid"
    fewest = c.groups_per_step * c.group_size // max(c.group_size, c.group_size_end or 0)  # of any step
    return [
        (
            smallest < 2 and a.advantage in SIBLINGS,
            f"{size_key} is {smallest}, but algorithm.advantage={a.advantage} compares siblings: use 2 or more",
        ),
        (
            a.advantage == "vtrace" and vtrace["weighted"] and a.loss != "ppo",
            f"algorithm.advantage_options.weighted is true, but algorithm.loss={a.loss} weighs tokens itself, and the "
            "importance "
            "ratio would count twice: set it to false, or use loss=ppo",
        ),
        (
            a.advantage == "vtrace" and vtrace["c_bar"] > vtrace["rho_bar"],
            f"algorithm.advantage_options.c_bar is {vtrace.get('c_bar')}, above rho_bar={vtrace.get('rho_bar')}: lower it",
        ),
        (
            a.loss in OF_ANSWERS and (a.advantage in BY_TOKEN or hybrid),
            f"algorithm.loss={a.loss} has one advantage per answer, but advantage={a.advantage} gives one per token: use "
            "dr_grpo",
        ),
        (
            a.normalizer != "none" and a.advantage in SCALE_FREE,
            f"algorithm.normalizer is {a.normalizer}, but advantage={a.advantage} divides by a std of its own, which undoes "
            "it: "
            "leave it out",
        ),
        (
            a.overlong_buffer_tokens > c.rollout.max_new_tokens,
            f"algorithm.overlong_buffer_tokens is {a.overlong_buffer_tokens}, more than "
            f"rollout.max_new_tokens={c.rollout.max_new_tokens}: lower it",
        ),
        (
            0 < fewest < a.num_minibatches,
            f"algorithm.num_minibatches is {a.num_minibatches}, more than the {fewest} groups of a step (groups_per_step)",
        ),
        (
            a.zero_variance != "keep" and (hybrid or a.advantage not in SIBLINGS),
            f"algorithm.zero_variance is {a.zero_variance}, but to advantage={a.advantage} equal rewards are a signal, too: "
            "use keep",
        ),
        (
            a.critic.warmup_steps > 0 and a.has_critic and a.critic.warmup_steps >= c.num_steps,
            f"algorithm.critic.warmup_steps is {a.critic.warmup_steps}, which leaves no step of num_steps={c.num_steps} to the "
            "policy: lower it",
        ),
    ]


def _hybrid(c: Config) -> Rules:
    if c.algorithm.advantage != "hybrid":
        return []
    a, o = c.algorithm, c.algorithm.advantage_options
    born = math.ceil(o["critic_start"] * c.num_steps)
    factor = o["clip_start"] / o["clip_end"]
    scaled = a.loss_options.get("eps_low", 0.0) * max(1.0, factor)
    return [
        (
            born >= c.num_steps,
            f"algorithm.advantage_options.critic_start is {o['critic_start']}, but none of num_steps={c.num_steps} begins as "
            "late, so no critic would be trained: lower it, or raise num_steps",
        ),
        (
            0 < a.critic.warmup_steps <= born,
            f"algorithm.critic.warmup_steps is {a.critic.warmup_steps}, but with critic_start={o['critic_start']} the critic "
            f"is made at step {born}, after them: leave it out, or raise it above {born}",
        ),
        (
            not 0.1 <= factor <= 10,
            f"algorithm.advantage_options.clip_start is {o['clip_start']}, which scales the clip range by {factor:.3g}: use "
            f"between a tenth and ten times clip_end={o['clip_end']}",
        ),
        (
            scaled >= 1,
            f"algorithm.advantage_options.clip_start is {o['clip_start']}, which over clip_end={o['clip_end']} scales eps_low "
            f"to {scaled:.3g}, and from 1 on nothing is clipped below: lower it, or algorithm.loss_options.eps_low",
        ),
        (
            o["grpo_end"] >= o["ppo_start"],
            f"algorithm.advantage_options.grpo_end is {o['grpo_end']}, not below ppo_start={o['ppo_start']}: lower it",
        ),
        (
            o["critic_start"] > o["grpo_end"],
            f"algorithm.advantage_options.critic_start is {o['critic_start']}, but the critic is used "
            "from "
            f"grpo_end={o['grpo_end']} on: start it earlier",
        ),
    ]


def _staleness(c: Config) -> Rules:
    a = c.algorithm
    corrected = a.correction != "none" or a.loss in OWN_RATIO or (a.advantage == "vtrace" and a.advantage_options["weighted"])
    once = a.proximal == "loglinear"
    whole = [name for name in a.masks if name in WHOLE_BATCH_MASKS]
    return [
        (
            a.loss in OWN_RATIO and a.correction != "none",
            f"algorithm.correction is {a.correction}, but loss={a.loss} has the importance ratio already, and it would count "
            "twice: use correction=none",
        ),
        (
            a.loss == "ppo" and a.correction != "none",
            f"algorithm.correction is {a.correction}, but loss=ppo takes no weight: use correction=none, or loss=decoupled_ppo",
        ),
        (
            c.max_staleness > 0 and not corrected and not c.i_know,
            f"max_staleness is {c.max_staleness} with algorithm.correction={a.correction} and loss={a.loss}: stale tokens "
            "need a "
            "correction, use token_truncate with decoupled_ppo or max_staleness=0, or say i_know=true for an ablation",
        ),
        (
            a.correction_normalize and a.correction == "none",
            "algorithm.correction_normalize is true, but there are no weights with correction=none: leave it out",
        ),
        (
            once and a.num_minibatches * a.num_epochs == 1,
            "algorithm.proximal is loglinear, but one optimizer step per batch has its proximal log-probs for nothing: "
            "leave it out, or raise num_minibatches or num_epochs",
        ),
        (
            once and bool(whole or a.correction_normalize or a.advantage == "vtrace" or _kl_in_reward(c)),
            "algorithm.proximal is loglinear, but masks over the whole batch, correction_normalize, vtrace and a KL in the "
            "reward look at all proximal log-probs before the first update: use recompute",
        ),
    ]


def _kl_in_reward(c: Config) -> bool:
    return c.algorithm.kl.beta > 0 and c.algorithm.kl.into == "reward"


def _reference(c: Config) -> Rules:
    a, kl = c.algorithm, c.algorithm.kl
    largest = max(c.adaptive_group_sizes or (c.group_size,))
    answers = c.groups_per_step * largest + c.most_groups * a.has_greedy  # at most, of a step
    horizon = answers // 5 + 1  # adaptive_beta clips its error at 0.2
    return [
        (
            _kl_in_reward(c) and a.advantage not in BY_TOKEN,
            f"algorithm.kl.into is reward, but advantage={a.advantage} has one reward per answer: use detached_k2, or an "
            "advantage "
            f"of {', '.join(sorted(BY_TOKEN))}",
        ),
        (
            kl.target is not None and kl.beta == 0,
            f"algorithm.kl.target is {kl.target}, but beta is 0, which no factor can raise: set algorithm.kl.beta, for example "
            "to 0.001",
        ),
        (
            kl.target is not None and kl.horizon < horizon,
            f"algorithm.kl.horizon is {kl.horizon}, but up to {answers} answers of a step move beta by a fifth of their share "
            f"of it, and it could turn 0 or negative: use {horizon} or more",
        ),
        (
            kl.gate is not None and kl.gate_action == "double_beta" and kl.beta == 0,
            "algorithm.kl.gate_action is double_beta, but algorithm.kl.beta is 0: set it, or choose another action",
        ),
        (
            kl.gate is not None and kl.gate_action == "roll_back" and c.checkpoint.every == 0,
            "algorithm.kl.gate_action is roll_back, but checkpoint.every is 0, so there is nothing to go back to: raise it",
        ),
    ]


def _group_sizes(c: Config) -> Rules:
    start, end, sizes = c.group_size, c.group_size_end, c.adaptive_group_sizes
    small, large = sorted((start, end or start))
    too_small = end is not None and small < 2
    doubled = large % small == 0 and (large // small).bit_count() == 1
    return [
        (
            too_small,
            f"{'group_size' if start < 2 else 'group_size_end'} is {small}, but with group_size_end all sizes are 2 or more: "
            "raise it",
        ),
        (
            not doubled,
            f"group_size_end is {end}, but group_size={start} gets there by doubling or halving: use {start} times a power "
            "of two",
        ),
        (
            (c.groups_per_step * start) % large != 0,
            f"group_size_end is {end}, but the {c.groups_per_step * start} answers of a step cannot be dealt to groups of "
            f"{large}: "
            "change groups_per_step",
        ),
        (
            sizes is not None and not 1 <= sizes[0] <= start <= sizes[1],
            f"adaptive_group_sizes is {sizes}, but must be a range around group_size={start}",
        ),
        (
            sizes is not None and end is not None,
            "adaptive_group_sizes and group_size_end are both set: groups can follow one of them",
        ),
    ]
