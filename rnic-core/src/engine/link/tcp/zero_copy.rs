//! Sends without a copy. Without CRCs and Markers the daemon need not read the payload, so TCP
//! takes it from the application's memory.
//!
//! One call to the socket takes the FPDUs that [`transmit`](super::transmit) has already framed,
//! then FPDUs of one long message, each with private headers and a payload in shared memory. A call
//! carries no more bytes than a call with copies: of 64, 128 and 256 KiB the smallest is the
//! fastest here too, because the peer reads data that is still in the caches. A message advances
//! only by the FPDUs of which TCP took at least one byte. The rest of an FPDU that TCP took in part
//! is copied at once, because the memory may be revoked as soon as this call returns.

use std::io;

use arrayvec::ArrayVec;

use super::TxBatch;
use crate::ddp;
use crate::device::memory::{MemoryFault, Target, Unreachable};
use crate::engine::numbers::{cost, ulpdu_len};
use crate::engine::phase::StreamPhase;
use crate::engine::qp::{OutgoingFpdu, Qp};
use crate::engine::requester::message::{Gather, GatherFault, MessageSource, Segment};
use crate::engine::state::EngineState;
use crate::mpa::LENGTH_LEN;
use rnic_abi::shm::io::{MAX_PIECES, Piece};
use rnic_abi::shm::queue::MAX_SGE;

/// Minimum number of unsent bytes of a message to send it without a copy. From this size on, two
/// more pieces per FPDU cost less than the copy.
const MIN_ZERO_COPY: u32 = 16 * 1024;
/// Maximum number of FPDUs in one call.
const MAX_FPDUS: usize = 64;

/// An FPDU to be sent, without its payload.
struct Fpdu {
    head: [u8; LENGTH_LEN + ddp::MAX_HEADER_LEN],
    head_len: usize,
    trailer: &'static [u8],
    /// Number of its targets, in order after the targets of earlier FPDUs.
    targets: usize,
    segment: Segment,
}

impl Fpdu {
    fn bytes(&self) -> usize {
        self.head_len + self.segment.len as usize + self.trailer.len()
    }
}

/// Result of one call.
struct SentBytes {
    /// Bytes that TCP took.
    bytes: usize,
    /// Each FPDU of which TCP took at least one byte, with its length.
    begun: ArrayVec<(Segment, usize), MAX_FPDUS>,
    /// Bytes that TCP did not take of the last FPDU in `begun`, or of the bytes framed before.
    rest: Vec<u8>,
    /// TCP took fewer bytes than the call offered.
    short: bool,
    /// Memory that was found inaccessible.
    gone: Option<MemoryFault>,
}

/// Error of a call that sent nothing, or that found memory inaccessible.
pub(super) enum ZeroCopyError {
    Gather(GatherFault),
    Memory(MemoryFault),
    Interrupted,
    Socket(io::Error),
}

impl Qp {
    /// Returns true if the message in progress is sent without a copy.
    pub(super) fn sends_without_copy(&self, engine: &EngineState) -> bool {
        let (Some(tcp), Some(message)) = (self.link.tcp(), self.requester.message()) else {
            return false;
        };
        tcp.framer.length_and_trailer(0).is_some()
            // An emulated link delays private bytes.
            && self.emulation.is_none()
            && message.total - message.sent >= MIN_ZERO_COPY
            && !self.core.turn.is_over()
            && (self.life.phase().responds() || self.life.phase() == StreamPhase::Terminating)
            && !matches!(message.source, MessageSource::Inline { .. } | MessageSource::Header(_))
            && !self.core.may_cut_fpdus()
            && self.requester.is_in_shared_memory(&engine.stags)
    }

