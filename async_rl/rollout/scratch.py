"""A folder for temporary files that is gone with its process, however that ends.

Imports the standard library only. Invariant: the folder outlives neither this process nor those forked from it (an engine
core): a shell, which holds the other end of a pipe that they keep open, removes it when the last of them is dead.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

REMOVE = 'read _; rm -rf -- "$1"'  # nobody writes: the end of the file is the end of all who could


def scratch_folder(prefix: str) -> str:
    """A new one, of this user alone. Call it before the fork of whoever may still use the folder when this process is dead."""
    folder = tempfile.mkdtemp(prefix=prefix)
    read_end, _held_open = os.pipe()
    subprocess.Popen(
        ["/bin/sh", "-c", REMOVE, "sh", folder],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C, and the end of our process group, must not reach it
    )
    os.close(read_end)
    return folder
