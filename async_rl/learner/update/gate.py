"""The KL gate: training that runs away from the reference policy is paused, something is done about it, and it goes on.

running -> paused, at `gate_patience` steps in a row above the gate -> the action -> on probation -> running, once the KL is
below `gate_resume_ratio` of the gate. A frozen policy keeps its KL, so a bare pause would never end: it is on probation,
training, that the KL can fall. If it stays above for as many steps again, the pause and the action come again, at most
MAX_ACTIONS times in one alarm.

Owns what the actions change, the learning rate's scale and the KL's coefficient, and knows which checkpoints are from
before an alarm. Pure: no clock, no I/O. Invariant: a checkpoint holds all of it, so a resumed run is steered as it was.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from async_rl.algorithms.kl import KLGate, adaptive_beta
from async_rl.config.algorithm import KLConfig
from async_rl.learner.update.steering import Steering

MAX_ACTIONS = 3  # in one alarm
NUM_SOUND = 3  # versions remembered to go back to: the newest, and others should its checkpoint be damaged


class Phase(IntEnum):
    RUNNING = 0
    PAUSED = 1
    PROBATION = 2


class Gate:
    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.steering = Steering(kl_beta=config.beta)
        self.kl = math.nan  # the newest, in nats per answer
        self.num_actions = 0  # in this alarm
        self.sound: tuple[int, ...] = ()  # versions with a checkpoint whose own KL let training run, oldest first
        self._alarm = KLGate()  # "paused" in its sense: from the pause to the end of probation
        self._since_action = KLGate()  # in an alarm: "paused" until the action, then counts anew
        self._saved = self._saved_as = -1  # version of the newest checkpoint, and the newest that is the same policy

    @property
    def phase(self) -> Phase:
        if not self._alarm.paused:
            return Phase.RUNNING
        return Phase.PAUSED if self._since_action.paused else Phase.PROBATION

    @property
    def exhausted(self) -> bool:
        """Paused once more than there are actions for."""
        return self.phase is Phase.PAUSED and self.num_actions >= MAX_ACTIONS

    def measured(self, kl: float, version: int, num_answers: int) -> None:
        """A step on `num_answers` answers found the policy of `version` at this KL, nats per answer; NaN is above any gate."""
        c, self.kl = self.config, kl
        if c.target is not None:
            beta = adaptive_beta(self.steering.kl_beta, kl, target=c.target, horizon=c.horizon, num_steps=num_answers)
            self.steering = Steering(self.steering.lr_scale, beta)
        if c.gate is None:
            return
        was, options = self._alarm, {"threshold": c.gate, "patience": c.gate_patience, "resume_ratio": c.gate_resume_ratio}
        self._alarm = was.step(kl, **options)
        self._since_action = self._since_action.step(kl, **options) if was.paused else self._alarm
        if not self._alarm.paused:
            self.num_actions = 0
        if self._alarm == KLGate() and version == self._saved_as and self._saved not in self.sound:
            self.sound = (*self.sound, self._saved)[-NUM_SOUND:]

    def unchanged(self, version: int) -> None:
        """The step from `version` to the next measured nothing and left the policy as it was."""
        if version == self._saved_as:
            self._saved_as = version + 1

    def saved(self, version: int) -> None:
        """There is a checkpoint of this version, the newest, or one has been begun, see `lost`; whether it is sound shows when
        its KL is measured."""
        self._saved = self._saved_as = version

    def lost(self, version: int) -> None:
        """The checkpoint that was begun of this version could not be written."""
        self.sound = tuple(sound for sound in self.sound if sound != version)
        if self._saved == version:
            self._saved = self._saved_as = -1

    @property
    def spared(self) -> set[int]:
        """The version whose checkpoint must outlast an alarm."""
        return set(self.sound[-1:])

    def act(self) -> None:
        """The pause is over: change what the action changes, and go on on probation."""
        lr_scale, beta = self.steering.lr_scale, self.steering.kl_beta
        if self.config.gate_action == "halve_lr":
            lr_scale /= 2
        elif self.config.gate_action == "double_beta":
            beta *= 2
        self.steering = Steering(lr_scale, beta)
        self.num_actions += 1
        self._since_action = KLGate()

    def forgive(self) -> None:
        """The run ends here. Whoever starts it again has looked at it: it goes on on probation, with all its actions."""
        self.num_actions, self._since_action = 0, KLGate()

    def why(self) -> str:
        """What is wrong, in one clause."""
        c = self.config
        return (
            f"the KL to the reference is {self.kl:.3g} nats per answer, above algorithm.kl.gate={c.gate:g} for "
            f"{c.gate_patience} steps in a row (gate_patience)"
        )

    def verdict(self) -> str:
        """The last words of a run whose actions did not help."""
        c = self.config
        before = f" (the newest from before the alarm is of version {self.sound[-1]})" if self.sound else ""
        return (
            f"{self.why()}, and gate_action={c.gate_action}, {self.num_actions} times, did not end the alarm: start the run "
            f"again with a lower learner.lr, a higher algorithm.kl.beta or another gate, or from an older checkpoint{before}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "configured_beta": self.config.beta,
            "beta": self.steering.kl_beta,
            "lr_scale": self.steering.lr_scale,
            "kl": self.kl,
            "num_actions": self.num_actions,
            "sound": list(self.sound),
            "alarm": self._alarm._asdict(),
            "since_action": self._since_action._asdict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as it was saved; what the configuration says anew about beta or the gate counts from now on."""
        same_beta = state["configured_beta"] == self.config.beta
        self.steering = Steering(float(state["lr_scale"]), float(state["beta"]) if same_beta else self.config.beta)
        self.kl, self.sound = float(state["kl"]), tuple(int(version) for version in state["sound"])
        if self.config.gate is not None:
            self.num_actions = int(state["num_actions"])
            self._alarm, self._since_action = KLGate(**state["alarm"]), KLGate(**state["since_action"])
