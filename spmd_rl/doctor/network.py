"""Checks: does this host know its own name, and do the named interfaces exist?

torchrun and gloo find their peers by host name and interface; a wrong one shows much later, as a time-out that names
nobody. It refuses to open a connection: links between ranks are `links.py`.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from threading import Thread

from spmd_rl.doctor.finding import Check, Finding, fail, ok, warn
from spmd_rl.doctor.place import Place

LOOK_UP_S = 5.0


def host_name(place: Place) -> Finding:
    """torchrun's agents meet under it, and gloo binds to its address."""
    name = socket.gethostname()
    addresses = look_up(name)
    hosts_file = f"add the line '<address> {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and torchrun --local-addr"
    if not addresses:
        return fail(f"{name} has no address (asked for {LOOK_UP_S:g} s at most)", hosts_file)
    value = f"{name} is {', '.join(addresses)}"
    local = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    if place.hosts > 1 and local and not place.environ.get("GLOO_SOCKET_IFNAME"):
        to_do = f"set GLOO_SOCKET_IFNAME to one of {', '.join(_interfaces())}"
        return warn(f"{value}, which other hosts can't reach", to_do)
    return ok(value)


def gloo_interface(place: Place) -> Finding:
    """GLOO_SOCKET_IFNAME: names, separated by commas."""
    names = _names(place.environ.get("GLOO_SOCKET_IFNAME", ""))
    return _judge("GLOO_SOCKET_IFNAME", names, [name for name in names if name not in _interfaces()], place)


def nccl_interface(place: Place) -> Finding:
    """NCCL_SOCKET_IFNAME: beginnings of names, or after = whole names, or after ^ those not to use."""
    said = place.environ.get("NCCL_SOCKET_IFNAME", "")
    names, exact = _names(said.lstrip("^=")), "=" in said[:2]
    if said.startswith("^"):
        return ok(f"all but {', '.join(names)}")
    there = _interfaces()
    missing = [name for name in names if not any(i == name if exact else i.startswith(name) for i in there)]
    return _judge("NCCL_SOCKET_IFNAME", names, missing, place)


def look_up(name: str, patience_s: float = LOOK_UP_S) -> list[str]:
    """The addresses of a name; none when it has none, or when nobody answers in time."""
    found: list[str] = []

    def ask() -> None:
        try:
            found.extend(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
        except OSError:
            return

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_s)
    return list(found)


def _judge(variable: str, names: list[str], missing: list[str], place: Place) -> Finding:
    if not names:
        return ok("not set: chosen by itself")
    if missing:
        return fail(
            f"{variable} names {', '.join(missing)}", f"there is {', '.join(_interfaces())}: export one of these"
        )
    down = [name for name in names if _state(place.root, name) == "down"]
    if down:
        return fail(f"{', '.join(down)} is down", f"ip link set {down[0]} up, or export another one")
    if place.hosts > 1 and names == ["lo"]:
        return fail("lo, which other hosts can't reach", f"export one of {', '.join(_interfaces())}")
    return ok(", ".join(names))


def _state(root: Path, interface: str) -> str:
    path = root / "sys/class/net" / interface / "operstate"
    return path.read_text().strip() if path.exists() else "unknown"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


CHECKS = (
    Check("network", "host name", host_name),
    Check("network", "gloo's interface", gloo_interface),
    Check("network", "NCCL's interface", nccl_interface),
)
