"""Summary of a capture: start-up frames, messages, CRCs, Terminates.

Decodes only as much of MPA, DDP and RDMAP as counting needs, without Markers. `host` is traffic
from this machine, `guest` is traffic from siw.
"""

import struct
from collections import Counter

import guest

OPCODES = [
    "Write",
    "Read Request",
    "Read Response",
    "Send",
    "Send+Inv",
    "Send+SE",
    "Send+SE+Inv",
    "Terminate",
]
FLAGS = {0x80: "M", 0x40: "C", 0x20: "R", 0x10: "S"}  # of start-up frames
HEADER = 24  # of a classic pcap file
CHECKED = 64 * 1024  # bytes per direction of a connection for which CRCs are computed


class Seen:
    """The summary."""

    def __init__(self):
        self.startups = []  # (side, "Request" or "Reply", letters of the flags, revision)
        self.fpdus = {"host": Counter(), "guest": Counter()}
        self.crcs = {"host": Counter(), "guest": Counter()}  # "good", "zero" or "bad"
        self.terminates = []  # (side, "layer/type/code")
        self.refused = 0  # connections to a port without a listener
        self.unread = []  # sides of streams with undecodable parts

    def __str__(self):
        lines = [f"{side}: {frame}, revision {revision}, flags {flags or 'none'}"
                 for side, frame, flags, revision in self.startups]  # fmt: skip
        for side, counts in self.fpdus.items():
            said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            lines.append(f"{side}: FPDUs: {said or 'none'}")
            said = ", ".join(f"{count} {name}" for name, count in sorted(self.crcs[side].items()))
            lines.append(f"{side}: CRCs of the first: {said or 'none'}")
        lines += [f"{side}: Terminate {what}" for side, what in self.terminates]
        if self.refused:
            lines.append(f"{self.refused} connections were refused")
        lines += [f"{side}: a stream with parts that could not be read" for side in self.unread]
        return "\n".join(lines) + "\n"


def read(path):
    """Reads a capture."""
    seen = Seen()
    for (source, _, _, _), stream in streams(path, seen).items():
        mpa(seen, "guest" if source == guest.ADDRESS else "host", stream)
    return seen


def streams(path, seen):
    """Returns the bytes of each direction of each connection, in the order of first appearance."""
    segments = {}
    with open(path, "rb") as file:
        data = file.read()
    at = HEADER
    while at + 16 <= len(data):
        (length,) = struct.unpack_from("<I", data, at + 8)
        frame = data[at + 16 : at + 16 + length]
        at += 16 + length
        if len(frame) < 54 or frame[12:14] != b"\x08\x00" or frame[23] != 6:
            continue
        ip = frame[14 : 14 + struct.unpack_from(">H", frame, 16)[0]]
        tcp = ip[(ip[0] & 15) * 4 :]
        source, to, sequence = struct.unpack_from(">HHI", tcp)
        key = (address(ip[12:16]), source, address(ip[16:20]), to)
        if tcp[13] & 2:  # SYN: a new connection, of the same ports perhaps
            segments[key] = [sequence + 1, {}]
        elif tcp[13] & 4 and key not in segments:  # RST in answer to a SYN
            seen.refused += 1
        elif key in segments and (payload := tcp[(tcp[12] >> 4) * 4 :]):
            first, pieces = segments[key]
            offset = (sequence - first) % 2**32
            if len(pieces.get(offset, b"")) < len(payload):
                pieces[offset] = payload
    return {key: joined(pieces) for key, (_, pieces) in segments.items()}


def address(raw):
    return ".".join(map(str, raw))


def joined(pieces):
    """Joins segments up to the first gap, without retransmissions."""
    stream = bytearray()
    for offset, payload in sorted(pieces.items()):
        if offset > len(stream):
            break
        stream += payload[len(stream) - offset :]
    return bytes(stream)


def mpa(seen, side, stream):
    """Decodes the start-up frame and the FPDUs of one direction."""
    frames = {b"MPA ID Req Frame": "Request", b"MPA ID Rep Frame": "Reply"}
    if stream[:16] not in frames:
        if stream:
            seen.unread.append(side)
        return
    flags, revision, private = struct.unpack_from(">BBH", stream, 16)
    letters = "".join(letter for bit, letter in FLAGS.items() if flags & bit)
    seen.startups.append((side, frames[stream[:16]], letters, revision))
    at = began = 20 + private
    while at + 2 <= len(stream):
        (length,) = struct.unpack_from(">H", stream, at)
        end = at + (2 + length + 3) // 4 * 4 + 4
        if length < 14 or end > len(stream):
            break
        ulpdu(seen, side, stream[at + 2 : at + 2 + length])
        if end - began <= CHECKED:
            seen.crcs[side][crc(stream[at : end - 4], stream[end - 4 : end])] += 1
        at = end
    if at != len(stream):
        seen.unread.append(side)


def crc(covered, field):
    """Compares the CRC field of an FPDU with its bytes (RFC 5044 section 4.4)."""
    value = 0xFFFFFFFF
    for byte in covered:
        value = CRC32C[(value ^ byte) & 0xFF] ^ value >> 8
    if field == struct.pack("<I", value ^ 0xFFFFFFFF):
        return "good"
    return "bad" if any(field) else "zero"


def crc32c_of(byte):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC32C = [crc32c_of(byte) for byte in range(256)]


def ulpdu(seen, side, data):
    opcode = data[1] & 15
    seen.fpdus[side][OPCODES[opcode] if opcode < len(OPCODES) else f"opcode {opcode}"] += 1
    if opcode == OPCODES.index("Terminate"):
        what, code, flags = data[18:21]
        # siw exchanges layer and type, and sets the flags at the wrong end of their byte.
        swapped = flags & 0xE0 == 0 and flags & 7 != 0
        layer, kind = (what & 15, what >> 4) if swapped else (what >> 4, what & 15)
        seen.terminates.append((side, f"{layer}/{kind}/{code:02x}"))
