"""Namespaces with rate-limited links: what ranks see in them, and that they go however everything ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nestpipe_kernels.launch import Network, network, run_ranks

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
LIMIT_S = 60.0


def holders(identities: list[int]) -> list[str]:
    """Where in /proc the namespaces are still used or held."""
    wanted = {f"net:[{number}]" for number in identities}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        places = [process / "ns" / "net"]
        try:
            places += list((process / "fd").iterdir())
        except OSError:
            continue
        for place in places:
            try:
                if os.readlink(place) in wanted:
                    found.append(str(place))
            except OSError:
                continue
    return found


def assert_gone(identities: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while holders(identities) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holders(identities) == []


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("text", ["", "fast", "1", "1 gbit", "-1gbit", "1gbps", "0mbit", "99kbit", "1e3mbit"])
def test_a_rate_that_is_none(text):
    with pytest.raises(ValueError, match=f"a rate is a number with kbit, mbit or gbit, at least 100kbit; got '{text}'"):
        network.bits_per_second(text)


def test_rates():
    assert [network.bits_per_second(rate) for rate in ("100kbit", "250mbit", "2.5gbit")] == [1e5, 2.5e8, 2.5e9]


def test_namespaces_with_links_and_nothing_outside(can_make_networks):
    outside = interfaces()
    with Network(2, "300mbit") as made:
        identities = made.identities()
        assert len(set(identities)) == 3
        assert interfaces() == outside
        for rank in (0, 1):
            seen = made.run_in(rank, lambda: subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True))
            assert f"np    inet 10.201.77.{rank + 1}/24" in seen.stdout
            limit = made.run_in(rank, lambda: subprocess.run(["tc", "qdisc"], capture_output=True, text=True))
            assert "rate 300Mbit" in limit.stdout
        assert holders(identities)
    assert_gone(identities)
    made.close()
    with pytest.raises(RuntimeError, match="this network is closed"):
        made.run_in(None, interfaces)


def test_a_link_that_is_cut_and_mended(can_make_networks):
    with Network(1) as made:
        listener = made.run_in(0, lambda: socket.create_server(("10.201.77.1", 0)))
        address = listener.getsockname()

        def reach(timeout_s: float) -> bool:
            try:
                socket.create_connection(address, timeout=timeout_s).close()
            except TimeoutError:
                return False
            return True

        assert made.run_in(None, lambda: reach(LIMIT_S))
        made.cut(0)
        assert not made.run_in(None, lambda: reach(0.5))
        made.mend(0)
        assert made.run_in(None, lambda: reach(LIMIT_S))
        listener.close()


@pytest.mark.multiprocess
def test_ranks_meet_on_the_bridge_and_a_killed_one_leaves_no_namespace(can_make_networks, tmp_path, capfd):
    with Network(2, "1gbit") as made:
        identities = made.identities()
        command = [sys.executable, PROGRAM, "kill", str(tmp_path)]
        assert run_ranks(command, 2, timeout_s=LIMIT_S, network=made) == 128 + signal.SIGKILL
    # It ends itself after a first exchange; the second then fails on the other rank.
    err = capfd.readouterr().err
    assert "rank 1 failed first: killed by signal 9 (SIGKILL)" in err
    assert "CommunicationError: rows exchange 'test': rank 0 of 2 got no answer after" in err
    assert_gone(identities)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("number", "case"), [(signal.SIGINT, "sleep"), (signal.SIGKILL, "sleep_joined")])
def test_a_launcher_that_is_ended_leaves_no_namespace(can_make_networks, tmp_path, number, case):
    code = (
        "import sys; from pathlib import Path; from nestpipe_kernels.launch import Network, run_ranks\n"
        "with Network(2, '1gbit') as made:\n"
        f"    Path({str(tmp_path)!r}, 'namespaces').write_text(' '.join(map(str, made.identities())))\n"
        f"    command = [sys.executable, {PROGRAM!r}, {case!r}, {str(tmp_path)!r}]\n"
        "    sys.exit(run_ranks(command, 2, timeout_s=60, network=made))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.05)
    assert len(list(tmp_path.glob("ready*"))) == 2
    identities = [int(word) for word in (tmp_path / "namespaces").read_text().split()]
    assert holders(identities)
    launcher.send_signal(number)
    launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == (-number if number == signal.SIGKILL else 130)
    assert_gone(identities)


def test_without_iproute2(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(OSError, match=r"network: ip and tc not found: install iproute2 \(apt-get install iproute2\)"):
        Network(2)


def test_without_root(monkeypatch):
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(network, "_new_namespace", refuse)
    with pytest.raises(OSError, match=r"needs root \(CAP_SYS_ADMIN and CAP_NET_ADMIN\): Operation not permitted"):
        Network(2)


def test_a_command_that_fails_leaves_nothing(can_make_networks, monkeypatch):
    made: list[Network] = []

    def build(self: Network) -> None:
        made.append(self)
        identities.extend(self.identities())
        self._command(None, "ip link set nowhere up")

    identities: list[int] = []
    monkeypatch.setattr(Network, "_build", build)
    with pytest.raises(OSError, match=r"network: `ip link set nowhere up` failed: .*nowhere"):
        Network(2)
    assert len(identities) == 3 and made[0].identities() == []
    assert_gone(identities)


def test_bad_requests(can_make_networks):
    with pytest.raises(ValueError, match=r"network: ranks must be in 1 \.\. 200, got 0"):
        Network(0)
    with Network(1) as made, pytest.raises(ValueError, match="nproc is 2, but the network has 1 namespaces"):
        run_ranks(["true"], 2, network=made)
