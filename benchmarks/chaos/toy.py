"""`python -m benchmarks.chaos.toy RUN_DIR NAME`: a rollout with the toy engine, for a run whose own have vLLM.

Its answers are noise, all worth nothing, so that their groups have no variance: they cost the run time, and teach it nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from async_rl.rollout import __main__ as rollout
from async_rl.rollout.toy_engine import ToyEngine

if __name__ == "__main__":
    rollout._engine = ToyEngine.create
    code = rollout.main(Path(sys.argv[1]), sys.argv[2])
    sys.stderr.flush()
    os._exit(code)