    /// Makes one call to the socket with `framed`, then FPDUs of the message in progress.
    pub(super) fn transmit_zero_copy(
        &mut self,
        engine: &EngineState,
        framed: &[u8],
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Result<(), ZeroCopyError> {
        let taken = self.send_zero_copy(engine, framed, send)?;
        let Some(tcp) = self.link.tcp_mut() else { return Ok(()) };
        let mut end = tcp.framed;
        tcp.framed += taken.begun.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>();
        tcp.on_accepted(taken.bytes, &taken.rest);
        if taken.short && taken.rest.is_empty() {
            tcp.on_refused();
        }
        for (segment, bytes) in taken.begun {
            end += bytes as u64;
            self.core.turn.charge(cost(bytes));
            self.fpdu_sent(&OutgoingFpdu::Segment(segment), Some(end));
        }
        match taken.gone {
            Some(fault) => Err(ZeroCopyError::Memory(fault)),
            None => Ok(()),
        }
    }

    fn send_zero_copy(
        &self,
        engine: &EngineState,
        framed: &[u8],
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Result<SentBytes, ZeroCopyError> {
        let mut targets = ArrayVec::<Target<'_>, MAX_PIECES>::new();
        let mut fpdus = ArrayVec::<Fpdu, MAX_FPDUS>::new();
        self.plan(engine, framed.len(), &mut fpdus, &mut targets).map_err(ZeroCopyError::Gather)?;

        let mut pieces = ArrayVec::<Piece<'_>, MAX_PIECES>::new();
        if !framed.is_empty() {
            pieces.push(Piece::Private(framed));
        }
        let mut next = targets.iter();
        for fpdu in &fpdus {
            pieces.push(Piece::Private(&fpdu.head[..fpdu.head_len]));
            // `sends_without_copy` admits only shared memory.
            pieces.extend(next.by_ref().take(fpdu.targets).filter_map(|target| {
                let (mapping, offset, len) = target.shared()?;
                Some(Piece::Shared { mapping, offset, len })
            }));
            pieces.push(Piece::Private(fpdu.trailer));
        }
        let total = framed.len() + fpdus.iter().map(Fpdu::bytes).sum::<usize>();
        let gone = || {
            let poisoned = |t: &&Target<'_>| t.shared().is_some_and(|(m, ..)| m.is_poisoned());
            let target = targets.iter().find(poisoned)?;
            Some(target.source_fault(Unreachable::Truncated))
        };
        let bytes = match send(&TxBatch::new(&pieces)) {
            Ok(n) => n.min(total),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                return Err(ZeroCopyError::Interrupted);
            }
            // The kernel found an unmapped page before it took any byte.
            Err(_) if gone().is_some() => 0,
            Err(e) => return Err(ZeroCopyError::Socket(e)),
        };

        let mut begun = ArrayVec::new();
        // Offset in this call at which the last FPDU that was begun ends.
        let mut end = framed.len();
        for fpdu in fpdus.iter().take_while(|_| bytes > 0) {
            if end >= bytes {
                break;
            }
            end += fpdu.bytes();
            begun.push((fpdu.segment, fpdu.bytes()));
        }
        let rest = copy_out(&pieces, bytes, end);
        Ok(SentBytes { bytes, begun, rest, short: bytes < total, gone: gone() })
    }

    /// Cuts FPDUs from a copy of the message in progress.
    fn plan<'t>(
        &'t self,
        engine: &'t EngineState,
        framed: usize,
        fpdus: &mut ArrayVec<Fpdu, MAX_FPDUS>,
        targets: &mut ArrayVec<Target<'t>, MAX_PIECES>,
    ) -> Result<(), GatherFault> {
        let (Some(tcp), Some(message)) = (self.link.tcp(), self.requester.message()) else {
            return Ok(());
        };
        let mut message = message.clone();
        let mut bytes = framed;
        // One piece of this call holds the bytes framed before.
        let mut pieces = 1;
        loop {
            let segment = message.next_segment(tcp.mulpdu, tcp.dv);
            let mut memory = Gather::new();
            let core = &self.core;
            let stags = &engine.stags;
            let gathered =
                self.requester.gather_ahead(&mut message, segment.len, core, stags, &mut memory);
            let done = match gathered {
                Ok(done) => done,
                // The FPDUs before the fault can be sent. The next call finds the fault again.
                Err(_) if !fpdus.is_empty() => return Ok(()),
                Err(fault) => return Err(fault),
            };
            let mut head = [0; LENGTH_LEN + ddp::MAX_HEADER_LEN];
            let header_len = segment.header.emit(&mut head[LENGTH_LEN..]);
            let len = header_len + segment.len as usize;
            let Some((length, trailer)) = tcp.framer.length_and_trailer(ulpdu_len(len)) else {
                return Ok(());
            };
            head[..LENGTH_LEN].copy_from_slice(&length);
            let fpdu = Fpdu {
                head,
                head_len: LENGTH_LEN + header_len,
                trailer,
                targets: memory.len(),
                segment,
            };
            bytes += fpdu.bytes();
            pieces += memory.len() + 2;
            targets.extend(memory);
            fpdus.push(fpdu);
            let room = pieces + MAX_SGE + 2 <= MAX_PIECES && !fpdus.is_full();
            if done || !room || bytes >= tcp.batch || cost(bytes) >= self.core.turn.deficit {
                return Ok(());
            }
        }
    }
}

/// Copies the bytes `from..to` of the pieces. Bytes of inaccessible memory become zeros, which keep
/// the framing intact.
fn copy_out(pieces: &[Piece<'_>], from: usize, to: usize) -> Vec<u8> {
    let mut out = vec![0; to.saturating_sub(from)];
    let mut at = 0;
    for piece in pieces {
        let len = match piece {
            Piece::Private(bytes) => bytes.len(),
            Piece::Shared { len, .. } => *len,
        };
        let start = from.clamp(at, at + len);
        let end = to.clamp(at, at + len);
        if start < end {
            let into = &mut out[start - from..end - from];
            match piece {
                Piece::Private(bytes) => into.copy_from_slice(&bytes[start - at..end - at]),
                Piece::Shared { mapping, offset, .. } => {
                    // A failure poisons the mapping, which the caller checks.
                    if mapping.read(offset + (start - at), into).is_err() {
                        into.fill(0);
                    }
                }
            }
        }
        at += len;
    }
    out
}
