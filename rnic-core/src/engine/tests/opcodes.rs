//! Every opcode on its queue and on all others, compared with the tables of the conformance suite.

use super::raw::{Raw, add_of, ulpdu};
use super::requests::{Mr, Wr};
use super::world::{A, World};
use crate::conformance::{Row, table};
use crate::ddp::{Header, UntaggedHeader};
use crate::rdmap::{AtomicResponse, Opcode, ReadRequest};
use rnic_abi::types::{Access, Msn, QpState, Stag, TaggedOffset};

/// Queue numbers to try. The tables contain no others.
const QUEUES: [u32; 5] = [0, 1, 2, 3, u32::MAX];

/// A QP on which every message has an effect: with a receive, a region to write and read, an
/// outstanding Read or atomic operation, and an STag that the peer may invalidate.
struct Bench {
    w: World,
    raw: Raw,
    inbox: Mr,
    region: Mr,
    sink: Mr,
    own: Mr,
    word: Mr,
}

impl Bench {
    fn new(version: u8, awaited: Opcode) -> Self {
        let (mut w, mut raw) = World::raw_of_version(version);
        let inbox = w.any_mr(A, 8);
        let sink = w.any_mr(A, 4);
        let region = w.any_mr(A, 4);
        region.set(b"data");
        let own = w.own_mr(A, 4, Access::REMOTE_WRITE);
        w.recv(A, 7, &[inbox.all()]);
        let word = w.any_mr(A, 8);
        let awaited = match (awaited, version) {
            (Opcode::AtomicResponse, 1) => Wr::fetch_add(8, 1, word.all(), &word, 0),
            _ => Wr::read(8, sink.all(), &region, 0),
        };
        w.post(A, &[awaited]);
        assert_eq!(raw.segments(&mut w).len(), 1);
        Bench { w, raw, inbox, region, sink, own, word }
    }

    /// Returns a message with this opcode, as well formed as possible even on a wrong queue.
    /// Reserved bits and the unused STag to invalidate are not 0.
    fn message(&self, opcode: Opcode, queue: Option<u32>, rv: u8) -> Vec<u8> {
        let payload = match opcode {
            Opcode::ReadRequest => {
                let request = ReadRequest {
                    sink_stag: Stag(0xA1A2_A3A4),
                    sink_to: TaggedOffset(0x10),
                    size: 4,
                    src_stag: self.region.stag,
                    src_to: TaggedOffset(self.region.iova),
                };
                request.emit().to_vec()
            }
            Opcode::AtomicRequest => add_of(&self.word, 0).emit().to_vec(),
            Opcode::AtomicResponse => AtomicResponse { id: 0, original: 5 }.emit().to_vec(),
            Opcode::Immediate | Opcode::ImmediateSolicited => b"immediat".to_vec(),
            Opcode::Terminate => vec![0x20, 0x02, 0, 0],
            _ => b"oct!".to_vec(),
        };
        let header = match queue {
            None if opcode == Opcode::ReadResponse => {
                self.raw.tagged(opcode, self.sink.stag, self.sink.iova, true)
            }
            None => self.raw.tagged(opcode, self.region.stag, self.region.iova, true),
            Some(qn) => Header::Untagged(UntaggedHeader {
                last: true,
                dv: self.raw.version,
                rsvd_ulp: opcode.bits(),
                inv_stag: self.own.stag,
                qn,
                msn: Msn(1),
                mo: 0,
            }),
        };
        let mut bytes = ulpdu(&header, &payload);
        bytes[0] |= 0x3C;
        bytes[1] = rv << 6 | 0x30 | opcode.bits();
        bytes
    }

