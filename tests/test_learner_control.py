"""Control plane and publisher against scripted members: who is admitted, leased, served, expelled."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from async_rl.data.evaluation import Evaluation
from async_rl.learner.control.plane import TICK_S
from async_rl.learner.failure import RunFailed
from async_rl.transport.messages import Ack, Error, Goodbye, Heartbeat, Lease, Staged
from async_rl.types import WeightName

from .ledger_samples import make_prompt
from .scripted_members import RemoteReceiver, Rollout, Scene, make_config

pytestmark = pytest.mark.timeout(60)


def _said(rollout: Rollout, kind: type) -> list:
    return [m for m in rollout.messages if isinstance(m, kind)]


def test_a_joining_rollout_gets_the_weights_bit_for_bit_before_its_first_lease() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        scene.until("leases", lambda: len(rollout.leases) >= 4)
        assert torch.equal(rollout.received["w"], scene.weights[0][1])
        kinds = [type(m).__name__ for m in rollout.messages if not isinstance(m, Heartbeat)]
        assert kinds.index("Commit") < kinds.index("Lease")
        assert len(rollout.leases) == 4, "the window of max_staleness 1 is two steps of two groups"


def test_a_rollout_built_from_another_config_is_told_both_digests_and_never_joins() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0", config_digest="another")
        (refusal,) = scene.until("refusal", lambda: _said(rollout, Error))
        assert refusal.code == "fatal"
        assert "another" in refusal.text and "config" in refusal.text
        assert len(scene.control.members) == 0


def test_a_second_process_under_the_name_of_one_that_lives_is_put_off_then_refused() -> None:
    with Scene() as scene:
        first = Rollout(scene, "a", pid=11)
        scene.until("leases", lambda: len(first.leases) >= 4)
        twin = Rollout(scene, "a", pid=12, peer="twin")
        (put_off,) = scene.until("an answer", lambda: _said(twin, Error))
        assert put_off.code == "refused", "the first may have died: nobody knows yet"
        time.sleep(0.25)
        twin.say(twin.hello)
        told = scene.until("a refusal", lambda: _said(twin, Error)[1:])[0]
        assert told.code == "fatal"
        assert "a with pid 12 was refused: a#1, pid 11, has the name a and lives: choose another --name" in scene.notices
        assert [m.pid for m in scene.control.members] == [11]
        assert not _said(first, Error) and not twin.leases


def test_a_process_takes_the_name_of_one_that_has_fallen_silent() -> None:
    with Scene(make_config(transport={"heartbeat_timeout_s": 20.0})) as scene:
        dead = Rollout(scene, "a", pid=11)
        scene.until("leases", lambda: len(dead.leases) >= 4)
        dead.freeze()
        time.sleep(0.5)
        successor = Rollout(scene, "a", pid=12, peer="successor")
        scene.until("its leases", lambda: len(successor.leases) >= 4)
        assert [m.pid for m in scene.control.members] == [12]


def test_a_process_that_comes_back_over_another_connection_keeps_its_name() -> None:
    with Scene() as scene:
        before = Rollout(scene, "a", pid=11)
        scene.until("leases", lambda: len(before.leases) >= 4)
        again = Rollout(scene, "a", pid=11, peer="again")
        scene.until("its leases again", lambda: len(again.leases) >= 4)
        assert [m.rollout_id for m in scene.control.members] == ["a#2"]
        assert "no rollout is left: waiting 1 s (rollout.timeout_s) for one to join" in scene.notices


def test_a_peer_that_never_said_hello_is_told_to() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        scene.until("join", lambda: rollout.rollout_id)
        scene.hub.listeners[b"stranger"] = rollout.messages.append
        scene.hub.say(b"stranger", Heartbeat())
        errors = scene.until("answer", lambda: _said(rollout, Error))
        assert errors[0].code == "rejoin"


def test_a_second_name_over_one_connection_replaces_the_first_and_is_served() -> None:
    with Scene() as scene:
        first = Rollout(scene, "a")
        scene.until("leases", lambda: len(first.leases) >= 4)
        second = Rollout(scene, "b", peer="a")
        scene.until("its leases", lambda: len(second.leases) >= 4)
        time.sleep(1.5)  # longer than the heartbeat timeout: the first must not take the connection with it
        assert [m.name for m in scene.control.members] == ["b"] and not _said(second, Error)


def test_replies_for_memberships_that_never_were_do_not_pile_up() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "a")
        scene.until("leases", lambda: len(rollout.leases) >= 4)
        for membership in range(1000, 1200):
            rollout.say(Staged(membership=membership, version=7))
        scene.until("all heard", lambda: ("staged", "a#1") in scene.control.replies)
        time.sleep(0.2)
        with scene.control.changed:
            assert len(scene.control.replies) <= 4
        rollout.say(Goodbye(reason="done"))
        scene.until("it to leave", lambda: not len(scene.control.members))
        assert not scene.control.replies


@pytest.mark.parametrize("beats", [False, True], ids=["frozen", "with heartbeats"])
@pytest.mark.parametrize("phase", ["prepared", "staged", "committed"])
def test_a_member_silent_in_a_phase_is_expelled_and_the_publish_completes_on_the_others(phase: str, beats: bool) -> None:
    with Scene() as scene:
        good = Rollout(scene, "good")
        scene.until("good serving", lambda: len(good.leases) >= 4)
        bad = Rollout(scene, "bad", silent_at=phase, beats=beats)
        scene.until("expulsion", lambda: any("bad#" in n and "expelled" in n for n in scene.notices))
        scene.until("nobody reading the weights", scene.publisher.begin_update)
        scene.publisher.end_update(1)  # the next version
        scene.until("version 1", lambda: scene.publisher.published == 1)
        member = scene.control.members.named("good")
        assert member is not None
        assert member.committed == 1
        assert not bad.leases
        assert scene.control.members.named("bad") is None
        assert not any("good#" in notice and "expelled" in notice for notice in scene.notices), "the innocent is not blamed"


def test_a_rollout_that_keeps_the_others_waiting_again_and_again_is_told_to_exit() -> None:
    with Scene(make_config(transport={"heartbeat_timeout_s": 20.0})) as scene:  # it is not for silence that it is expelled
        good = Rollout(scene, "good")
        scene.until("good serving", lambda: len(good.leases) >= 4)
        for attempt in range(3):
            bad = Rollout(scene, "bad", silent_at="prepared", beats=True)
            told = scene.until(f"expulsion {attempt}", lambda bad=bad: [e for e in _said(bad, Error) if "expelled" in e.text])
        assert told[-1].code == "fatal"


def test_a_member_killed_while_weights_are_sent_costs_the_survivors_nothing() -> None:
    sending, killed = threading.Event(), threading.Event()

    def before_bucket(k: int) -> None:
        if k == 1 and sending.is_set():
            killed.wait(20)

    config = make_config(weights={"phase_timeout_s": 20.0, "bucket_bytes": 4096}, transport={"heartbeat_timeout_s": 2.0})
    with Scene(config, before_bucket) as scene:
        rollouts = [Rollout(scene, name, receiver=RemoteReceiver) for name in ("a", "b", "c")]
        scene.until("all serving", lambda: [m.committed for m in scene.control.members] == [0, 0, 0], 60)
        sending.set()
        scene.until("nobody reading the weights", scene.publisher.begin_update)
        scene.publisher.end_update(1)
        scene.until("bucket 1 of version 1", lambda: scene.publisher.port.wanted == 1)
        rollouts[1].kill()
        sending.clear()
        killed.set()
        scene.until("version 1", lambda: scene.publisher.published == 1, 60)
        assert sorted((m.name, m.committed) for m in scene.control.members) == [("a", 1), ("c", 1)]
        expelled = [notice for notice in scene.notices if "expelled" in notice]
        assert len(expelled) == 1 and "b#" in expelled[0]


def test_a_member_whose_connection_breaks_at_once_again_and_again_is_found_and_told_to_exit() -> None:
    with Scene(make_config(transport={"heartbeat_timeout_s": 20.0})) as scene:
        good = Rollout(scene, "good")
        scene.until("good serving", lambda: len(good.leases) >= 4)
        bad = Rollout(scene, "bad", silent_at="broken")
        other = Rollout(scene, "other")
        scene.until("refusal", lambda: [e for e in _said(bad, Error) if e.code == "fatal"], 50)
        scene.until("the other serving", lambda: [m.committed for m in scene.control.members] == [0, 0])
        assert not _said(good, Error) and not _said(other, Error)


@pytest.mark.parametrize("reason", ["token_out_of_vocabulary", "too_long"])
def test_a_group_that_no_honest_rollout_would_send_is_refused_by_name_and_leased_again(reason: str) -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        scene.until("leases", lambda: len(rollout.leases) >= 4)
        scene.control.screen.vocab_size = 3 if reason == "token_out_of_vocabulary" else 1000
        rollout.deliver(rollout.leases[0], [0] * (5 if reason == "token_out_of_vocabulary" else 9))
        (ack,) = scene.until("ack", lambda: _said(rollout, Ack))
        assert (ack.outcome, ack.reason) == ("refused", reason)
        assert scene.control.events[f"refused/{reason}"] == 1
        group_id = rollout.leases[0].group_id
        scene.until("another lease", lambda: any(lease.group_id == group_id for lease in rollout.leases[4:]))


def test_a_checksum_that_differs_expels_for_good() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0", checksum="0123456789abcdef")
        (told,) = scene.until("refusal", lambda: _said(rollout, Error))
        assert told.code == "fatal"
        assert "checksum" in told.text and "0123456789abcdef" in told.text
        assert not rollout.leases


def test_leases_of_a_rollout_that_leaves_go_to_another_under_the_next_attempt() -> None:
    with Scene() as scene:
        first = Rollout(scene, "first")
        scene.until("leases", lambda: len(first.leases) >= 4)
        second = Rollout(scene, "second")
        scene.until("second serving", lambda: [m.committed for m in scene.control.members] == [0, 0])
        first.say(Goodbye(reason="enough"))
        scene.until("the leases again", lambda: len(second.leases) >= 4)
        assert {lease.group_id for lease in second.leases} == {lease.group_id for lease in first.leases}
        assert all(lease.attempt == (1, 1) for lease in second.leases)
        assert {lease.seed for lease in second.leases}.isdisjoint(lease.seed for lease in first.leases)


def test_a_silent_rollout_is_expelled_after_the_heartbeat_timeout() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        scene.until("leases", lambda: len(rollout.leases) >= 4)
        rollout.freeze()
        scene.until("expulsion", lambda: any("silent" in notice for notice in scene.notices), timeout_s=5)
        assert scene.ledger.books()["groups"]["waiting"] == 4


def test_a_delivery_is_acknowledged_once_accepted_and_as_duplicate_the_second_time() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        lease: Lease = scene.until("lease", lambda: rollout.leases)[0]
        rollout.deliver(lease, [0, 0])
        rollout.deliver(lease, [0, 0])
        scene.until("both acks", lambda: len(_said(rollout, Ack)) == 2)
        assert [ack.outcome for ack in _said(rollout, Ack)] == ["accepted", "duplicate"]


def test_a_group_without_two_scored_answers_is_dropped_counted_and_replaced() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        lease: Lease = scene.until("lease", lambda: len(rollout.leases) >= 4 and rollout.leases)[0]
        rollout.deliver(lease, [0, 0], rewards=(math.nan, 1.0))
        scene.until("a replacement", lambda: len(rollout.leases) == 5)
        assert scene.control.events["groups_dropped_unscorable"] == 1
        assert scene.ledger.books()["groups"]["dropped"]["failed"] == 1


def test_when_every_group_fails_the_run_is_hopeless_and_says_why() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "rollout-0")
        for done in range(8):  # max_refill 4 times 2 groups per step
            lease = scene.until("lease", lambda done=done: len(rollout.leases) > done and rollout.leases[done])
            rollout.deliver(lease, [0], rewards=(math.nan, math.nan))
        scene.until("all counted", lambda: scene.control.screen.failed_in_a_row == 8)
        with pytest.raises(RunFailed, match="unscorable"):
            scene.control.raise_if_hopeless(time.monotonic())


def test_without_any_rollout_the_wait_ends_with_a_sentence_that_names_the_key() -> None:
    with Scene(make_config(rollout={"start_timeout_s": 0.2})) as scene:
        time.sleep(0.4)
        with pytest.raises(RunFailed, match=r"rollout.start_timeout_s.*no rollout is connected") as failed:
            scene.control.raise_if_hopeless(time.monotonic())
        assert failed.value.code == 3


def test_an_optimizer_step_waits_until_nothing_reads_the_weights() -> None:
    with Scene() as scene:
        Rollout(scene, "rollout-0")
        scene.until("a send in progress", lambda: scene.publisher.sending)
        assert not scene.publisher.begin_update()
        scene.until("the end of the send", scene.publisher.begin_update)
        late = Rollout(scene, "late")
        scene.until("join", lambda: late.rollout_id)
        time.sleep(0.5)
        assert not scene.publisher.sending, "no send starts between begin_update and end_update"
        scene.publisher.end_update(1)
        scene.until("version 1 everywhere", lambda: [m.committed for m in scene.control.members] == [1, 1])


def _evaluation(num: int) -> Evaluation:
    return Evaluation([make_prompt(i) for i in range(20)], num, 0, WeightName(1, 0), time.monotonic() + 30)


def test_with_several_rollouts_one_evaluates_its_version_while_the_others_get_the_next() -> None:
    with Scene() as scene:
        rollouts = [Rollout(scene, "a"), Rollout(scene, "b")]
        scene.until("both serving", lambda: [m.committed for m in scene.control.members] == [0, 0])
        evaluation = _evaluation(6)
        with scene.control.changed:
            assert scene.control.begin_evaluation(evaluation)
            (evaluator,) = [m for m in scene.control.members if m.excused]
            scene.publisher.end_update(1)
        pinned, other = sorted(rollouts, key=lambda r: r.rollout_id != evaluator.rollout_id)
        scene.until("version 1 on the other", lambda: scene.publisher.published == 1)
        assert evaluator.committed == 0
        leases = scene.until("its leases", lambda: len(_evals(pinned)) == 6 and _evals(pinned))
        assert not _evals(other)
        for lease in leases:
            pinned.deliver(lease, [0], rewards=(1.0,))
        scene.until("all answers", lambda: evaluation.done)
        assert evaluation.accuracy == 1.0
        with scene.control.changed:
            scene.control.end_evaluation()
        scene.until("version 1 on both", lambda: [m.committed for m in scene.control.members] == [1, 1])


def test_synchronous_training_samples_nothing_from_before_an_evaluation_begins_to_its_end() -> None:
    with Scene(make_config(max_staleness=0)) as scene:
        scene.control.evaluation_due = 0
        rollout = Rollout(scene, "a")
        scene.until("serving", lambda: [m.committed for m in scene.control.members] == [0])
        time.sleep(5 * TICK_S)
        assert not rollout.leases, "an evaluation is due first"
        evaluation = _evaluation(2)
        with scene.control.changed:
            assert not scene.control.begin_evaluation(evaluation)
        for lease in scene.until("leases", lambda: len(_evals(rollout)) == 2 and _evals(rollout)):
            rollout.deliver(lease, [0], rewards=(1.0,))
        scene.until("both answers", lambda: evaluation.done)
        time.sleep(5 * TICK_S)
        assert rollout.leases == _evals(rollout)
        with scene.control.changed:
            scene.control.end_evaluation()
        scene.until("training", lambda: len(rollout.leases) > 2)


def test_an_answer_by_another_version_is_counted_as_mixed_and_not_used() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "a")
        scene.until("serving", lambda: rollout.leases)
        evaluation = _evaluation(2)
        with scene.control.changed:
            assert not scene.control.begin_evaluation(evaluation), "a single rollout: training waits"
        first, second = scene.until("leases", lambda: len(_evals(rollout)) == 2 and _evals(rollout))
        rollout.deliver(first, [0, 0], rewards=(0.0,))
        rollout.deliver(second, [0, 1], rewards=(1.0,))
        scene.until("both answers", lambda: evaluation.done)
        assert (evaluation.accuracy, evaluation.mixed) == (0.0, 1)


def test_a_group_of_the_wrong_size_is_refused_and_leased_again() -> None:
    with Scene() as scene:
        rollout = Rollout(scene, "a")
        lease = scene.until("lease", lambda: rollout.leases)[0]
        rollout.deliver(lease, [0], rewards=(1.0,))
        (ack,) = scene.until("ack", lambda: _said(rollout, Ack))
        assert (ack.outcome, ack.reason) == ("refused", "group_size")
        scene.until("the next attempt", lambda: any(again.attempt == (1, 1) for again in rollout.leases))


def _evals(rollout: Rollout) -> list[Lease]:
    return [lease for lease in rollout.leases if lease.split == "eval"]
