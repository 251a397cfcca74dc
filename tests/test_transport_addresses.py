"""Where a hub may be bound, and the sentence when it may or can not."""

from __future__ import annotations

import socket

import pytest

from async_rl.transport.base import TransportError
from async_rl.transport.sockets import checked_host
from async_rl.transport.zmq import ZmqLink
from benchmarks.flood import free_pair

from .transport_samples import MAX_BYTES, assert_serves, make_hub


def test_eight_hubs_at_once_choose_their_own_ports() -> None:
    hubs = [make_hub() for _ in range(8)]
    try:
        addresses = {a for hub in hubs for a in (hub.control_address, hub.data_address)}
        assert len(addresses) == 16
        assert all(a.startswith("tcp://127.0.0.1:") and int(a.rsplit(":", 1)[1]) > 0 for a in addresses)
    finally:
        for hub in hubs:
            hub.close(0)


def test_a_configured_port_is_control_and_the_next_one_is_data() -> None:
    port = free_pair()
    hub = make_hub(port=port)
    try:
        assert (hub.control_address, hub.data_address) == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
    finally:
        hub.close(0)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_in_use_is_named_with_its_key(taken: int) -> None:
    port = free_pair()
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", port + taken))
        owner.listen()
        with pytest.raises(TransportError, match=rf"transport.port is {port}.*port {port + taken} on 127.0.0.1 is in use"):
            make_hub(port=port)
    make_hub(port=port).close(0)  # the failure left nothing bound


def test_the_last_port_leaves_none_for_data() -> None:
    with pytest.raises(TransportError, match=r"transport.port is 65535.*needs port 65536"):
        make_hub(port=65535)


@pytest.mark.parametrize(
    ("host", "insecure", "sentence"),
    [
        ("192.0.2.1", False, r"host is 192.0.2.1, beyond loopback without keys.*async-rl keys.*transport.insecure=true"),
        ("192.0.2.1", True, "transport.host is not an address of this machine"),
        ("0.0.0.0", True, "transport.host is 0.0.0.0, which no rollout can connect to"),
        ("::", True, "transport.host is ::, which no rollout can connect to"),
        ("no.such.host.invalid", True, "transport.host is no.such.host.invalid, which does not resolve"),
    ],
)
def test_a_host_that_may_not_or_cannot_be_bound_is_explained(host: str, insecure: bool, sentence: str) -> None:
    with pytest.raises(TransportError, match=sentence):
        make_hub(host, insecure=insecure)


def test_hosts_resolve_to_numbers_and_ipv6_gets_brackets() -> None:
    assert checked_host("localhost", False) in ("127.0.0.1", "[::1]")
    assert checked_host("127.0.1.1", False) == "127.0.1.1"
    assert checked_host("::1", False) == checked_host("[::1]", False) == "[::1]"
    assert checked_host("192.0.2.1", True) == "192.0.2.1"


def test_ipv6_loopback_works() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    hub = make_hub("::1")
    try:
        assert hub.control_address.startswith("tcp://[::1]:")
        assert_serves(hub)
    finally:
        hub.close(0)


async def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(TransportError, match="learner address 'nonsense' is not of the form tcp://HOST:PORT"):
        ZmqLink("nonsense", max_message_bytes=MAX_BYTES)
