"""Hosts made of namespaces: one for learner and vLLM, one for each further rollout, a link between.

Owns the namespaces, links and the small disk; needs root, or user namespaces, and `ip`, `tc`, `unshare`, `nsenter`. Invariant:
nothing outside is touched, and everything in them, every process included, ends with process 1, which is this benchmark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = "ASYNC_RL_CHAOS_INSIDE"
LEARNER = "10.77.0.1"  # on no link: reached over each of them
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")


def enter() -> None:
    """Become process 1 of fresh network, mount and process namespaces; exits with 2 where that cannot be had."""
    if os.environ.get(INSIDE):
        _ip("link", "set", "lo", "up")
        _ip("address", "add", f"{LEARNER}/32", "dev", "lo")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # gloo connects every member with every other
        return
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        sys.exit(f"chaos needs {missing[0]}, which is not installed: install util-linux and iproute2")
    own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", *own_user, "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*argv, "true"], capture_output=True).returncode:
        sys.exit(
            "chaos needs namespaces of its own, which this system does not allow: run it as root, or allow user namespaces"
        )
    os.environ[INSIDE] = "1"
    os.execvp(argv[0], [*argv, sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]])


class Host:
    """A host with one link to the learner's."""

    def __init__(self, number: int) -> None:
        self._link, far = f"to-{number}", f"at-{number}"
        near_address, address = f"10.77.{number}.1", f"10.77.{number}.2"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.enter = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")
        while Path(f"/proc/{self._holder.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            os.sched_yield()
        _ip("link", "add", self._link, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", str(self._holder.pid))
        _ip("address", "add", f"{near_address}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/30", "dev", far),
            ("link", "set", far, "up"),
            ("route", "add", "default", "via", near_address),
        ):
            subprocess.run([*self.enter, "ip", *words], check=True)

    @property
    def holder(self) -> int:
        """The process that keeps the namespace."""
        return self._holder.pid

    def cut(self) -> None:
        _ip("link", "set", self._link, "down")

    def heal(self) -> None:
        _ip("link", "set", self._link, "up")

    def throttle(self, bits_per_s: int) -> None:
        """What the learner sends over the link goes no faster than this; what its queue does not hold is sent again."""
        rate = ("rate", f"{bits_per_s}bit", "burst", "32kb", "latency", "400ms")
        subprocess.run(["tc", "qdisc", "add", "dev", self._link, "root", "tbf", *rate], check=True)

    def unthrottle(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", self._link, "root"], check=True)


def small_disk(folder: Path, num_bytes: int) -> None:
    """A disk of its own under the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
