"""Whether a hub name could be looked up from here: the hub's own client takes a minute to find out that it could not.

Imports nothing of ours. Invariant: only a plain failure counts, such as a name that does not resolve; what takes long, or goes
through a proxy, is let through.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

DEADLINE_S = 1.5


def why_no_hub(name: str) -> str:
    """Why no model of that name can come from the hub, or "" when it may, or lies in the hub's cache here."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    if (cache / f"models--{name.replace('/', '--')}").is_dir():
        return ""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set, and its cache does not hold it"
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if address.scheme in getproxies() or not address.hostname:
        return ""
    return _failure(address.hostname, address.port or (80 if address.scheme == "http" else 443))


def _failure(host: str, port: int) -> str:
    problem: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=DEADLINE_S).close()
        except TimeoutError:
            pass
        except OSError as e:
            problem.append(f"{host}: {e.strerror or e}")

    thread = threading.Thread(target=connect, daemon=True)  # resolving a name has no deadline of its own
    thread.start()
    thread.join(DEADLINE_S)
    return problem[0] if problem else ""
