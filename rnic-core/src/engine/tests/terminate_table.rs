//! Tests the table `terminate_code` of `tests/conformance/requirements.toml`. For each code that a
//! peer can cause, there is a stimulus and the expected bytes. The other codes are listed with the
//! reason why no peer can cause them. A row in neither list fails the test.

use std::collections::BTreeSet;

use super::raw::{Raw, add_of, ulpdu};
use super::requests::{Mr, Wr};
use super::world::{A, Wiring, World};
use crate::conformance::table;
use crate::ddp::Header;
use crate::mpa::tests::hex;
use crate::rdmap::{AtomicRequest, Opcode, ReadRequest};
use crate::stream::startup::Options;
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::Mapping;
use rnic_abi::types::{Access, QpState, Scope, Stag, TaggedOffset};

/// Layer, type, code.
type Code = (u8, u8, u8);

/// Causes a fault and returns the segment at fault, if there is one.
type Stimulus = fn(&mut World, &mut Raw) -> Vec<u8>;

/// Stimuli of each code, with a description. A code may have several.
const STIMULI: &[(Code, &str, Stimulus)] = &[
    ((0, 0, 0), "a Send to a receive with bad memory, which is not the peer's fault", |w, raw| {
        w.recv(A, 1, &[Sge { addr: 0, length: 8, lkey: 0x77 }]);
        raw.send(w, 1, b"x");
        vec![]
    }),
    ((0, 1, 0), "a Read of an unknown STag", |w, raw| read(w, raw, |_, r| r.src_stag.0 ^= 0xFF00)),
    ((0, 1, 0), "a Read of a revoked STag", |w, raw| read(w, raw, |w, r| w.revoke(A, r.src_stag))),
    ((0, 1, 1), "a Read from below the region", |w, raw| read(w, raw, |_, r| r.src_to.0 -= 1)),
    ((0, 1, 1), "a Read beyond the end", |w, raw| read(w, raw, |_, r| r.size += 1)),
    ((0, 1, 2), "a Read of a write-only region", |w, raw| {
        read(w, raw, |w, r| r.src_stag = w.mr(A, 100, Access::REMOTE_WRITE).stag)
    }),
    ((0, 1, 3), "a Read from another domain", |w, raw| {
        read(w, raw, |w, r| r.src_stag = strangers(w).stag)
    }),
    ((0, 1, 3), "a Read from another stream", |w, raw| {
        read(w, raw, |w, r| r.src_stag = siblings(w).stag)
    }),
    ((0, 1, 4), "a Read that wraps", |w, raw| read(w, raw, |_, r| r.src_to.0 = u64::MAX - 99)),
    ((0, 1, 0), "an atomic operation on an unknown STag", |w, raw| {
        atomic(w, raw, |_, r| r.stag.0 ^= 0xFF00)
    }),
    ((0, 1, 0), "an atomic operation on a revoked STag", |w, raw| {
        atomic(w, raw, |w, r| w.revoke(A, r.stag))
    }),
    ((0, 1, 1), "an atomic operation below the region", |w, raw| {
        atomic(w, raw, |_, r| r.to.0 -= 8)
    }),
    ((0, 1, 1), "an atomic operation across the end", |w, raw| {
        atomic(w, raw, |w, r| r.stag = w.mr_at(A, 7, Access::all(), Scope::Pd, r.to.0).stag)
    }),
    ((0, 1, 2), "an atomic operation on a region without that right", |w, raw| {
        atomic(w, raw, |w, r| {
            let remote = Access::REMOTE_READ | Access::REMOTE_WRITE;
            r.stag = w.mr(A, 8, Access::LOCAL_WRITE | remote).stag
        })
    }),
    ((0, 1, 3), "an atomic operation in another domain", |w, raw| {
        atomic(w, raw, |w, r| r.stag = strangers(w).stag)
    }),
    ((0, 1, 3), "an atomic operation on another stream's region", |w, raw| {
        atomic(w, raw, |w, r| r.stag = siblings(w).stag)
    }),
    ((0, 1, 4), "an atomic operation that wraps", |w, raw| {
        atomic(w, raw, |_, r| r.to.0 = u64::MAX - 7)
    }),
    ((0, 1, 9), "an invalidation of an unknown STag", |w, raw| {
        invalidate(w, raw, Stag(0x1234_5678))
    }),
    ((0, 1, 9), "an invalidation of another stream's STag", |w, raw| {
        let stag = siblings(w).stag;
        invalidate(w, raw, stag)
    }),
    ((0, 2, 5), "an untagged segment of another RDMAP version", |w, raw| {
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        altered(w, raw, header, |o| o[1] = o[1] & 0x3F | 0x80)
    }),
    ((0, 2, 5), "a tagged segment of another RDMAP version", |w, raw| {
        let header = raw.tagged(Opcode::Write, Stag(1), 0, true);
        altered(w, raw, header, |o| o[1] &= 0x3F)
    }),
    ((0, 2, 6), "an unknown opcode", |w, raw| {
        let header = raw.untagged(Opcode::from_bits(13), 0, 1, 0, true);
        segment(w, raw, header, b"x")
    }),
    ((0, 2, 6), "an opcode of another queue", |w, raw| {
        let header = raw.untagged(Opcode::Send, 1, 1, 0, true);
        segment(w, raw, header, b"x")
    }),
    ((0, 2, 6), "a tagged Send", |w, raw| {
        let header = raw.tagged(Opcode::Send, Stag(1), 0, true);
        segment(w, raw, header, b"x")
    }),
    ((0, 2, 6), "a Read Response without a Read", |w, raw| {
        let header = raw.tagged(Opcode::ReadResponse, Stag(1), 0, true);
        segment(w, raw, header, b"x")
    }),
    ((0, 2, 6), "an Atomic Response without a request", |w, raw| {
        let header = raw.untagged(Opcode::AtomicResponse, 3, 1, 0, true);
        segment(w, raw, header, &[0; 12])
    }),
    ((0, 2, 6), "an opcode that changes inside a request", |w, raw| {
        raw.segment(w, raw.untagged(Opcode::ReadRequest, 1, 1, 0, false), &[0; 4]);
        let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 4, true);
        segment(w, raw, header, &[0; 48])
    }),
    ((0, 2, 7), "an atomic operation at an odd offset", |w, raw| {
        atomic(w, raw, |_, r| r.to.0 += 1)
    }),
    ((0, 2, 7), "an atomic operation at half a word", |w, raw| atomic(w, raw, |_, r| r.to.0 += 4)),
    ((0, 2, 6), "an opcode that changes inside a message", |w, raw| {
        let to = buffer(w, 8);
        w.recv(A, 1, &[to.all()]);
        raw.segment(w, raw.untagged(Opcode::Send, 0, 1, 0, false), b"x");
        let header = raw.untagged(Opcode::SendSolicited, 0, 1, 1, true);
        segment(w, raw, header, b"y")
    }),
    ((0, 2, 9), "an invalidation of a region of the whole domain", |w, raw| {
        let stag = buffer(w, 8).stag;
        invalidate(w, raw, stag)
    }),
    ((0, 2, 255), "a Read Request that is too short", |w, raw| {
        let header = raw.untagged(Opcode::ReadRequest, 1, 1, 0, true);
        segment(w, raw, header, &[0; 27])
    }),
    ((0, 2, 255), "an unknown atomic operation", |w, raw| {
        let word = buffer(w, 8);
        let mut request = add_of(&word, 0).emit();
        request[3] = 1;
        let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 0, true);
        segment(w, raw, header, &request)
    }),
    ((0, 2, 255), "an Atomic Request that is too short", |w, raw| {
        let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 0, true);
        segment(w, raw, header, &[0; 51])
    }),
    ((0, 2, 255), "an Atomic Response that is too short", |w, raw| {
        let header = raw.untagged(Opcode::AtomicResponse, 3, 1, 0, true);
        segment(w, raw, header, &[0; 11])
    }),
    ((0, 2, 255), "Immediate Data of seven bytes", |w, raw| {
        w.recv(A, 1, &[]);
        let header = raw.untagged(Opcode::Immediate, 0, 1, 0, true);
        segment(w, raw, header, &[0; 7])
    }),
    ((0, 2, 255), "Immediate Data of which a part is missing", |w, raw| {
        w.recv(A, 1, &[]);
        raw.segment(w, raw.untagged(Opcode::Immediate, 0, 1, 0, false), &[0; 3]);
        let header = raw.untagged(Opcode::Immediate, 0, 1, 4, true);
        segment(w, raw, header, &[0; 4])
    }),
    ((1, 0, 0), "a Write into memory that its owner has truncated", |w, raw| {
        rnic_abi::shm::fault::install().unwrap();
        let (mapping, fd) = Mapping::create_shared_buffer(8192).unwrap();
        let to = w.mr_over(A, mapping, 8192, Access::all(), Scope::Pd, 0x10_0000);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        raw.write(w, to.stag, to.iova, b"x");
        vec![]
    }),
    ((1, 1, 0), "a Write to an unknown STag", |w, raw| write(w, raw, |_, h| h.0.0 ^= 0xFF00)),
    ((1, 1, 0), "a Write to a revoked STag", |w, raw| write(w, raw, |w, h| w.revoke(A, h.0))),
    ((1, 1, 0), "a Write whose STag changes", |w, raw| {
        let other = w.mr(A, 8, Access::REMOTE_WRITE);
        raw.segment(w, raw.tagged(Opcode::Write, other.stag, other.iova, false), b"x");
        write(w, raw, |_, _| ())
    }),
    ((1, 1, 0), "a Write to a read-only region", |w, raw| {
        write(w, raw, |w, h| h.0 = w.mr(A, 8, Access::REMOTE_READ | Access::LOCAL_WRITE).stag)
    }),
    ((1, 1, 1), "a Write from one byte below", |w, raw| write(w, raw, |_, h| h.1 -= 1)),
    ((1, 1, 1), "a Write up to one byte above", |w, raw| write(w, raw, |_, h| h.1 += 1)),
    ((1, 1, 1), "a Write from after the end", |w, raw| write(w, raw, |_, h| h.1 += 9)),
    ((1, 1, 2), "a Write to another domain", |w, raw| {
        write(w, raw, |w, h| h.0 = strangers(w).stag)
    }),
    ((1, 1, 2), "a Write to another stream", |w, raw| write(w, raw, |w, h| h.0 = siblings(w).stag)),
    ((1, 1, 3), "a Write up to 2^64", |w, raw| write(w, raw, |_, h| h.1 = u64::MAX - 7)),
    ((1, 1, 3), "a Write across 2^64", |w, raw| write(w, raw, |_, h| h.1 = u64::MAX)),
    ((1, 1, 4), "a tagged segment of another DDP version", |w, raw| {
        let header = raw.tagged(Opcode::Write, Stag(1), 0, true);
        altered(w, raw, header, |o| o[0] ^= 0x02)
    }),
    ((1, 2, 1), "an unknown queue", |w, raw| {
        let header = raw.untagged(Opcode::Send, 4, 1, 0, true);
        segment(w, raw, header, b"x")
    }),
    ((1, 2, 2), "Immediate Data without a receive", |w, raw| {
        let header = raw.untagged(Opcode::Immediate, 0, 1, 0, true);
        segment(w, raw, header, &[0; 8])
    }),
    ((1, 2, 2), "an atomic operation beyond IRD", |w, raw| {
        let word = buffer(w, 8);
        let from = w.mr(A, 8, Access::REMOTE_READ);
        let request = ReadRequest { size: 8, ..whole(&from) };
        w.links[0].pipes[0].window = 0;
        raw.atomic(w, 1, &add_of(&word, 0));
        (2..=5).for_each(|msn| raw.read(w, msn, &request));
        assert_eq!(w.state(A), QpState::Rts);
        let header = raw.untagged(Opcode::AtomicRequest, 1, 6, 0, true);
        let bytes = segment(w, raw, header, &add_of(&word, 0).emit());
        assert_eq!(w.state(A), QpState::Terminate);
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        bytes
    }),
    ((1, 2, 3), "a gap in the Atomic Responses", |w, raw| {
        let word = buffer(w, 8);
        w.post(A, &[Wr::fetch_add(1, 1, word.all(), &word, 0)]);
        raw.segments(w);
        let header = raw.untagged(Opcode::AtomicResponse, 3, 2, 0, true);
        segment(w, raw, header, &[0; 12])
    }),
    ((1, 2, 5), "Immediate Data of nine bytes", |w, raw| {
        w.recv(A, 1, &[]);
        let header = raw.untagged(Opcode::ImmediateSolicited, 0, 1, 0, true);
        segment(w, raw, header, &[0; 9])
    }),
    ((1, 2, 5), "an Atomic Request that is too long", |w, raw| {
        let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 0, true);
        segment(w, raw, header, &[0; 53])
    }),
    ((1, 2, 2), "a Send without a receive", |w, raw| {
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        segment(w, raw, header, b"x")
    }),
    ((1, 2, 2), "a Read beyond IRD", |w, raw| {
        let from = w.mr(A, 8, Access::REMOTE_READ);
        let request = ReadRequest { size: 8, ..whole(&from) };
        // The first response waits for TCP, and four requests, the negotiated number, follow it.
        w.links[0].pipes[0].window = 0;
        (1..=5).for_each(|msn| raw.read(w, msn, &request));
        assert_eq!(w.state(A), QpState::Rts);
        let header = raw.untagged(Opcode::ReadRequest, 1, 6, 0, true);
        let bytes = segment(w, raw, header, &request.emit());
        assert_eq!(w.state(A), QpState::Terminate);
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        bytes
    }),
    ((1, 2, 3), "a gap in the messages", |w, raw| {
        let to = buffer(w, 8);
        w.recv(A, 1, &[to.all()]);
        w.recv(A, 2, &[to.all()]);
        let header = raw.untagged(Opcode::Send, 0, 2, 0, true);
        segment(w, raw, header, b"x")
    }),
    ((1, 2, 4), "an MO outside the buffer", |w, raw| {
        let to = buffer(w, 8);
        w.recv(A, 1, &[to.all()]);
        let header = raw.untagged(Opcode::Send, 0, 1, 9, true);
        segment(w, raw, header, b"x")
    }),
    ((1, 2, 4), "a last segment that is not the highest", |w, raw| {
        let to = buffer(w, 8);
        w.recv(A, 1, &[to.all()]);
        raw.segment(w, raw.untagged(Opcode::Send, 0, 1, 4, false), b"4567");
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        segment(w, raw, header, b"0123")
    }),
    ((1, 2, 5), "one byte more than the buffer has", |w, raw| {
        let to = buffer(w, 8);
        w.recv(A, 1, &[to.all()]);
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        segment(w, raw, header, &[7; 9])
    }),
    ((1, 2, 6), "an untagged segment of another DDP version", |w, raw| {
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        altered(w, raw, header, |o| o[0] &= !3)
    }),
    ((2, 0, 1), "a FIN inside an FPDU", |w, raw| {
        raw.bytes(w, &hex("002a4143 0000"));
        raw.finish(w);
        vec![]
    }),
    ((2, 0, 2), "a wrong CRC", |w, raw| {
        let mut fpdu = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"x"));
        *fpdu.last_mut().unwrap() ^= 0x80;
        raw.bytes(w, &fpdu);
        vec![]
    }),
    ((2, 0, 3), "a Marker that points elsewhere", |w, raw| {
        let mut fpdu = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"x"));
        fpdu[3] ^= 0x04;
        let end = fpdu.len() - 4;
        let crc = crc32c::crc32c(&fpdu[..end]);
        fpdu[end..].copy_from_slice(&crc.to_le_bytes());
        raw.bytes(w, &fpdu);
        vec![]
    }),
];

