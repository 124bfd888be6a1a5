"""The table of cases of `harness.py`: commands to run and their expected outcomes.

A command contains {to} and {port} for the address and the port of the server. HOST_RUN runs host
commands, each with its own daemon. Host commands with {bin} use the daemon directly and run without
HOST_RUN. Servers in the guest are reached through a loopback port, servers on the host through the
guest's address for it. All traffic passes QEMU's user network as plain TCP.
"""

import dataclasses
import re


@dataclasses.dataclass
class Case:
    """One server and one client."""

    name: str
    server: tuple  # ("guest" or "host", command)
    client: tuple
    server_says: str = ""  # regular expression that some output line must match
    client_says: str = ""
    client_complains: str = ""  # the same for its standard error
    server_ends: str = "well"  # "badly": a code other than 0; "anyhow": stopped if still running
    client_ends: str = "well"
    config: str = ""  # of the host's daemon; built-in values if empty
    siw: dict = dataclasses.field(default_factory=dict)  # parameters that differ from SIW
    crc: bool = None  # True if CRCs must be used: either side requires them
    revision: int = 2  # of MPA, in all start-up frames
    fpdus: tuple = ()  # (side, name) of FPDUs that must occur
    terminate: tuple = None  # (side, "layer/type/code") that must occur
    tolerated: tuple = ()  # Terminates that may occur; all others fail the case
    seconds: int = 60

    def needs_host_run(self):
        return any(
            side == "host" and "{bin}" not in command
            for side, command in (self.server, self.client)
        )


OTHER = {"host": "guest", "guest": "host"}

# Default parameters of siw, which cases can change.
SIW = {"mpa_crc_required": "N", "mpa_crc_strict": "N", "peer_to_peer": "N", "mpa_version": "2"}


def rping(name, size, server, client, **more):
    """rping checks the data it receives by Send, RDMA Read and RDMA Write, ten times."""
    both = f"-p {{port}} -v -V -C 10 -S {size}"
    return Case(
        name=name,
        server=(server, f"rping -s {both}"),
        client=(client, f"rping -c -a {{to}} {both}"),
        server_says=r"server ping data: rdma-ping-9: ",
        client_says=r"^ping data: rdma-ping-9: ",
        **more,
    )


# The Terminate that rnicd sends when a connected QP is destroyed, as perftest does at the end with
# the QP of its control connection. siw sends nothing.
DESTROYED = ("host", "0/0/00")


def perftest(name, program, size, server, client, **more):
    """A program of perftest, 100 messages. The server prints figures if it posts or receives
    messages. Their values do not matter: in a slow emulated machine, perftest cannot determine the
    frequency of its clock and prints `inf`."""
    both = f"{program} -R -F -n 100 -s {size} -p {{port}}"
    figures = rf"^ *{size} +100 +([0-9.]+|inf) "
    posts = program.startswith("ib_send") or program == "ib_write_lat"
    return Case(
        name=name.format(f"{program}-{size}"),
        server=(server, both),
        client=(client, f"{both} {{to}}"),
        server_says=figures if posts else "",
        client_says=figures,
        tolerated=(DESTROYED,),
        **more,
    )


def both_ways():
    """All programs, with the client on either side and with CRCs, which the daemon requires."""
    for client, server in (("host", "guest"), ("guest", "host")):
        for size in (100, 65535):  # rping's maximum is 65535
            yield rping(f"rping-{size}-from-{client}", size, server, client, crc=True)
        for program in (
            "ib_send_bw",
            "ib_send_lat",
            "ib_write_bw",
            "ib_write_lat",
            "ib_read_bw",
            "ib_read_lat",
        ):
            more = {}
            if program == "ib_write_lat" and client == "guest":
                # Its server writes first, and its client waits for that. A responder may do so only
                # in the peer-to-peer model (RFC 5044 section 7.1.2), which siw uses only if
                # configured.
                more["siw"] = {"peer_to_peer": "Y"}
            for size in (64, 65536):
                yield perftest(
                    f"{{}}-from-{client}", program, size, server, client, crc=True, **more
                )


