"""The dealer: which prompt is leased next, and how many answers are asked for.

Owns the block of prompts that is half handed out. Pure; call under the control plane's lock. Invariant: prompts go out in the
order of their stream, each once, also across a resume in the middle of a block and under another way to size groups. The
block holds sizes without the greedy answer, so that what waits in it is right with or without one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from async_rl.data.prompts import PromptStream
from async_rl.data.record import pack_prompt, unpack_prompt
from async_rl.learner.control.sizes import Sizes
from async_rl.types import Prompt


class Dealer:
    """`greedy`: every group has one answer more, which is the greedy one."""

    def __init__(self, prompts: PromptStream, sizes: Sizes, greedy: bool) -> None:
        self._prompts, self._sizes, self.num_greedy = prompts, sizes, int(greedy)
        self._block: deque[tuple[Prompt, int]] = deque()  # sized, and not yet handed out

    def deal(self, step: int) -> tuple[Prompt, int]:
        """The next prompt and the number of its answers, a greedy one included; the step at version `step` will take it."""
        if not self._block:
            prompts = [self._prompts.next() for _ in range(self._sizes.num_prompts)]
            sizes = self._sizes.of([prompt.prompt_id for prompt in prompts], step)
            self._block.extend(zip(prompts, sizes, strict=True))
        prompt, size = self._block.popleft()
        return prompt, size + self.num_greedy

    def saw(self, prompt_id: str, has_signal: bool) -> None:
        """A group of this prompt was trained on; the rewards of its sampled answers differed, or not."""
        self._sizes.saw(prompt_id, has_signal)

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "prompts": self._prompts.state_dict(),
            "block": [[pack_prompt(prompt), size] for prompt, size in self._block],
            "sizes": self._sizes.state_dict(),
            "num_greedy": self.num_greedy,  # of every group in the ledger beside it
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was saved. Raises PromptError if it was saved with other prompts or another seed."""
        self._prompts.load_state_dict(state["prompts"])
        self._block = deque((unpack_prompt(prompt), size) for prompt, size in state["block"])
        self._sizes.load_state_dict(state["sizes"])
