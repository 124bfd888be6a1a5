"""What is run, and what must come of it: the table of `harness.py`.

A command names the address and the port of the server {to} and {port}. Host commands are run by
HOST_RUN with a daemon of their own; those with {bin} speak to the daemon themselves and are
run without it. Servers in the guest are reached through a port of loopback, those on the host
under the address that the guest has for it; everything passes QEMU's user network as plain TCP.
"""

import dataclasses
import re


@dataclasses.dataclass
class Case:
    """One server and one client."""

    name: str
    server: tuple  # ("guest" or "host", command)
    client: tuple
    server_says: str = ""  # what must be in the output, a regular expression for some line
    client_says: str = ""
    client_complains: str = ""  # the same of its standard error
    server_ends: str = "well"  # "badly": a code other than 0; "anyhow": stopped if it runs
    client_ends: str = "well"
    config: str = ""  # of the host's daemon; built-in values if empty
    siw: dict = dataclasses.field(default_factory=dict)  # parameters that differ from SIW
    crc: bool = None  # whether CRCs are in force: if either side wants them
    revision: int = 2  # of MPA, in all start-up frames
    fpdus: tuple = ()  # (side, name): such FPDUs must have been seen
    terminate: tuple = None  # (side, "layer/type/code"): must have been seen
    tolerated: tuple = ()  # Terminates that may have been seen; no others
    seconds: int = 60

    def needs_host_run(self):
        return any(
            side == "host" and "{bin}" not in command
            for side, command in (self.server, self.client)
        )


OTHER = {"host": "guest", "guest": "host"}

# siw as it is, and what cases change.
SIW = {"mpa_crc_required": "N", "mpa_crc_strict": "N", "peer_to_peer": "N", "mpa_version": "2"}


def rping(name, size, server, client, **more):
    """rping checks what it gets: Send, RDMA Read and RDMA Write, ten times."""
    both = f"-p {{port}} -v -V -C 10 -S {size}"
    return Case(
        name=name,
        server=(server, f"rping -s {both}"),
        client=(client, f"rping -c -a {{to}} {both}"),
        server_says=r"server ping data: rdma-ping-9: ",
        client_says=r"^ping data: rdma-ping-9: ",
        **more,
    )


# What rnicd says when a connected queue pair is destroyed, as perftest does in the end with that of
# its control connection. siw says nothing.
DESTROYED = ("host", "0/0/00")


def perftest(name, program, size, server, client, **more):
    """A program of perftest, 100 messages. The server prints figures of what it has posted or
    received, if anything. What they are does not matter: in an emulated machine that is short of
    time, perftest finds no frequency for its clock, and has `inf` for all of them."""
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
    """Everything, with the client on either side; CRCs on, as the daemon wants them."""
    for client, server in (("host", "guest"), ("guest", "host")):
        for size in (100, 65535):  # more it does not take
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
                # Its server writes first, and its client waits for that. A responder may do so in
                # the peer-to-peer model only (RFC 5044 section 7.1.2), which siw does not ask for
                # unless told to.
                more["siw"] = {"peer_to_peer": "Y"}
            for size in (64, 65536):
                yield perftest(
                    f"{{}}-from-{client}", program, size, server, client, crc=True, **more
                )


# The ways in which two sides can come to terms: name, who may be the client, and the rest of a
# case. As they are, the daemon wants CRCs and the peer-to-peer model, and siw goes along.
TERMS = [
    ("no-crc", ("host", "guest"), {"config": "[mpa]\ncrc = false\n", "crc": False}),
    ("siw-wants-crc", ("guest",), {"siw": {"mpa_crc_required": "Y"}, "crc": True}),
    ("only-siw-wants-crc", ("guest",), {
        "config": "[mpa]\ncrc = false\n", "siw": {"mpa_crc_required": "Y"}, "crc": True,
    }),
    # A siw that wants CRCs says so in its Request, but not in its Reply.
    ("siw-does-not-say-crc", ("host",), {
        "config": "[mpa]\ncrc = false\n", "siw": {"mpa_crc_required": "Y"}, "crc": False,
    }),
    ("siw-wants-peer-to-peer", ("guest",), {"siw": {"peer_to_peer": "Y"}, "crc": True}),
    ("no-peer-to-peer", ("host",), {"config": "[mpa]\npeer_to_peer = false\n", "crc": True}),
    ("siw-starts-with-revision-1", ("guest",), {"siw": {"mpa_version": "1"}, "crc": True, "revision": 1}),
]  # fmt: skip