/// Codes that no peer can cause, and why.
const NEVER: &[(Code, &str)] = &[
    ((0, 1, 255), "every protection error has its own code"),
    ((0, 2, 8), "a daemon that fails sends nothing more, and no peer can cause it"),
    ((1, 3, 0), "reserved for the LLP: TCP defines no errors there"),
    ((2, 0, 4), "a wrong start-up frame closes the connection, without a Terminate"),
    ((2, 0, 5), "RFC 6581, at start-up: a local failure closes the connection"),
    ((2, 0, 6), "RFC 6581, at start-up: stream/startup/tests.rs"),
    ((2, 0, 7), "RFC 6581, at start-up: stream/startup/tests.rs"),
];

//= DDP-6.2.2-1
//= DDP-6.2.2-3
//= DDP-7-1
//= DDP-7.1-1
//= DDP-7.1-2
//= DDP-7.1-7
//= DDP-7.1-8
//= DDP-7.1-9
//= DDP-7.1-11
//= DDP-7.1-12
//= DDP-7.1-13
//= DDP-7.1-14
//= DDP-7.1-15
//= DDP-7.1-16
//= DDP-7.1-17
//= DDP-7.1-19
//= DDP-7.2-1
//= 7306-5-7
//= 7306-5-9
//= 7306-5.1.2-10
//= 7306-5.2-2
//= 7306-5.2.1-1
//= 7306-5.2.1-6
//= 7306-5.2.1-14
//= 7306-5.2.1-18
//= 7306-5.2.2-1
//= 7306-5.2.2-8
//= 7306-6.1-5
//= 7306-6.3-7
//= 7306-8.1-2
//= 7306-8.2-5
//= RDMAP-4.8-4
//= RDMAP-4.8-5
//= RDMAP-4.8-7
//= RDMAP-4.8-9
//= RDMAP-4.8-14
//= RDMAP-5.2.1-13
//= RDMAP-5.2.1-2
//= RDMAP-7.1-4
//= RDMAP-7.2-7
//= RDMAP-7.2-8
//= RDMAP-7.2-9
//= RDMAP-7.2-10
//= RDMAP-7.2-11
#[test]
fn every_terminate_code_of_the_table() {
    let mut carried_out = BTreeSet::new();
    for row in table("terminate_code") {
        let byte = |key| row.find_number(key).map(|n| u8::try_from(n).unwrap());
        // Rows for any code are tested with code 0.
        let code = byte("code").unwrap_or(0);
        let code = (byte("layer").unwrap(), byte("etype").unwrap(), code);
        let name = row.text("name");
        let stimuli: Vec<_> = STIMULI.iter().filter(|(of, ..)| *of == code).collect();
        match NEVER.iter().find(|(of, _)| *of == code) {
            Some((_, reason)) => {
                assert!(stimuli.is_empty() && !reason.is_empty(), "{name} is in both lists");
            }
            None => assert!(!stimuli.is_empty(), "no stimulus causes {name}, {code:?}"),
        }
        for (_, cause, act) in stimuli {
            check_terminate(code, row.text("flags"), cause, *act);
        }
        carried_out.insert(code);
    }
    let known = STIMULI.iter().map(|(of, ..)| of).chain(NEVER.iter().map(|(of, _)| of));
    assert_eq!(known.copied().collect::<BTreeSet<_>>(), carried_out, "not in the table");
}

