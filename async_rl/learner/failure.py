"""Why a run ends early: an exit code and one sentence."""

from __future__ import annotations


class RunFailed(Exception):
    """Ends the run; `code` becomes the exit code (3 rollouts gone, 4 training failed, 5 books do not balance)."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class RunStopped(Exception):
    """A signal asked for the end; `code` is 128 + signal number."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
