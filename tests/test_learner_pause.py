"""Training that runs away: what a pause does to groups, weights and checkpoints, how it ends, and how a run resumes in it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.learner import trainer as trainer_module
from async_rl.learner.checkpoints.checkpoint import checkpoints, step_of
from async_rl.learner.commands import Code
from async_rl.learner.update.gate import Phase
from async_rl.learner.update.steering import Steering

from .training_scene import WARM_UP, Training, make_config

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
HIGH, LOW = 20.0, 1.0
PAUSED, GOES_ON = "training is paused", "training goes on on probation"


def make_training(folder: Path, *kls: float | str | None, incarnation: int = 1, **kl: Any) -> Training:
    """From version 0 on, each step measures the next of `kls`, and those after them 1 nat."""
    return Training(folder, dict(enumerate(kls)), make_config(folder, **kl), incarnation=incarnation)


def assert_books_balance(training: Training, *, trained: int) -> int:
    """Returns how many groups were skipped."""
    groups, books = training.groups(), training.ledger.books()
    assert books["balanced"] and groups["trained"] == trained
    assert groups["waiting"] == groups["leased"] == groups["ready"] == groups["taken"] == 0
    assert groups["granted"] == groups["trained"] + sum(groups["dropped"].values())
    return groups["dropped"]["skipped"]


def states(training: Training) -> list[int]:
    return [row["kl_gate/state"] for row in training.rows()]


def result(training: Training) -> dict[str, Any]:
    return json.loads((training.folder / "result.json").read_text())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder / "checkpoints")]


def test_a_pause_drops_what_the_runaway_policy_sampled_and_training_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, HIGH, 7.0, LOW, gate_patience=1)  # of the first four leases, one step takes two
    books: list[dict[str, Any]] = []
    training.on_notice[GOES_ON] = lambda: books.append(training.groups())
    assert training.train(monkeypatch, delay_s=0.05) == (0, "finished", "8 steps done")
    (drained,) = books
    assert drained["waiting"] == drained["leased"] == drained["ready"] == drained["taken"] == 0
    assert drained["dropped"]["skipped"] == drained["granted"] - drained["trained"] >= 2
    assert assert_books_balance(training, trained=16) == drained["dropped"]["skipped"], "nothing is skipped outside the pause"
    assert states(training) == [1, 2, 0, 0, 0, 0, 0, 0]
    assert [row["lr_scale"] for row in training.rows()] == [1.0] + [0.5] * 7
    assert [training.steered[v] for v in (0, 1)] == [Steering(1.0, 0.0), Steering(0.5, 0.0)]
    assert result(training)["kl_pauses"] == 1 and result(training)["idle_s"]["gate"] > 0
    paused, goes_on, over = [notice for notice in training.notices if "KL" in notice or "probation" in notice]
    assert paused.startswith("training is paused at version 1: the KL to the reference is 20 nats per answer, above ")
    assert "gate_action=halve_lr, 1 of 3" in paused and "lr_scale 0.5" in goes_on
    assert over == "the KL gate's alarm is over at version 2: 1 nats per answer"


def test_a_long_wait_is_told_on_the_console_and_again_when_it_has_doubled(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trainer_module, "TELL_S", 0.5)
    training = Training(tmp_path, {}, make_config(tmp_path), lease_timeout_s=4.0, answered=3)
    training.on_notice["waiting for 1 s"] = lambda: setattr(training, "answered", 1000)
    assert training.train(monkeypatch)[:2] == (0, "finished")
    told = [notice for notice in training.notices if notice.startswith("waiting")]
    assert told[0].startswith("waiting for 0 s for 2 groups for version 2: 1/2 ready, ") and "for 1 s" in told[1]


def test_a_group_that_never_comes_holds_a_pause_up_until_its_lease_ends(tmp_path: Path, monkeypatch: Any) -> None:
    config = make_config(tmp_path, gate_patience=1)
    training = Training(tmp_path, {0: HIGH}, config, lease_timeout_s=3.0, answered=3)  # of four, before the pause at version 1
    training.on_notice[GOES_ON] = lambda: setattr(training, "answered", 1000)
    assert training.train(monkeypatch)[:2] == (0, "finished")
    assert training.ledger.books()["attempts"]["expired"] > 0
    assert_books_balance(training, trained=16)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_roll_back_restores_every_weight_and_moment_under_a_new_version(tmp_path: Path, monkeypatch: Any, keep: int) -> None:
    training = make_training(tmp_path, LOW, LOW, LOW, HIGH, HIGH, gate_action="roll_back")
    training.trainer.rank.checkpointer.keep = keep
    on_disk: list[list[int]] = []
    training.on_notice[PAUSED] = lambda: (training.saver.finish(), on_disk.append(saved(tmp_path)))
    served: list[dict[str, torch.Tensor]] = []
    training.on_step[6] = lambda: served.append(dict(training.rollout.received))
    assert training.train(monkeypatch) == (0, "finished", "8 steps done")
    assert 2 in on_disk[0] and max(on_disk[0]) == 4, "pruning spares the newest from before the alarm"
    assert "rolled back: version 6 is version 2 again" in training.notices
    assert not equal(training.held[4], training.held[2])
    assert equal(training.held[6], training.held[2])
    assert [row["version"] for row in training.rows()] == [1, 2, 3, 4, 5, 7, 8], "the number goes on"
    assert states(training) == [0, 0, 0, 0, 1, 0, 0]
    assert all(torch.equal(value, training.held[2][name]) for name, value in served[0].items()), "and rollouts serve it"
    born = [lease.born[1] for lease in training.rollout.leases]
    assert 5 not in born and set(born) <= {0, 1, 2, 3, 4, 6, 7} and born == sorted(born)
    assert_books_balance(training, trained=14)


def test_an_alarm_soon_after_the_start_goes_back_to_version_0(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, LOW, HIGH, HIGH, gate_action="roll_back")
    assert training.train(monkeypatch)[0] == 0
    assert equal(training.held[4], training.held[0]) and "rolled back: version 4 is version 0 again" in training.notices


def test_a_second_roll_back_in_one_alarm_takes_no_checkpoint_of_that_alarm(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, LOW, LOW, HIGH, HIGH, gate_action="roll_back")
    training.kls |= {5: HIGH, 6: HIGH}
    assert training.train(monkeypatch)[0] == 0
    rolled = [notice for notice in training.notices if notice.startswith("rolled back")]
    assert rolled == ["rolled back: version 5 is version 1 again", "rolled back: version 8 is version 1 again"]
    assert equal(training.tensors(), training.held[1]) and result(training)["kl_pauses"] == 2


def test_steps_that_warm_up_a_critic_are_no_alarm_and_a_roll_back_goes_to_before_them(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, WARM_UP, WARM_UP, WARM_UP, LOW, HIGH, HIGH, gate_action="roll_back")
    assert training.train(monkeypatch)[0] == 0
    assert states(training)[:6] == [0, 0, 0, 0, 0, 1] and result(training)["kl_pauses"] == 1
    assert "rolled back: version 7 is version 3 again" in training.notices
    assert equal(training.held[7], training.held[0])


def test_a_damaged_checkpoint_is_passed_over_and_without_any_the_run_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: Any
) -> None:
    training = make_training(tmp_path, LOW, LOW, HIGH, HIGH, gate_action="roll_back")
    training.on_notice[PAUSED] = lambda: (training.saver.finish(), shutil.rmtree(tmp_path / "checkpoints"))
    code, status, reason = training.train(monkeypatch)
    assert (code, status) == (4, "failed")
    assert "there is no checkpoint from before that to roll back to; the newest checkpoint is of version 4" in reason
    assert any(
        n.startswith("the checkpoint of version 1 cannot be rolled back to: it cannot be read") for n in training.notices
    )


def test_three_actions_that_do_not_help_end_the_run_with_a_checkpoint_from_which_it_can_be_tried_again(
    tmp_path: Path, monkeypatch: Any
) -> None:
    training = make_training(tmp_path, *[HIGH] * 8)
    training.trainer.config = training.config.model_copy(update={"num_steps": 10})
    code, status, reason = training.train(monkeypatch)
    assert (code, status) == (4, "failed")
    assert "the KL to the reference is 20 nats per answer, above algorithm.kl.gate=10" in reason
    assert "gate_action=halve_lr, 3 times, did not end the alarm" in reason and "checkpoint is of version 8" in reason
    assert states(training) == [0, 1, 2, 1, 2, 1, 2, 1] and saved(tmp_path)[-1] == 8
    again = make_training(tmp_path, incarnation=2)
    assert (again.gate.phase, again.gate.num_actions, again.gate.steering.lr_scale) == (Phase.PROBATION, 0, 1 / 8)


class Told:
    """Somebody who touches the file a while after the pause began, and what the ledger held until then."""

    def __init__(self, training: Training, after_s: float) -> None:
        self.training, self.after_s = training, after_s
        self.granted: list[int] = []
        training.on_notice[PAUSED] = lambda: threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        deadline = time.monotonic() + 10
        control, ledger = self.training.control, self.training.ledger
        while (control.admitting or ledger.oldest_lease(0.0)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2):
            self.granted.append(self.training.groups()["granted"])
            time.sleep(self.after_s)
        (self.training.folder / "continue").touch()


def test_a_pause_that_waits_grants_nothing_and_goes_on_at_a_touch(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, HIGH, HIGH, gate_action="wait", gate_timeout_s=30)
    (tmp_path / "continue").touch()  # of another time: it does not count
    told = Told(training, 0.4)
    assert training.train(monkeypatch)[:2] == (0, "finished")
    assert len(told.granted) == 2 and told.granted[0] == told.granted[1]
    assert not (tmp_path / "continue").exists()
    assert f"`touch {tmp_path}/continue` goes on; in 30 s (gate_timeout_s) the run is saved and ends" in " ".join(
        training.notices
    )
    assert training.gate.steering == Steering() and result(training)["idle_s"]["gate"] >= 0.8
    assert_books_balance(training, trained=16)


def test_nobody_says_anything_and_the_run_is_saved_and_ends(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, HIGH, HIGH, gate_action="wait", gate_timeout_s=0.3)
    code, status, reason = training.train(monkeypatch)
    assert (code, status) == (4, "failed") and saved(tmp_path)[-1] == 2
    assert "nobody said within gate_timeout_s that training goes on" in reason and reason.endswith("checkpoint is of version 2")
    assert_books_balance(training, trained=4)
    again = make_training(tmp_path, incarnation=2)
    assert again.gate.phase is Phase.PAUSED, "it waits again"


@pytest.mark.parametrize("when", ["draining", "asking"])
def test_a_signal_in_a_pause_saves_it_and_the_next_life_goes_on_in_it(tmp_path: Path, monkeypatch: Any, when: str) -> None:
    first = make_training(tmp_path, LOW, HIGH, HIGH, gate_action="wait", gate_timeout_s=30)
    if when == "draining":
        first.on_notice[PAUSED] = first.stop_by_signal
    else:
        first.on_notice[PAUSED] = lambda: threading.Timer(0.7, first.stop_by_signal).start()
    assert first.train(monkeypatch) == (143, "stopped", "stopped by SIGTERM; checkpoint of version 3")
    assert_books_balance(first, trained=6)
    second = make_training(tmp_path, incarnation=2, gate_action="wait", gate_timeout_s=30)
    assert second.gate.phase is Phase.PAUSED and second.trainer.version == 3
    Told(second, 0.1)
    assert second.train(monkeypatch)[:2] == (0, "finished")
    (paused,) = [notice for notice in second.notices if notice.startswith(PAUSED)]
    assert paused.startswith("training is paused at version 3: the KL to the reference is 20 nats")
    assert min(second.held) == 3 and states(second) == [0, 0, 1, 0, 0, 0, 0, 0]
    assert result(second)["kl_pauses"] == 1
    assert_books_balance(second, trained=16)


def test_a_run_resumed_on_probation_is_steered_and_watched_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    kl = {"gate_action": "double_beta", "beta": 0.1, "target": 6.0, "horizon": 1000}
    whole = make_training(tmp_path / "whole", HIGH, HIGH, 7.0, HIGH, HIGH, LOW, **kl)
    assert whole.train(monkeypatch)[0] == 0
    first = make_training(tmp_path / "cut", HIGH, HIGH, 7.0, HIGH, **kl)
    first.on_step[2] = first.stop_by_signal  # seen when that step is done
    assert first.train(monkeypatch)[1] == "stopped" and states(first) == [0, 1, 2]
    second = make_training(tmp_path / "cut", HIGH, HIGH, 7.0, HIGH, HIGH, LOW, incarnation=2, **kl)
    assert second.gate.phase is Phase.PROBATION and second.gate.num_actions == 1
    assert second.train(monkeypatch)[0] == 0
    assert states(second) == states(whole) == [0, 1, 2, 2, 1, 0, 0, 0]
    assert first.steered | second.steered == whole.steered and len({s.kl_beta for s in whole.steered.values()}) == 8


def test_a_step_that_changed_nothing_and_measured_nothing_is_no_step_above_or_below(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, HIGH)
    training.trainer.config = training.config.model_copy(
        update={"learner": training.config.learner.model_copy(update={"max_skipped_steps": 2})}
    )
    training.kls[1] = None
    training.on_notice["step after version 1 was skipped"] = lambda: training.kls.update({1: HIGH})
    assert training.train(monkeypatch)[0] == 0
    assert [(row["step"], row["kl_gate/state"]) for row in training.rows()][:3] == [(1, 0), (1, 0), (2, 1)]


def test_an_alarm_at_the_last_step_pauses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, *[LOW] * 6, HIGH, HIGH, gate_action="wait")
    assert training.train(monkeypatch) == (0, "finished", "8 steps done")
    assert states(training)[-1] == 1 and not any(n.startswith(PAUSED) for n in training.notices)


def test_without_a_reference_there_is_nothing_to_say_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    training = make_training(tmp_path, None, gated=False)
    training.kls = {}
    assert training.train(monkeypatch)[0] == 0
    assert not {"kl_gate/state", "kl/beta", "lr_scale"} & training.rows()[0].keys()
    assert (Code.ROLL_BACK, 0) not in training.commands.said and result(training)["kl_pauses"] == 0