/// Runs a stimulus and compares the Terminate byte for byte.
fn check_terminate((layer, etype, code): Code, flags: &str, cause: &str, act: Stimulus) {
    let plain = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
    // Markers only in the test of Markers.
    let options = Options { markers: (layer, etype, code) == (2, 0, 3), ..plain };
    let (mut w, mut raw) = World::against_raw(true, options, options);
    w.events(A);
    let failing = act(&mut w, &mut raw);
    // RFC 7306 section 8: for an Atomic Request no RDMAP header is returned.
    let atomic = failing.first().is_some_and(|o| o & 0x80 == 0) && failing[1] & 0xF == 10;
    let flags = if atomic { "MD" } else { flags };
    let has = |flag| if flags.contains(flag) { 0xFF } else { 0 };
    let bits = 0x80 & has('M') | 0x40 & has('D') | 0x20 & has('R');
    let mut expected = vec![layer << 4 | etype, code, bits, 0];
    if bits & 0x80 != 0 {
        expected.extend((failing.len() as u16).to_be_bytes());
    }
    let header_len = if failing.first().is_some_and(|o| o & 0x80 != 0) { 14 } else { 18 };
    if bits & 0x40 != 0 {
        expected.extend(&failing[..header_len]);
    }
    if bits & 0x20 != 0 {
        expected.extend(&failing[header_len..header_len + 28]);
    }
    let sent = raw.segments(&mut w);
    let terminate = sent.last().unwrap_or_else(|| panic!("{cause}: nothing came back"));
    assert_eq!(terminate.header, raw.untagged(Opcode::Terminate, 2, 1, 0, true), "{cause}");
    assert_eq!(terminate.payload, expected, "{cause}");
    assert!(raw.fin && !raw.reset, "{cause}: a FIN follows");
    // An access to memory that the peer has no right to counts as a guessed STag, regardless of the
    // fault.
    let tried = matches!((layer, etype, code), (0, 1, 0..=4 | 9) | (0, 2, 9) | (1, 1, 0..=3));
    assert_eq!(w.guesses.len(), usize::from(tried), "{cause}: guesses");
    // The application gets the same code, and no other event.
    raw.close(&mut w);
    let mut events = w.events(A);
    events.retain(|event| !event.starts_with("fatal: "));
    let headers: String = expected[4..].iter().map(|o| format!("{o:02x}")).collect();
    let told = format!("terminated {layer:x}/{etype:x}/{code:02x} {headers}");
    let told = if cause.contains("FIN") {
        "lost: the peer closed inside a message"
    } else {
        told.trim_end()
    };
    assert_eq!(events, [told], "{cause}");
    assert_eq!(w.state(A), QpState::Error);
}

