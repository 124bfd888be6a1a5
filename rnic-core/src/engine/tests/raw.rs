//! A scripted peer: the test sends and reads segments with any contents.

use super::link::End;
use super::requests::Mr;
use super::world::World;
use crate::ddp::{self, Header, TaggedHeader, UntaggedHeader, qn};
use crate::mpa::{Deframer, Framer};
use crate::rdmap::{AtomicRequest, Control, Opcode, ReadRequest, Terminate};
use crate::stream::Negotiated;
use rnic_abi::types::{AtomicOperation, Msn, Stag, TaggedOffset};

/// A scripted peer at the other end of link `link`.
pub(super) struct Raw {
    pub link: usize,
    pub framer: Framer,
    deframer: Deframer,
    pub version: u8,
    inbox: Vec<u8>,
    /// The QP has finished sending, or has reset the connection.
    pub fin: bool,
    pub reset: bool,
}

/// An outgoing segment of the QP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub header: Header,
    pub payload: Vec<u8>,
}

impl Segment {
    pub fn opcode(&self) -> Opcode {
        Control::parse(self.header.rsvd_ulp()).opcode
    }
}

impl Raw {
    pub fn new(link: usize, n: &Negotiated) -> Self {
        Raw {
            link,
            framer: Framer::new(n.tx_markers, n.crc),
            deframer: Deframer::new(n.rx_markers, n.crc),
            version: n.version,
            inbox: Vec::new(),
            fin: false,
            reset: false,
        }
    }

    /// Returns the FPDU of a ULPDU.
    pub fn fpdu(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let mut out = vec![0xEE; self.framer.fpdu_len(ulpdu.len())];
        self.framer.frame(&mut out, ulpdu, 0, |_, _| Ok::<_, ()>(())).unwrap();
        out
    }

    /// Sends raw bytes.
    pub fn bytes(&mut self, w: &mut World, bytes: &[u8]) {
        let now = w.now;
        // After the QP has closed, its end replies with a reset, which `collect` sees.
        let _ = w.links[self.link].send(1, bytes, now);
        w.settle();
    }

    /// Sends a ULPDU.
    pub fn ulpdu(&mut self, w: &mut World, ulpdu: &[u8]) {
        let fpdu = self.fpdu(ulpdu);
        self.bytes(w, &fpdu);
    }

    /// Sends a segment.
    pub fn segment(&mut self, w: &mut World, header: Header, payload: &[u8]) {
        self.ulpdu(w, &ulpdu(&header, payload));
    }

    pub fn tagged(&self, opcode: Opcode, stag: Stag, to: u64, last: bool) -> Header {
        Header::Tagged(TaggedHeader {
            last,
            dv: self.version,
            rsvd_ulp: Control { rv: self.version, opcode }.byte(),
            stag,
            to: TaggedOffset(to),
        })
    }

    pub fn untagged(&self, opcode: Opcode, qn: u32, msn: u32, mo: u32, last: bool) -> Header {
        Header::Untagged(UntaggedHeader {
            last,
            dv: self.version,
            rsvd_ulp: Control { rv: self.version, opcode }.byte(),
            inv_stag: Stag(0),
            qn,
            msn: Msn(msn),
            mo,
        })
    }

    pub fn write(&mut self, w: &mut World, stag: Stag, to: u64, payload: &[u8]) {
        self.segment(w, self.tagged(Opcode::Write, stag, to, true), payload);
    }

    pub fn send(&mut self, w: &mut World, msn: u32, payload: &[u8]) {
        self.segment(w, self.untagged(Opcode::Send, qn::SEND, msn, 0, true), payload);
    }

    pub fn read(&mut self, w: &mut World, msn: u32, request: &ReadRequest) {
        let header = self.untagged(Opcode::ReadRequest, qn::READ_REQUEST, msn, 0, true);
        self.segment(w, header, &request.emit());
    }

    pub fn atomic(&mut self, w: &mut World, msn: u32, request: &AtomicRequest) {
        let header = self.untagged(Opcode::AtomicRequest, qn::READ_REQUEST, msn, 0, true);
        self.segment(w, header, &request.emit());
    }

    pub fn response(&mut self, w: &mut World, stag: Stag, to: u64, payload: &[u8], last: bool) {
        self.segment(w, self.tagged(Opcode::ReadResponse, stag, to, last), payload);
    }