    /// Checks the effect of a message on its own queue.
    fn was_carried_out(mut self, opcode: Opcode) {
        let invalidated = format!(" invalidated {:#x}", self.own.stag.0);
        let completions = self.w.completions(A);
        let receive = |what: &str| vec![format!("7 Receive 4{what}")];
        let expected = match opcode {
            Opcode::Write | Opcode::ReadRequest | Opcode::AtomicRequest => vec![],
            Opcode::AtomicResponse => vec!["8 FetchAdd 8".to_owned()],
            Opcode::Immediate => vec![format!("7 Receive immediate {IMMEDIATE:#x}")],
            Opcode::ImmediateSolicited => {
                vec![format!("7 Receive solicited immediate {IMMEDIATE:#x}")]
            }
            Opcode::ReadResponse => vec!["8 RdmaRead 4".to_owned()],
            Opcode::Send => receive(""),
            Opcode::SendInvalidate => receive(&invalidated),
            Opcode::SendSolicited => receive(" solicited"),
            Opcode::SendSolicitedInvalidate => receive(&format!(" solicited{invalidated}")),
            Opcode::Terminate => {
                vec!["8 RdmaRead WrFlush".to_owned(), "7 Receive WrFlush".to_owned()]
            }
            other => panic!("{other} has no queue"),
        };
        assert_eq!(completions, expected, "{opcode}");
        let places: [(&Mr, &[u8]); 3] =
            [(&self.region, b"data"), (&self.sink, &[0; 4]), (&self.inbox, &[0; 8])];
        for (place, before) in places {
            let written = match opcode {
                Opcode::Write => place.stag == self.region.stag,
                Opcode::ReadResponse => place.stag == self.sink.stag,
                Opcode::ReadRequest
                | Opcode::Terminate
                | Opcode::AtomicRequest
                | Opcode::AtomicResponse
                | Opcode::Immediate
                | Opcode::ImmediateSolicited => false,
                _ => place.stag == self.inbox.stag,
            };
            let expected = if written { &b"oct!"[..] } else { &before[..4] };
            assert_eq!(&place.bytes()[..4], expected, "{opcode}");
        }
        let word = match opcode {
            Opcode::AtomicRequest => 1,
            Opcode::AtomicResponse => 5u64,
            _ => 0,
        };
        assert_eq!(self.word.bytes(), word.to_ne_bytes(), "{opcode}");
        let said = self.raw.segments(&mut self.w);
        match opcode {
            Opcode::AtomicRequest => {
                let answer = AtomicResponse { id: 0xA1A2_A3A4, original: 0 };
                assert_eq!((said.len(), &said[0].payload[..]), (1, &answer.emit()[..]));
            }
            Opcode::ReadRequest => {
                assert_eq!((said.len(), &said[0].payload[..]), (1, &b"data"[..]));
            }
            _ => assert_eq!(said, [], "{opcode}"),
        }
        let invalidates =
            matches!(opcode, Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate);
        let known = self.w.engines[0].state.stags.get(self.own.stag).is_some();
        assert_eq!(known, !invalidates, "{opcode}");
        if opcode == Opcode::Terminate {
            self.raw.finish(&mut self.w);
            assert_eq!(self.w.events(A), ["terminated by peer 2/0/02"]);
        } else {
            assert_eq!(self.w.state(A), QpState::Rts, "{opcode}");
        }
    }

    /// Checks that a message had no effect except for this Terminate.
    fn was_refused(mut self, bytes: &[u8], code: &str, what: &str) {
        let header_len = if bytes[0] & 0x80 != 0 { 14 } else { 18 };
        let mut headers = (bytes.len() as u16).to_be_bytes().to_vec();
        headers.extend(&bytes[..header_len]);
        let told = self.raw.expect_terminate(&mut self.w);
        assert_eq!(told, (code.to_owned(), headers), "{what}");
        assert_eq!(self.region.bytes(), b"data", "{what}");
        assert_eq!((self.sink.bytes(), self.inbox.bytes()), (vec![0; 4], vec![0; 8]), "{what}");
        let flushed = self.w.completions(A);
        assert!(flushed[0].starts_with("8 ") && flushed[0].ends_with(" WrFlush"), "{what}");
        assert_eq!(flushed[1..], ["7 Receive WrFlush"], "{what}");
        assert_eq!(self.word.bytes(), [0; 8], "{what}");
    }
}