# The possible outcomes of a negotiation: name, sides that may be the client, and the rest of a
# case. By default the daemon requires CRCs and the peer-to-peer model, and siw accepts both.
TERMS = [
    ("no-crc", ("host", "guest"), {"config": "[mpa]\ncrc = false\n", "crc": False}),
    ("siw-wants-crc", ("guest",), {"siw": {"mpa_crc_required": "Y"}, "crc": True}),
    ("only-siw-wants-crc", ("guest",), {
        "config": "[mpa]\ncrc = false\n", "siw": {"mpa_crc_required": "Y"}, "crc": True,
    }),
    # A siw that requires CRCs sets the flag in its Request, but not in its Reply.
    ("siw-does-not-say-crc", ("host",), {
        "config": "[mpa]\ncrc = false\n", "siw": {"mpa_crc_required": "Y"}, "crc": False,
    }),
    ("siw-wants-peer-to-peer", ("guest",), {"siw": {"peer_to_peer": "Y"}, "crc": True}),
    ("no-peer-to-peer", ("host",), {"config": "[mpa]\npeer_to_peer = false\n", "crc": True}),
    ("siw-starts-with-revision-1", ("guest",), {"siw": {"mpa_version": "1"}, "crc": True, "revision": 1}),
]  # fmt: skip


def start_ups():
    """Each of the terms with rping. Without CRCs, perftest runs as well."""
    for terms, clients, more in TERMS:
        for client in clients:
            yield rping(f"{terms}-rping-from-{client}", 1000, OTHER[client], client, **more)
            if terms == "no-crc":
                for program in ("ib_send_bw", "ib_write_bw", "ib_read_bw"):
                    yield perftest(
                        f"{terms}-{{}}-from-{client}", program, 65536, OTHER[client], client, **more
                    )
    # As a responder of revision 1, siw allows itself no Reads, so rping cannot work.
    yield perftest(
        "host-starts-with-revision-1-{}-from-host", "ib_send_bw", 4096, "guest", "host",
        config="[mpa]\nrevision = 1\n", crc=True, revision=1,
    )  # fmt: skip


def terminates():
    """A Send that is longer than the receive it meets. RFC 5041 requires 1/2/05, siw sends 1/2/02.
    The Sends are so long that some are unsent when the Terminate arrives. Without a failing Send,
    perftest's client would wait forever."""
    for client, server, code in (("host", "guest", "1/2/02"), ("guest", "host", "1/2/05")):
        yield Case(
            name=f"send-too-long-from-{client}",
            server=(server, "ib_send_bw -R -F -n 100 -s 64 -p {port}"),
            client=(client, "ib_send_bw -R -F -n 100 -s 1048576 -p {port} {to}"),
            client_complains="Completion with error at client|Couldn't post send",
            server_ends="badly",
            client_ends="badly",
            crc=True,
            terminate=(server, code),
            tolerated=(DESTROYED,),
            seconds=30,
        )


def native():
    """A program of this project with an unmodified program for other servers. Their only common
    language is iWARP. These cases need no HOST_RUN."""
    for terms, clients, more in [("default", ("host", "guest"), {"crc": True}), *TERMS]:
        if "guest" in clients:
            yield Case(  # the server rejects its private data
                name=f"native-{terms}-rejected-from-guest",
                server=("host", "{bin}/examples/pingpong serve 0.0.0.0:{port}"),
                client=("guest", "rping -c -a {to} -p {port} -v -C 1"),
                client_complains="RDMA_CM_EVENT_REJECTED",
                server_ends="anyhow",
                client_ends="badly",
                **more,
            )
        if "host" in clients:
            # rping treats 16 bytes as an advertisement and reads the advertised memory.
            yield Case(
                name=f"native-{terms}-read-refused-from-host",
                server=("guest", "rping -s -p {port} -v"),
                client=("host", "{bin}/examples/pingpong visit {to}:{port} 16 1"),
                client_complains=r"this side found a fault and sent Terminate 0/1/00 \(",
                server_ends="anyhow",
                client_ends="badly",
                fpdus=(("guest", "Read Request"),),
                terminate=("host", "0/1/00"),
                **more,
            )
    # rping accepts at most 16 bytes. Without the peer-to-peer model, because there the kernel
    # crashes: see docs/interop-siw.md.
    yield Case(
        name="native-send-too-long-from-host",
        server=("guest", "rping -s -p {port} -v"),
        client=("host", "{bin}/examples/pingpong visit {to}:{port} 64 1"),
        client_complains=r"the peer sent Terminate 1/2/02 \(",
        server_ends="anyhow",
        client_ends="badly",
        config="[mpa]\npeer_to_peer = false\n",
        terminate=("guest", "1/2/02"),
    )
    # siw has no atomic operations. It replies 0/2/06 with Layer and EType exchanged (see
    # docs/interop.md), and serves the next client.
    yield Case(
        name="native-atomic-from-host",
        server=("guest", "rping -s -P -p {port} -v"),
        client=("host", "{bin}/actor rping {to}:{port}"),
        client_says=r"^the next connection works",
        server_ends="anyhow",
        config="[mpa]\npeer_to_peer = false\n",
        fpdus=(("host", "opcode 10"), ("guest", "Read Request"), ("host", "Read Response")),
        terminate=("guest", "2/0/06"),
        tolerated=(DESTROYED,),
    )