// --- Parts of the stimuli ------------------------------------------------------------------------

fn segment(w: &mut World, raw: &mut Raw, header: Header, payload: &[u8]) -> Vec<u8> {
    let bytes = ulpdu(&header, payload);
    raw.ulpdu(w, &bytes);
    bytes
}

/// Sends a segment with changed bytes, and with the reserved bits of DDP set.
fn altered(w: &mut World, raw: &mut Raw, header: Header, change: fn(&mut [u8])) -> Vec<u8> {
    let mut bytes = ulpdu(&header, b"x");
    bytes[0] |= 0x3C;
    change(&mut bytes);
    raw.ulpdu(w, &bytes);
    bytes
}

fn buffer(w: &mut World, len: usize) -> Mr {
    w.any_mr(A, len)
}

/// Creates a region of another session, in another domain.
fn strangers(w: &mut World) -> Mr {
    let app = w.app(0);
    let cq = w.cq(app, 16);
    let stranger = w.qp(app, cq, cq, Default::default());
    w.any_mr(stranger, 100)
}

/// Creates a region limited to another QP of the same domain.
fn siblings(w: &mut World) -> Mr {
    let cq = w.cq(0, 16);
    let sibling = w.qp(0, cq, cq, Default::default());
    w.own_mr(sibling, 100, Access::all())
}