    pub fn terminate(&mut self, w: &mut World, payload: &[u8]) {
        self.segment(w, self.untagged(Opcode::Terminate, qn::TERMINATE, 1, 0, true), payload);
    }

    /// Sends a FIN.
    pub fn finish(&mut self, w: &mut World) {
        let now = w.now;
        w.links[self.link].pipes[1].finish(now);
        w.settle();
    }

    /// Closes the socket, with a reset if bytes from the QP were not read.
    pub fn close(&mut self, w: &mut World) {
        let now = w.now;
        w.links[self.link].close(1, false, now);
        w.settle();
    }

    /// Resets the connection.
    pub fn reset(&mut self, w: &mut World) {
        let now = w.now;
        w.links[self.link].close(1, true, now);
        w.settle();
    }

    /// Returns true if the QP's socket is closed.
    pub fn is_closed(&self, w: &World) -> bool {
        w.links[self.link].ends[0] == End::Closed
    }

    /// Reads the ULPDUs that the QP sent.
    pub fn ulpdus(&mut self, w: &mut World) -> Vec<Vec<u8>> {
        self.collect(w);
        let mut found = Vec::new();
        loop {
            let needed = self.deframer.needed(&self.inbox);
            if needed > self.inbox.len() {
                return found;
            }
            let mut fpdu: Vec<u8> = self.inbox.drain(..needed).collect();
            found.push(self.deframer.take(&mut fpdu).unwrap().to_vec());
        }
    }

    /// Reads the segments that the QP sent.
    pub fn segments(&mut self, w: &mut World) -> Vec<Segment> {
        let segment = |ulpdu: Vec<u8>| {
            let (header, payload) = Header::parse(&ulpdu).unwrap();
            Segment { header, payload: payload.to_vec() }
        };
        self.ulpdus(w).into_iter().map(segment).collect()
    }

    /// Returns true if the data that the QP sent so far end with an FPDU.
    pub fn has_whole_fpdus(&self) -> bool {
        self.inbox.is_empty()
    }

    /// Reads a Terminate, which must be the only segment remaining on the stream, followed by a
    /// FIN. Returns its code and the enclosed headers.
    pub fn expect_terminate(&mut self, w: &mut World) -> (String, Vec<u8>) {
        let segments = self.segments(w);
        assert_eq!(segments.len(), 1, "{segments:?}");
        assert_eq!(segments[0].opcode(), Opcode::Terminate, "{segments:?}");
        assert!(self.fin, "a FIN follows the Terminate");
        let t = Terminate::parse(&segments[0].payload).unwrap();
        assert_eq!(t.to_vec(), segments[0].payload, "nothing after the headers");
        (t.code.number(), t.headers())
    }

    pub fn collect(&mut self, w: &mut World) {
        let now = w.now;
        let pipe = &mut w.links[self.link].pipes[0];
        loop {
            let mut buffer = vec![0; 65536];
            match pipe.recv(&mut [&mut buffer[..]], now) {
                Ok(0) => {
                    self.fin = true;
                    return;
                }
                Ok(n) => self.inbox.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.reset = true;
                    return;
                }
            }
        }
    }
}

/// Returns header and payload as bytes.
pub(super) fn ulpdu(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [0; ddp::MAX_HEADER_LEN];
    let len = header.emit(&mut bytes);
    [&bytes[..len], payload].concat()
}

/// Returns a request to add 1 to the word at offset `at` of a region.
pub(super) fn add_of(to: &Mr, at: u64) -> AtomicRequest {
    AtomicRequest {
        operation: AtomicOperation::FetchAdd { add: 1, boundaries: 0 },
        id: 0xA1A2_A3A4,
        stag: to.stag,
        to: TaggedOffset(to.iova.wrapping_add(at)),
    }
}

/// Returns a request to read `size` bytes at offset `at` of a region, into a nonexistent sink.
pub(super) fn read_of(from: &Mr, at: u64, size: u32) -> ReadRequest {
    ReadRequest {
        sink_stag: Stag(0xA1A2_A3A4),
        sink_to: TaggedOffset(0x10),
        size,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova.wrapping_add(at)),
    }
}