def start_ups():
    """Each of the terms with rping, CRCs off with more."""
    for terms, clients, more in TERMS:
        for client in clients:
            yield rping(f"{terms}-rping-from-{client}", 1000, OTHER[client], client, **more)
            if terms == "no-crc":
                for program in ("ib_send_bw", "ib_write_bw", "ib_read_bw"):
                    yield perftest(
                        f"{terms}-{{}}-from-{client}", program, 65536, OTHER[client], client, **more
                    )
    # As the responder of revision 1 siw grants itself no Reads, so rping cannot work.
    yield perftest(
        "host-starts-with-revision-1-{}-from-host", "ib_send_bw", 4096, "guest", "host",
        config="[mpa]\nrevision = 1\n", crc=True, revision=1,
    )  # fmt: skip


def terminates():
    """A Send that is longer than the receive it meets. RFC 5041 has 1/2/05 for it, siw 1/2/02. The
    Sends are so long that not all of them can be under way when the Terminate comes: without any
    left that fails, perftest's client would wait for good."""
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
    """A program of our own with an unmodified one that was not made for it: what both understand is
    iWARP. These need no HOST_RUN."""
    for terms, clients, more in [("default", ("host", "guest"), {"crc": True}), *TERMS]:
        if "guest" in clients:
            yield Case(  # whose private data the server does not like
                name=f"native-{terms}-rejected-from-guest",
                server=("host", "{bin}/pingpong server --once 0.0.0.0:{port}"),
                client=("guest", "rping -c -a {to} -p {port} -v -C 1"),
                client_complains="RDMA_CM_EVENT_REJECTED",
                server_ends="anyhow",
                client_ends="badly",
                **more,
            )
        if "host" in clients:
            # rping takes 16 bytes for an advertisement and reads what it says.
            yield Case(
                name=f"native-{terms}-read-refused-from-host",
                server=("guest", "rping -s -p {port} -v"),
                client=("host", "{bin}/pingpong client --size 16 --iterations 1 {to}:{port}"),
                client_complains=r"ended by Terminate 0/1/00 \(.*\) from this side",
                server_ends="anyhow",
                client_ends="badly",
                fpdus=(("guest", "Read Request"),),
                terminate=("host", "0/1/00"),
                **more,
            )
    # rping wants no more than 16 bytes. Not with the peer-to-peer model, of which the kernel does
    # not survive that: see docs/interop.md.
    yield Case(
        name="native-send-too-long-from-host",
        server=("guest", "rping -s -p {port} -v"),
        client=("host", "{bin}/pingpong client --size 64 --iterations 1 {to}:{port}"),
        client_complains=r"ended by Terminate 1/2/02 \(.*\) from the peer",
        server_ends="anyhow",
        client_ends="badly",
        config="[mpa]\npeer_to_peer = false\n",
        terminate=("guest", "1/2/02"),
    )
    # siw knows no atomic operations. It says so, by 0/2/06 with Layer and EType exchanged (see
    # docs/interop.md), and serves who comes next.
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
    """The same with siw on both sides: shows that a case asks for what these programs do."""
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

# The short run: data of every kind and a Terminate each way, CRCs on and off, every kind of terms.
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
    """What is not as it must be, in words. `seen` is what went over the wire, None if it was not
    caught (inside of the guest)."""
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
        # Without CRCs both leave their fields zero.
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
        # Whoever is told by a Terminate may have been in the middle of an FPDU.
        if case.terminate is None or side != OTHER[case.terminate[0]]:
            yield f"a stream of {side} is not FPDUs throughout"