fn whole(from: &Mr) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(0x10),
        size: from.len as u32,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    }
}

/// Sends a Read Request that is correct except for a change.
fn read(w: &mut World, raw: &mut Raw, change: fn(&mut World, &mut ReadRequest)) -> Vec<u8> {
    let from = w.mr(A, 100, Access::REMOTE_READ);
    let mut request = whole(&from);
    change(w, &mut request);
    let header = raw.untagged(Opcode::ReadRequest, 1, 1, 0, true);
    segment(w, raw, header, &request.emit())
}

/// Sends an atomic operation that is correct except for a change. The word must stay unchanged.
fn atomic(w: &mut World, raw: &mut Raw, change: fn(&mut World, &mut AtomicRequest)) -> Vec<u8> {
    let word = w.mr(A, 16, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
    let mut request = add_of(&word, 0);
    change(w, &mut request);
    let header = raw.untagged(Opcode::AtomicRequest, 1, 1, 0, true);
    let bytes = segment(w, raw, header, &request.emit());
    assert_eq!(word.bytes(), [0; 16]);
    bytes
}

/// Sends a Write of eight bytes that is correct except for a change of its STag and offset. Nothing
/// may be placed.
fn write(w: &mut World, raw: &mut Raw, change: fn(&mut World, &mut (Stag, u64))) -> Vec<u8> {
    let to = w.mr(A, 8, Access::REMOTE_WRITE);
    let mut place = (to.stag, to.iova);
    change(w, &mut place);
    let header = raw.tagged(Opcode::Write, place.0, place.1, true);
    let bytes = segment(w, raw, header, b"evil evi");
    assert_eq!(to.bytes(), [0; 8]);
    bytes
}

/// Sends a Send with Invalidate for which there is a receive.
fn invalidate(w: &mut World, raw: &mut Raw, stag: Stag) -> Vec<u8> {
    w.recv(A, 1, &[]);
    let mut header = raw.untagged(Opcode::SendInvalidate, 0, 1, 0, true);
    if let Header::Untagged(header) = &mut header {
        header.inv_stag = stag;
    }
    segment(w, raw, header, b"")
}