/// Returns the rows for a stream of this version. A stream of an RDMAC peer has only the rows of
/// RFC 5040.
fn known_to(version: u8, name: &str) -> Vec<Row> {
    let known = |row: &Row| match row.number("rfc") {
        5040 => true,
        7306 => version == 1,
        _ => false,
    };
    table(name).into_iter().filter(known).collect()
}

/// Value of the Immediate Data.
const IMMEDIATE: u64 = u64::from_be_bytes(*b"immediat");

//= RDMAP-3.1-2
//= RDMAP-4.1-6
//= RDMAP-4.1-8
//= RDMAP-4.1-10
//= RDMAP-4.2-2
//= RDMAP-7.2-2
//= RDMAP-7.2-3
//= 7306-1.1-5
//= 7306-4.1-1
//= 7306-4.1-2
//= 7306-4.1-4
//= 7306-4.1-5
//= 7306-8.2-2
//= 7306-8.2-3
//= 7306-10.2-1
//= DDP-4.2-3
//= DDP-4.1-1
//= DDP-4.1-2
/// All combinations of opcode, T, queue number and version, in streams of either version. Those in
/// the table are carried out. For the others the first failed check is reported (RFC 5040 section
/// 7.2).
#[test]
fn every_opcode_on_every_queue_and_version() {
    for version in [1, 0] {
        let opcodes = known_to(version, "opcode");
        let queues = known_to(version, "queue");
        let mut carried_out = 0;
        for bits in 0..16u8 {
            for queue in [None].into_iter().chain(QUEUES.map(Some)) {
                for rv in 0..4 {
                    let opcode = Opcode::from_bits(bits);
                    let bench = Bench::new(version, opcode);
                    let bytes = bench.message(opcode, queue, rv);
                    let what = format!("version {version} opcode {bits} {queue:?} RV {rv}");
                    let belongs = opcodes.iter().any(|row| {
                        row.number("value") == u64::from(bits)
                            && row.find_bool("tagged") == Some(queue.is_none())
                            && row.find_number("queue") == queue.map(u64::from)
                    });
                    let known =
                        |queue| queues.iter().any(|q| q.number("value") == u64::from(queue));
                    if !queue.is_none_or(known) {
                        bench.receives(&bytes).was_refused(&bytes, "1/2/01", &what);
                    } else if rv != version {
                        bench.receives(&bytes).was_refused(&bytes, "0/2/05", &what);
                    } else if !belongs {
                        bench.receives(&bytes).was_refused(&bytes, "0/2/06", &what);
                    } else {
                        carried_out += 1;
                        bench.receives(&bytes).was_carried_out(opcode);
                    }
                }
            }
        }
        assert_eq!(carried_out, opcodes.len());
        assert_eq!(opcodes.len(), if version == 1 { 12 } else { 8 });
    }
}

impl Bench {
    fn receives(mut self, bytes: &[u8]) -> Self {
        self.raw.ulpdu(&mut self.w, bytes);
        self
    }
}

//= RDMAP-7.2-1
//= 7306-8.2-1
/// DV is checked before all fields of RDMAP, and reported with the code of the buffer model.
#[test]
fn the_ddp_version_is_checked_first() {
    for version in [1, 0] {
        for opcode in (0..16).map(Opcode::from_bits) {
            for (queue, code) in [(None, "1/1/04"), (Some(0), "1/2/06"), (Some(9), "1/2/06")] {
                for dv in (0..4).filter(|dv| *dv != version) {
                    let bench = Bench::new(version, opcode);
                    let mut bytes = bench.message(opcode, queue, 3);
                    bytes[0] = bytes[0] & !3 | dv;
                    let what = format!("{opcode} {queue:?} DV {dv}");
                    bench.receives(&bytes).was_refused(&bytes, code, &what);
                }
            }
        }
    }
}