def both_in_guest(case):
    """The same with siw on both sides, which shows that the programs can pass the case."""
    return dataclasses.replace(
        case,
        name=f"self-{case.name}",
        server=("guest", case.server[1]),
        client=("guest", case.client[1]),
    )


BETWEEN = [*native(), *both_ways(), *start_ups(), *terminates()]
INSIDE = [
    both_in_guest(case)
    for case in (*both_ways(), *start_ups(), *terminates())
    if case.name.endswith("from-guest") and not case.config and case.revision == 2
]
CASES = [*INSIDE, *BETWEEN]

# The short run: data of every kind and a Terminate each way, with and without CRCs, and all terms.
QUICK = [
    "self-rping-100-from-guest",
    "native-default-rejected-from-guest",
    "native-default-read-refused-from-host",
    "rping-65535-from-{}",
    "ib_send_bw-65536-from-{}",
    "ib_write_lat-64-from-{}",
    "ib_read_bw-65536-from-{}",
    "no-crc-rping-from-{}",
    "no-crc-ib_write_bw-65536-from-{}",
    "only-siw-wants-crc-rping-from-guest",
    "no-peer-to-peer-rping-from-host",
    "siw-starts-with-revision-1-rping-from-guest",
    "host-starts-with-revision-1-ib_send_bw-4096-from-host",
    "send-too-long-from-{}",
]


def quick():
    """The cases of the short run."""
    named = {case.name: case for case in CASES}
    names = dict.fromkeys(name.format(side) for name in QUICK for side in ("host", "guest"))
    return [named[name] for name in names]


def faults(case, server, client, seen):
    """Returns the deviations from the case as text. `seen` is the traffic on the wire, or None if it
    was not captured (inside the guest)."""
    for side, ended, ends, says in (
        ("server", server, case.server_ends, case.server_says),
        ("client", client, case.client_ends, case.client_says),
    ):
        last = (ended.err.strip().splitlines() or ["nothing on standard error"])[-1]
        if ended.code is None and ends != "anyhow":
            yield f"{side} did not end ({last})"
        elif ends == "well" and ended.code != 0 or ends == "badly" and ended.code == 0:
            yield f"{side} ended with {ended.code} ({last})"
        if not re.search(says, ended.out, re.M):
            yield f"{side} did not say {says!r}"
    if not re.search(case.client_complains, client.err, re.M):
        yield f"client did not complain {case.client_complains!r}"
    if seen is None:
        return
    if not seen.startups:
        yield "no start-up frame on the wire"
        return
    for side, frame, flags, revision in seen.startups:
        if revision != case.revision:
            yield f"revision {revision} in the {frame} of {side}"
    crc = any("C" in flags for _, _, flags, _ in seen.startups)
    if case.crc is not None and crc != case.crc:
        yield f"CRCs are {'on' if crc else 'off'}"
    for side, crcs in seen.crcs.items():
        # Without CRCs both sides leave the fields zero.
        if wrong := crcs.total() - crcs["good" if crc else "zero"]:
            yield f"{wrong} FPDUs of {side} with a CRC that is not {'good' if crc else 'zero'}"
    for side, name in case.fpdus:
        if not seen.fpdus[side][name]:
            yield f"no {name} from {side}"
    if case.terminate is not None and case.terminate not in seen.terminates:
        yield f"no Terminate {case.terminate[1]} from {case.terminate[0]}"
    for side, code in set(seen.terminates) - {case.terminate, *case.tolerated}:
        yield f"Terminate {code} from {side}"
    for side in seen.unread:
        # The receiver of a Terminate may have been in the middle of an FPDU.
        if case.terminate is None or side != OTHER[case.terminate[0]]:
            yield f"a stream of {side} is not FPDUs throughout"
