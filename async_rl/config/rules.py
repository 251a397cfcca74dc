"""What cannot be right in a configuration, whatever the model: combinations that are refused before anything is loaded.

Owns those sentences; each names key, value and fix.
"""

from __future__ import annotations

from async_rl.config.effect_rules import effect_rules
from async_rl.config.method_rules import Rules, method_rules
from async_rl.config.schema import Config

LOOPBACK = ("127.", "localhost", "::1")


def impossible(c: Config) -> Rules:
    """Every rule with whether it is broken."""
    return [*_sizes(c), *_learning(c), *method_rules(c), *effect_rules(c), *_places(c), *_data(c)]


def _sizes(c: Config) -> Rules:
    window = c.most_groups * (c.max_staleness + 1)
    return [
        (
            c.rollout.max_new_tokens >= c.model.max_model_len,
            f"rollout.max_new_tokens is {c.rollout.max_new_tokens}, which leaves no room for a prompt within "
            f"model.max_model_len={c.model.max_model_len}: lower the one or raise the other",
        ),
        (
            c.learner.microbatch_tokens < c.model.max_model_len,
            f"learner.microbatch_tokens is {c.learner.microbatch_tokens}, less than one answer of "
            f"model.max_model_len={c.model.max_model_len} tokens: raise it to at least that",
        ),
        (
            c.max_group_bytes > c.transport.max_message_bytes,
            f"transport.max_message_bytes is {c.transport.max_message_bytes}, but one group can take {c.max_group_bytes}: "
            "raise it",
        ),
        (
            window * c.max_group_bytes > c.transport.max_buffered_bytes,
            f"transport.max_buffered_bytes is {c.transport.max_buffered_bytes}, but a full window of {window} groups can take "
            f"{window * c.max_group_bytes}: raise it",
        ),
    ]


def _learning(c: Config) -> Rules:
    return [
        (
            c.learner.warmup_fraction + c.learner.hold_fraction > 1,
            "learner.warmup_fraction + learner.hold_fraction is more than 1: lower one",
        ),
    ]


def _places(c: Config) -> Rules:
    return [
        (
            c.transport.host in ("0.0.0.0", "::", "*", ""),
            f"transport.host is '{c.transport.host}', which no rollout could connect to: give the address of one interface",
        ),
        (
            not c.transport.insecure and c.transport.keys is None and not c.transport.host.startswith(LOOPBACK),
            f"transport.host is {c.transport.host}, beyond loopback without keys: make them with `async-rl keys DIR` and set "
            "transport.keys=DIR, keep 127.0.0.1, or set transport.insecure=true on a network you trust",
        ),
        (
            c.learner.ranks % c.learner.replicas != 0,
            f"learner.replicas is {c.learner.replicas}, which does not divide learner.ranks={c.learner.ranks}: "
            "change one of them",
        ),
        (
            c.transport.heartbeat_timeout_s <= 2 * c.transport.heartbeat_s,
            f"transport.heartbeat_timeout_s is {c.transport.heartbeat_timeout_s}, too close to heartbeat_s="
            f"{c.transport.heartbeat_s}: use more than twice that",
        ),
    ]


def _data(c: Config) -> Rules:
    return [
        (
            c.data.heldout_path is not None and c.data.path is None,
            "data.heldout_path is set without data.path: name the file to train on, too",
        ),
        (
            c.data.system is not None and not c.data.chat,
            "data.system is set, but data.chat is false: a system message needs the chat template, set data.chat=true",
        ),
        (
            c.eval.draws > 0 and c.data.heldout_fraction == 0 and c.data.heldout_path is None,
            f"data.heldout_fraction is 0, but eval.draws={c.eval.draws} asks for held-out prompts: raise it, name a "
            "data.heldout_path, or set eval.draws=0",
        ),
        (
            c.eval.draws == 0 and (c.eval.target is not None or c.checkpoint.keep_best),
            "eval.draws is 0, but eval.target and checkpoint.keep_best need evaluations: set eval.draws, for example to 512",
        ),
    ]
