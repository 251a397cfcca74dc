"""The training loop: rank 0 leads (`Trainer`), the other ranks follow (`follow`); both readable on one screen.

Owns the version counter. The training thread never touches a socket and never waits without serving gathers, saying
IDLE to the other ranks, and looking whether the run can still go on. Invariant: `version` changes only between
`before_update` and `end_update`, while nothing reads the weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from async_rl.config import Config
from async_rl.data.evaluation import Evaluation
from async_rl.data.record import Record
from async_rl.learner.checkpoints.best import Best
from async_rl.learner.checkpoints.checkpoint import CheckpointError, problem_of, step_folder
from async_rl.learner.commands import IDLE_S, Code, Commands
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.failure import RunFailed
from async_rl.learner.pause import Pause
from async_rl.learner.rank import Rank
from async_rl.learner.report.progress import Progress
from async_rl.learner.report.recorder import Recorder
from async_rl.learner.saver import Saver
from async_rl.learner.signals import Stop
from async_rl.learner.update.assemble import assemble
from async_rl.learner.update.gate import Gate, Phase
from async_rl.learner.update.shaping import RewardShaping
from async_rl.learner.update.step import StepReport
from async_rl.observability.waiting import waiting
from async_rl.types import Prompt, WeightName

T = TypeVar("T")
POLL_S, TELL_S = 0.1, 30.0
IDENTITY_NATS = 1e-3  # rounding is far below, a bug in the scoring far above
SEQ_KL = "kl_ref/seq_sum"


def follow(rank: Rank) -> None:
    """Ranks other than 0: do what rank 0 commands, with it, until END."""
    while True:
        code, argument = rank.commands.receive()
        if code is Code.STEP:
            batch, steering, gathers = rank.scatter(None), rank.steer(None), rank.follow_gathers
            rank.train(batch, argument, steering, boundary=gathers, before_update=gathers)
        elif code is Code.GATHER:
            rank.source.gather(argument)
        elif code is Code.SAVE:
            rank.saving.follow()
            rank.save(argument, None)
        elif code is Code.ROLL_BACK:
            rank.saving.follow()
            with contextlib.suppress(CheckpointError):  # rank 0 has the same one, and ends the run
                rank.roll_back(argument)
        elif code is Code.END:
            rank.saving.follow()
            return


@dataclass
class Trainer:
    """Rank 0."""

    config: Config
    rank: Rank
    control: ControlPlane
    publisher: Publisher
    progress: Progress
    heldout: list[Prompt]
    stop: Stop
    version: int
    saver: Saver
    best: Best
    gate: Gate
    shaping: RewardShaping
    recorder: Recorder | None = None
    skipped_in_a_row: int = 0
    identity_lost: bool = False  # and told
    train_through: bool = False  # the running evaluation has a rollout of its own
    reached: str = ""  # which evaluation reached eval.target: the run ends

    def __post_init__(self) -> None:
        run_dir, kl = self.progress.run_dir, self.config.algorithm.kl
        self._pause = Pause(kl, self.gate, self.control, run_dir, self._wait)

    @property
    def commands(self) -> Commands:
        return self.rank.commands

    def run(self) -> None:
        """From the current version to `num_steps` or `eval.target`. Raises RunFailed or RunStopped."""
        self._save_origin()
        # With a target also after a resume: the run may have ended by it.
        if self.version == 0 or self.version >= self.config.num_steps or self.config.eval.target is not None:
            self.evaluate(wait=True)
        while self._goes_on:
            if self.gate.phase is not Phase.PAUSED:  # or the run is resumed in a pause
                self.step(self.next_batch())
            if self.gate.phase is Phase.PAUSED and self._goes_on:
                self.pause()
            self.maybe_save()
            if self._due(self.config.eval.every) and self.version < self.config.num_steps:
                self.evaluate(wait=False)
        if not self.reached:
            self.evaluate(wait=True)
        self.save()
        self.saver.finish()
        if self.saver.saved != self.version:
            raise RunFailed(4, f"all steps are done, but the checkpoint of version {self.version} could not be written")

    @property
    def _goes_on(self) -> bool:
        return self.version < self.config.num_steps and not self.reached and not self.control.exhausted

    # ---- one step

    def next_batch(self) -> list[Record]:
        """The oldest groups the staleness rule lets this version have."""
        with self.control.changed:
            self.control.cancel_stale(self.version)
        what = f"{self.control.ledger.rules.groups_per_step(self.version)} groups for version {self.version + 1}"
        started = time.monotonic()
        records = self._wait(lambda: self.control.ledger.take(self.version), what, self._why_no_batch)
        self.progress.waited("batch", time.monotonic() - started)
        if self.recorder is not None:
            self.recorder.batch(self.version, records)
        return records

    def step(self, records: list[Record]) -> None:
        started = time.monotonic()
        batch, metrics = assemble(records, self.version, self.config, self.shaping)
        self.commands.issue(Code.STEP, self.version)
        batch, steering, had_critic = self.rank.scatter(batch), self.rank.steer(self.gate.steering), bool(self.rank.critic)
        report = self.rank.train(batch, self.version, steering, boundary=self._boundary, before_update=self._before_update)
        if self.rank.critic and not had_critic:
            self.progress.notice(f"at version {self.version} {self.rank.critic.told}")
        steered = self._watch_kl(report, batch.num_trajectories)
        with self.control.changed:
            if report.skipped:
                self.control.ledger.drop([record.group_id for record in records], "skipped")
            else:
                self.version += 1
                self.control.trained(records, self.version)
                if self._due(self.config.eval.every) and self.config.eval.draws > 0:
                    self.control.evaluation_due = self.version
            self.publisher.end_update(self.version)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if report.skipped else 0
        metrics |= report.metrics | steered
        self._check_identity(report)
        metrics["time/train_s"] = time.monotonic() - started
        self.progress.step(self.version, metrics, self.control, self.publisher, report.reason if report.skipped else "")
        if self.skipped_in_a_row >= self.config.learner.max_skipped_steps:
            raise RunFailed(
                4,
                f"{self.skipped_in_a_row} steps in a row changed nothing at version {self.version} "
                f"(learner.max_skipped_steps): {report.reason}",
            )

    def _check_identity(self, report: StepReport) -> None:
        """The first mini-batch is scored by the very weights that gave the proximal log-probs: its ratios must be 1."""
        off = report.metrics.get("ppo/first_minibatch_max_abs_log_r", 0.0)
        if off > IDENTITY_NATS and not self.identity_lost:
            self.identity_lost = True
            self.progress.notice(
                f"a ratio of the first mini-batch is {off:.2g} nats off 1 at version {self.version}, where it must be 1: "
                "scoring does not repeat itself here, and clip fractions mean less (ppo/first_minibatch_max_abs_log_r)"
            )

    def _watch_kl(self, report: StepReport, num_answers: int) -> dict[str, float]:
        """Show the gate the KL of the policy before this step; what the row says of the steering in it and the gate after it.
        A step that could not measure it, and changed nothing of the policy, says nothing of it."""
        if not self.config.algorithm.has_reference:
            return {}
        steering, was = self.gate.steering, self.gate.phase
        if report.warm_up and not report.skipped:
            self.gate.unchanged(self.version)
        elif SEQ_KL in report.metrics or not report.skipped:
            self.gate.measured(report.metrics.get(SEQ_KL, math.nan), self.version, num_answers)
        phase = self.gate.phase
        if phase is Phase.PAUSED:
            self._pause.forget()
        if was is not Phase.RUNNING and phase is Phase.RUNNING:
            self.progress.notice(f"the KL gate's alarm is over at version {self.version}: {self.gate.kl:.3g} nats per answer")
        return {"kl/beta": steering.kl_beta, "lr_scale": steering.lr_scale, "kl_gate/state": int(phase)}

    def _boundary(self) -> None:
        """Before each micro-batch, on all ranks: hand over what the publisher asks for, then go on."""
        while (k := self.publisher.port.wanted) is not None:
            self._gather(k)
        self.commands.issue(Code.PROCEED)

    def _before_update(self) -> None:
        """Before each optimizer step, on all ranks: nothing may still read the weights.

        A signal is heeded after the step: the other ranks are in it, and a checkpoint of half a step would be none.
        """
        started = time.monotonic()
        what = "the weights to be sent before the next optimizer step"
        self._wait(self.publisher.begin_update, what, stoppable=False)
        self.progress.waited("publish", time.monotonic() - started)
        self.commands.issue(Code.PROCEED)

    def _gather(self, k: int) -> None:
        self.commands.issue(Code.GATHER, k)
        bucket = self.rank.source.gather(k)
        assert bucket is not None, "rank 0 receives every gathered bucket"
        self.publisher.port.put(bucket)

    # ---- the KL gate

    def pause(self) -> None:
        """Until what the runaway policy sampled is gone and the gate's action is done; then training is on probation."""
        if self.gate.exhausted and self.control.replayed:  # the recorded run ended here, and its next life went on
            self.gate.forgive()
            return
        if self.gate.exhausted:
            self._end(self.gate.verdict(), forgive=True)
        started = time.monotonic()
        self.progress.notice(self._pause.notice(self.version))
        num_dropped = self._pause.drain()
        self._finish_evaluation()  # or its rollout would serve the runaway policy for longer
        if self.reached:
            return
        action = self.config.algorithm.kl.gate_action
        if action == "wait" and not self._pause.asked():
            self._end(f"{self.gate.why()}, and nobody said within gate_timeout_s that training goes on: start the run again")
        if action == "roll_back":
            self._roll_back()
        self.gate.act()
        lr_scale, beta = self.gate.steering.lr_scale, self.gate.steering.kl_beta
        self.progress.notice(
            f"training goes on on probation after gate_action={action}: lr_scale {lr_scale:g}, kl.beta {beta:g}, "
            f"{num_dropped} groups of the paused policy were dropped"
        )
        # before that, leases would be born at the version that ran away
        self._wait(lambda: self.publisher.published >= self.version, f"a rollout to serve version {self.version}", self._who)
        self._pause.end()
        self.progress.waited("gate", time.monotonic() - started)

    def _roll_back(self) -> None:
        """The newest checkpoint from before the alarm becomes the next version: the number never goes back."""
        for version in reversed(self.gate.sound):
            problem = problem_of(step_folder(self.rank.checkpointer.directory, version))
            if not problem:
                break
            self.progress.notice(f"the checkpoint of version {version} cannot be rolled back to: {problem}")
        else:
            self._end(f"{self.gate.why()}, and there is no checkpoint from before that to roll back to", forgive=True)
        self._await_save()
        self._wait(self.publisher.begin_update, "the weights to be sent before they are rolled back")
        self.commands.issue(Code.ROLL_BACK, version)
        try:
            self.rank.roll_back(version)
        except CheckpointError as e:
            raise RunFailed(4, f"training could not be rolled back: {e}") from None
        with self.control.changed:
            self.version += 1
            self.control.ledger.trained([], self.version)  # by a step that took nothing
            self.publisher.end_update(self.version)
        self.progress.notice(f"rolled back: version {self.version} is version {version} again")

    def _end(self, sentence: str, forgive: bool = False) -> NoReturn:
        """Save, and fail. `forgive`: the next life trains at once, for what ends this one would end that, too."""
        if forgive:
            self.gate.forgive()
        self.save()
        self.saver.finish()
        saved = self.saver.saved
        saved = f"the newest checkpoint is of version {saved}" if saved >= 0 else "no checkpoint could be written"
        raise RunFailed(4, f"{sentence}; {saved}")

    def _save_origin(self) -> None:
        """A checkpoint of version 0, so that there is always something to roll back to."""
        kl = self.config.algorithm.kl
        if kl.gate is not None and kl.gate_action == "roll_back" and self.version == 0:
            self.save()

    # ---- evaluation and checkpoints

    def evaluate(self, wait: bool) -> None:
        """Greedy answers to the held-out draws, all by the current version. Rollouts never wait for it; training does when
        it must (`wait`, or a single rollout), and otherwise goes on."""
        if self.config.eval.draws == 0 or self.progress.evaluated == self.version:
            return
        self._finish_evaluation()
        if self.reached:
            return
        name = WeightName(self.control.identity.incarnation, self.version)
        with self.control.changed:
            self.control.evaluation_due = self.version
        self._wait(lambda: self.publisher.published >= self.version, f"a rollout to serve {name}", self._who)
        self.progress.evaluated = self.version
        deadline_s = time.monotonic() + self.config.eval.timeout_s
        evaluation = Evaluation(self.heldout, self.config.eval.draws, self.config.seed, name, deadline_s)
        with self.control.changed:
            self.train_through = self.control.begin_evaluation(evaluation)
        if self.config.checkpoint.keep_best and self.version > 0:
            self.save()
            if self.saver.newest == self.version:
                self.best.begin(self.version, complete=self.saver.saved == self.version)
        if wait or not self.train_through:
            self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        started = time.monotonic()
        self._wait(lambda: self.control.evaluation is None, "the evaluation", self._who)
        self.progress.waited("eval", time.monotonic() - started)

    def _settle_evaluation(self) -> None:
        """Under the lock, in every turn of every wait: close an evaluation that is done, late, or has lost its rollout."""
        evaluation = self.control.evaluation
        if evaluation is None:
            return
        lost = self.train_through and not any(m.excused for m in self.control.members)
        now = time.monotonic()
        if evaluation.done or lost or now > evaluation.deadline_s:
            self.control.end_evaluation()
            self.progress.evaluation(evaluation, self.config.eval.timeout_s - (evaluation.deadline_s - now))
            self._judge(evaluation)

    def _judge(self, evaluation: Evaluation) -> None:
        """A whole evaluation may make its checkpoint the best, and may end the run: a part of the draws must not."""
        version, accuracy, target = evaluation.name.version, evaluation.accuracy, self.config.eval.target
        counts = evaluation.missing == 0 and math.isfinite(accuracy)
        self.best.judge(version, accuracy if counts else None)
        if counts and target is not None and accuracy >= target:
            self.reached = f"held-out accuracy {accuracy:.3f} of version {version} reached eval.target={target:g}"
        elif not counts and (target is not None or self.config.checkpoint.keep_best):
            self.progress.notice(f"the evaluation of version {version} is not whole: it counts for no target and no best")

    def _due(self, every: int) -> bool:
        return every > 0 and self.version % every == 0

    def maybe_save(self) -> None:
        self.saver.look()
        if self._due(self.config.checkpoint.every) and self.version < self.config.num_steps:
            self.save()

    def save(self) -> None:
        """Begin a checkpoint of the current version, unless there is one, or one is being written."""
        if self.saver.newest != self.version:
            started = time.monotonic()
            self._await_save()
            self.progress.waited("save", time.monotonic() - started)
            self.saver.begin(self.version)

    def _await_save(self) -> None:
        """At most one checkpoint is in progress, and a roll back may need it."""
        if not self.saver.ready():
            self._wait(self.saver.ready, "the checkpoint in progress to be written")
        self.saver.look()

    # ---- waiting

    def _wait(
        self, ready: Callable[[], T | None], what: str, detail: Callable[[], str] | None = None, stoppable: bool = True
    ) -> T:
        """The first true result of `ready`, called under the lock; meanwhile gathers are served and IDLE is said.

        A long wait is told on the console, too, and again whenever it has doubled.
        """
        said_idle = started = time.monotonic()
        tell_after_s = TELL_S
        with waiting(what, detail):
            while True:
                with self.control.changed:
                    if stoppable:
                        self.stop.raise_if_asked()
                    self.control.raise_if_hopeless(time.monotonic())
                    self._settle_evaluation()
                    result = ready()
                    if result:
                        return result
                    if self.publisher.port.wanted is None:
                        self.control.changed.wait(POLL_S)
                    k = self.publisher.port.wanted
                if k is not None:
                    self._gather(k)
                elif time.monotonic() - said_idle > IDLE_S:
                    said_idle = time.monotonic()
                    self.commands.issue(Code.IDLE)
                if time.monotonic() - started > tell_after_s:
                    why = f": {detail()}" if detail else ""
                    self.progress.notice(f"waiting for {tell_after_s:.0f} s for {what}{why}")
                    tell_after_s *= 2

    def _why_no_batch(self) -> str:
        with self.control.changed:
            return f"{self.control.ledger.why_not(self.version, time.monotonic())}; {self._who()}"

    def _who(self) -> str:
        with self.control.changed:
            return self.control.members.why_not_live()
