"""`python -m async_rl.learner.torchrun NUM_RANKS RUN_DIR`: torchrun on this host, ending with the ranks' own exit code.

torchrun itself ends with 1 and a traceback, whatever a rank said. Everything else is its own: rendezvous on a free
loopback port, one process per rank, and the end of all ranks when one fails.
"""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from async_rl.observability.process import PARENT_PID, die_with_parent


def main(num_ranks: str, run_dir: str) -> int:
    """The exit code of the rank that failed first; 128 + n when it was killed by signal n; 0 when none did."""
    die_with_parent()
    os.environ[PARENT_PID] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks' own words are in the log
    try:
        run.main(
            [
                "--nnodes=1",
                f"--nproc-per-node={num_ranks}",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0",
                "--max-restarts=0",
                f"--log-dir={os.devnull}",  # else it leaves a folder in the temporary directory, which nobody removes
                "--module",
                "async_rl.learner",
                run_dir,
            ]
        )
    except ChildFailedError as e:
        code = e.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as e:
        return 128 + e.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
