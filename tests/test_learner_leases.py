"""Seeds of leases: over a whole run, lost attempts, restarts and epochs included, no two samples share their noise."""

from __future__ import annotations

import asyncio

import numpy as np

from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.leases import training_lease
from async_rl.learner.control.sizes import BySchedule
from async_rl.rollout.scheduler import sample_seed
from async_rl.rollout.toy_engine import Script, ToyEngine
from async_rl.transport.codec import decode_group, encode_group
from async_rl.transport.messages import Lease
from async_rl.types import Sampling, WeightName

from .ledger_samples import make_group, make_prompt, make_rules
from .scripted_members import make_config

CONFIG = make_config()


def leases_of_a_run(num_steps: int = 60) -> list[tuple[str, Lease]]:
    """(rollout, lease) of two rollouts over many epochs of 4 prompts; one leaves, leases expire, the learner restarts."""
    rules = make_rules(num_steps=num_steps, max_attempts=50)
    ledger = Ledger(rules, 1, 0)
    dealer = Dealer(PromptStream([make_prompt(i) for i in range(4)], seed=0), BySchedule(CONFIG), greedy=False)
    given: list[tuple[str, Lease]] = []
    version = 0
    for turn in range(4 * num_steps):
        if version == num_steps:
            break
        now = 100.0 * turn
        if turn % 9 == 5:  # the learner dies and comes back
            state = ledger.state_dict(encode_group)
            ledger = Ledger(rules, turn + 2, version)
            ledger.load_state_dict(state, decode_group)
        records = []
        for rollout_id in ("a#1", "b#2"):
            ledger.committed(rollout_id, version)
        while True:
            granted = [(i, ledger.grant(i, dealer.deal, now)) for i in ("a#1", "b#2")]
            records += [(i, record) for i, record in granted if record is not None]
            if not any(record for _, record in granted):
                break
        given += [(i, training_lease(CONFIG, record)) for i, record in records]
        if turn % 4 == 1:
            ledger.expire(now + 50)
        elif turn % 4 == 3:
            ledger.leave("a#1", now)
        for _, record in records:
            ledger.accept(make_group(record, [version], record.attempt.incarnation), 50, now)
        taken = ledger.take(version)
        if taken:
            version += 1
            ledger.trained([record.group_id for record in taken], version)
    assert version == num_steps
    return given


def test_no_two_attempts_and_no_two_samples_share_a_seed():
    leases = [lease for _, lease in leases_of_a_run()]
    keys = {(lease.group_id, lease.attempt) for lease in leases}
    assert len(keys) == len(leases) > 150
    assert len({lease.attempt[0] for lease in leases}) > 3 and any(lease.attempt[1] > 0 for lease in leases)
    assert len({lease.seed for lease in leases}) == len(leases)
    assert len({sample_seed(lease.seed, i) for lease in leases for i in range(8)}) == 8 * len(leases)


def test_another_seed_of_the_run_gives_other_seeds_to_the_same_groups():
    first = {lease.seed for _, lease in leases_of_a_run(10)}
    record = Ledger(make_rules(), 1, 0)
    record.committed("a#1", 0)
    granted = record.grant("a#1", lambda step: (make_prompt(0), 2), 0.0)
    assert granted is not None
    assert training_lease(CONFIG, granted).seed in first
    assert training_lease(make_config(seed=1), granted).seed not in first


def test_a_lease_asks_for_the_answers_of_its_record_at_every_attempt():
    ledger = Ledger(make_rules(), 1, 0)
    ledger.committed("a#1", 0)
    first = ledger.grant("a#1", lambda step: (make_prompt(0), 5), 0.0)
    assert first is not None
    plain, remax = training_lease(CONFIG, first), training_lease(make_config(algorithm={"advantage": "remax"}), first)
    assert (plain.num_samples, plain.greedy, remax.num_samples, remax.greedy) == (5, False, 5, True)
    assert remax.temperature == plain.temperature == CONFIG.rollout.temperature
    ledger.expire(1000.0)
    again = ledger.grant("a#1", lambda step: (make_prompt(1), 7), 0.0)
    assert again is not None and again.attempt.n == 1 and training_lease(CONFIG, again).num_samples == 5


async def test_two_rollouts_answer_the_same_prompt_differently():
    """Two engines with the same weights, each with every lease of one prompt that its rollout got."""
    by_rollout: dict[str, list[Lease]] = {"a#1": [], "b#2": []}
    for rollout_id, lease in leases_of_a_run():
        if lease.prompt_id == "p0":
            by_rollout[rollout_id].append(lease)
    answers: list[tuple[int, ...]] = []
    for leases in by_rollout.values():
        assert len(leases) > 5
        engine = ToyEngine({}, Script(), max_model_len=512, serving=WeightName(1, 0))
        samples = [
            engine.generate(
                np.array(lease.prompt_ids, np.int32), Sampling(30, 1.0, seed=sample_seed(lease.seed, i)), f"{n}.{i}"
            )
            for n, lease in enumerate(leases)
            for i in range(2)
        ]
        answers += [tuple(c.token_ids.tolist()) for c in await asyncio.gather(*samples)]
    assert len(set(answers)) == len(answers)
