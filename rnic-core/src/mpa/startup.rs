//! Start-up frames (RFC 5044 section 7.1.1) and the enhanced data of RFC 6581 in them.
//!
//! A Request and a Reply are sent on TCP without framing. [`Frame`] is a view of a complete frame,
//! [`Repr`] its contents. [`crate::stream::startup`] implements the exchange.

use std::fmt;

use bitflags::bitflags;

/// Number of bytes before the Private Data.
pub const HEADER_LEN: usize = 20;
/// Maximum Private Data of a frame, in bytes.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Size of the enhanced data, which precede the application's Private Data, in bytes.
pub const ENHANCED_LEN: usize = 4;
/// Value of IRD or ORD meaning that it is not negotiated (RFC 6581 section 9.1).
pub const NOT_NEGOTIATED: u16 = 0x3FFF;

/// Kind of a start-up frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// MPA Request Frame, from the Initiator.
    Request,
    /// MPA Reply Frame, from the Responder.
    Reply,
}

impl FrameKind {
    /// Returns the key: the first 16 bytes of every frame of this kind.
    #[must_use]
    pub const fn key(self) -> &'static [u8; 16] {
        match self {
            //= MPA-7.1.1-1
            FrameKind::Request => b"MPA ID Req Frame",
            //= MPA-7.1.1-3
            FrameKind::Reply => b"MPA ID Rep Frame",
        }
    }
}

bitflags! {
    /// Kinds of ready-to-receive (RTR) message (RFC 6581 section 9.2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct RtrKinds: u8 {
        /// A zero-length Send.
        const SEND = 1;
        /// A zero-length RDMA Write.
        const WRITE = 2;
        /// A zero-length RDMA Read.
        const READ = 4;
    }
}

/// Enhanced data: the first four bytes of the Private Data if S is set (RFC 6581 section 9.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enhanced {
    /// A: peer-to-peer model, in which either side may send after an RTR from the Initiator.
    pub peer_to_peer: bool,
    /// B, C, D: RTRs that the sender of the frame supports. Ignored if A is clear.
    pub rtr: RtrKinds,
    /// Maximum inbound RDMA Reads (IRD) of the sender, 14 bits, or [`NOT_NEGOTIATED`].
    pub ird: u16,
    /// Desired outbound RDMA Reads (ORD) of the sender, 14 bits, or [`NOT_NEGOTIATED`].
    pub ord: u16,
}

impl Enhanced {
    const FLAG_A: u16 = 0x8000;
    const FLAG_B: u16 = 0x4000;
    const FLAG_C: u16 = 0x8000;
    const FLAG_D: u16 = 0x4000;
    const NUMBER: u16 = 0x3FFF;

    /// Decodes the four bytes. Every value is valid.
    #[must_use]
    pub fn parse(bytes: [u8; ENHANCED_LEN]) -> Enhanced {
        let first = u16::from_be_bytes([bytes[0], bytes[1]]);
        let second = u16::from_be_bytes([bytes[2], bytes[3]]);
        let mut rtr = RtrKinds::empty();
        rtr.set(RtrKinds::SEND, first & Self::FLAG_B != 0);
        rtr.set(RtrKinds::WRITE, second & Self::FLAG_C != 0);
        rtr.set(RtrKinds::READ, second & Self::FLAG_D != 0);
        Enhanced {
            peer_to_peer: first & Self::FLAG_A != 0,
            rtr,
            ird: first & Self::NUMBER,
            ord: second & Self::NUMBER,
        }
    }

    /// Encodes the four bytes. B, C and D are 0 without A. Numbers are truncated to 14 bits.
    #[must_use]
    pub fn emit(self) -> [u8; ENHANCED_LEN] {
        let mut first = self.ird & Self::NUMBER;
        let mut second = self.ord & Self::NUMBER;
        if self.peer_to_peer {
            let flag = |kind, flag| if self.rtr.contains(kind) { flag } else { 0 };
            first |= Self::FLAG_A | flag(RtrKinds::SEND, Self::FLAG_B);
            second |= flag(RtrKinds::WRITE, Self::FLAG_C) | flag(RtrKinds::READ, Self::FLAG_D);
        }
        let [a, b] = first.to_be_bytes();
        let [c, d] = second.to_be_bytes();
        [a, b, c, d]
    }
}

/// Fault of a start-up frame. The connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The received bytes match neither key.
    #[error("not an MPA start-up frame")]
    NoKey,
    /// The frame has the other kind: both ends are Initiators or both are Responders.
    #[error("an MPA start-up frame of the wrong kind")]
    WrongKind,
    /// PD_Length is above [`MAX_PRIVATE_DATA`].
    #[error("PD_Length {0} is above 512")]
    PrivateDataTooLong(u16),
    /// Rev is higher than the maximum supported revision.
    #[error("MPA revision {0} is not supported")]
    Revision(u8),
    /// S is set, but PD_Length is too small for the enhanced data.
    #[error("flag S announces enhanced data, but PD_Length is only {0}")]
    NoEnhancedData(u16),
}

/// Progress of decoding a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// Valid so far. The frame has at least this total number of bytes.
    NeedMore(usize),
    /// A complete frame and the bytes after it.
    Complete(Frame<'a>, &'a [u8]),
}

/// A complete start-up frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    bytes: &'a [u8],
}

mod field {
    use std::ops::{Range, RangeFrom};

    pub(super) const KEY: Range<usize> = 0..16;
    pub(super) const FLAGS: usize = 16;
    pub(super) const REVISION: usize = 17;
    pub(super) const PD_LENGTH: Range<usize> = 18..20;
    pub(super) const PRIVATE_DATA: RangeFrom<usize> = super::HEADER_LEN..;

    pub(super) const MARKERS: u8 = 0x80;
    pub(super) const CRC: u8 = 0x40;
    pub(super) const REJECT: u8 = 0x20;
    pub(super) const ENHANCED: u8 = 0x10;
}

impl<'a> Frame<'a> {
    /// Checks for a frame of `kind` with a revision of at most `max_revision` at the front of
    /// `bytes`. Detects a wrong key at the first wrong byte, and an invalid PD_Length or revision
    /// as soon as the header is complete.
    pub fn check(
        kind: FrameKind,
        max_revision: u8,
        bytes: &'a [u8],
    ) -> Result<Progress<'a>, FrameError> {
        let key = &bytes[..bytes.len().min(field::KEY.end)];
        //= MPA-7.1.1-2, MPA-7.1.1-4, MPA-7.1.2-5
        if !kind.key().starts_with(key) {
            let other =
                if kind == FrameKind::Request { FrameKind::Reply } else { FrameKind::Request };
            //= MPA-7.1.2-8
            let meant_other = other.key().starts_with(key);
            return Err(if meant_other { FrameError::WrongKind } else { FrameError::NoKey });
        }
        if bytes.len() < HEADER_LEN {
            return Ok(Progress::NeedMore(HEADER_LEN));
        }
        let frame = Frame { bytes };
        let pd_length = frame.pd_length();
        //= MPA-7.1.1-19, MPA-7.1.2-9
        if usize::from(pd_length) > MAX_PRIVATE_DATA {
            //= MPA-7.1.2-9c
            return Err(FrameError::PrivateDataTooLong(pd_length));
        }
        //= MPA-7.1.1-15
        if frame.revision() > max_revision {
            //= MPA-7.1.1-16
            return Err(FrameError::Revision(frame.revision()));
        }
        if frame.is_enhanced() && usize::from(pd_length) < ENHANCED_LEN {
            return Err(FrameError::NoEnhancedData(pd_length));
        }
        let len = HEADER_LEN + usize::from(pd_length);
        if bytes.len() < len {
            return Ok(Progress::NeedMore(len));
        }
        //= MPA-7.1.2-9b
        let (bytes, trailing) = bytes.split_at(len);
        Ok(Progress::Complete(Frame { bytes }, trailing))
    }

    /// M: returns true if the sender requires Markers in received data.
    #[must_use]
    pub fn markers(&self) -> bool {
        self.bytes[field::FLAGS] & field::MARKERS != 0
    }

    /// C: returns true if the sender requires CRCs.
    #[must_use]
    pub fn crc(&self) -> bool {
        self.bytes[field::FLAGS] & field::CRC != 0
    }

    /// R: returns true if the Responder rejects. Has no meaning in a Request.
    #[must_use]
    pub fn reject(&self) -> bool {
        self.bytes[field::FLAGS] & field::REJECT != 0
    }

    /// S: returns true if the Private Data start with enhanced data. The bit is reserved below
    /// revision 2.
    #[must_use]
    pub fn is_enhanced(&self) -> bool {
        //= MPA-7.1.1-13
        self.revision() >= 2 && self.bytes[field::FLAGS] & field::ENHANCED != 0
    }

    /// Rev: returns the MPA revision of the frame, not validated.
    #[must_use]
    pub fn revision(&self) -> u8 {
        self.bytes[field::REVISION]
    }

    fn pd_length(&self) -> u16 {
        u16::from_be_bytes([
            self.bytes[field::PD_LENGTH.start],
            self.bytes[field::PD_LENGTH.start + 1],
        ])
    }

    /// Returns the Private Data of the frame, including enhanced data.
    #[must_use]
    pub fn private_data(&self) -> &'a [u8] {
        &self.bytes[field::PRIVATE_DATA]
    }
}

/// Contents of a start-up frame of either kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr<'a> {
    /// M: the sender requires Markers in received data.
    pub markers: bool,
    /// C: the sender requires CRCs.
    pub crc: bool,
    /// R: true if the Responder rejects. False in a Request, where receivers ignore it.
    pub reject: bool,
    /// Rev: MPA revision of the frame.
    pub revision: u8,
    /// Enhanced data; S is set if present.
    pub enhanced: Option<Enhanced>,
    /// The application's Private Data, without the enhanced data.
    pub private_data: &'a [u8],
}

impl<'a> Repr<'a> {
    /// Decodes a frame.
    #[must_use]
    pub fn parse(frame: &Frame<'a>) -> Repr<'a> {
        let (enhanced, private_data) = match frame.private_data().split_first_chunk() {
            Some((bytes, rest)) if frame.is_enhanced() => (Some(Enhanced::parse(*bytes)), rest),
            _ => (None, frame.private_data()),
        };
        Repr {
            markers: frame.markers(),
            crc: frame.crc(),
            reject: frame.reject(),
            revision: frame.revision(),
            enhanced,
            private_data,
        }
    }

    /// Returns the length of the frame in bytes.
    #[must_use]
    pub fn buffer_len(&self) -> usize {
        HEADER_LEN + self.pd_length()
    }

    fn pd_length(&self) -> usize {
        self.enhanced.map_or(0, |_| ENHANCED_LEN) + self.private_data.len()
    }

    /// Writes the frame to `out`, which must be exactly [`Repr::buffer_len`] bytes long.
    #[expect(clippy::cast_possible_truncation, reason = "callers check the length of Private Data")]
    pub fn emit(&self, kind: FrameKind, out: &mut [u8]) {
        out[field::KEY].copy_from_slice(kind.key());
        let mut flags = 0;
        for (set, flag) in [
            (self.markers, field::MARKERS),
            (self.crc, field::CRC),
            (self.reject, field::REJECT),
            (self.enhanced.is_some(), field::ENHANCED),
        ] {
            flags |= if set { flag } else { 0 };
        }
        //= MPA-7.1.1-12
        out[field::FLAGS] = flags;
        out[field::REVISION] = self.revision;
        //= MPA-7.1.1-18
        out[field::PD_LENGTH].copy_from_slice(&(self.pd_length() as u16).to_be_bytes());
        let mut private = &mut out[field::PRIVATE_DATA];
        if let Some(enhanced) = self.enhanced {
            let (front, rest) = private.split_at_mut(ENHANCED_LEN);
            front.copy_from_slice(&enhanced.emit());
            private = rest;
        }
        private.copy_from_slice(self.private_data);
    }

    /// Encodes the frame into a new buffer.
    #[must_use]
    pub fn to_vec(&self, kind: FrameKind) -> Vec<u8> {
        let mut out = vec![0; self.buffer_len()];
        self.emit(kind, &mut out);
        out
    }
}

impl fmt::Display for Repr<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPA rev {}", self.revision)?;
        for (set, letter) in [(self.markers, " M"), (self.crc, " C"), (self.reject, " R")] {
            if set {
                f.write_str(letter)?;
            }
        }
        if let Some(e) = self.enhanced {
            write!(f, " S IRD {} ORD {}", e.ird, e.ord)?;
            if e.peer_to_peer {
                write!(f, " peer-to-peer {:?}", e.rtr)?;
            }
        }
        write!(f, " private data {}", self.private_data.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpa::tests::hex;

    /// A Request from siw for the peer-to-peer model.
    const REQUEST: &str = "4d504120 49442052 65712046 72616d65 10020004 8004c004";

    #[test]
    fn literal_request() {
        let bytes = hex(REQUEST);
        let Ok(Progress::Complete(frame, &[])) = Frame::check(FrameKind::Request, 2, &bytes) else {
            panic!("a complete Request");
        };
        let repr = Repr::parse(&frame);
        let enhanced =
            Enhanced { peer_to_peer: true, rtr: RtrKinds::WRITE | RtrKinds::READ, ird: 4, ord: 4 };
        let expected = Repr {
            markers: false,
            crc: false,
            reject: false,
            revision: 2,
            enhanced: Some(enhanced),
            private_data: &[],
        };
        assert_eq!(repr, expected);
        assert_eq!(repr.to_vec(FrameKind::Request), bytes);
        assert_eq!(
            repr.to_string(),
            "MPA rev 2 S IRD 4 ORD 4 peer-to-peer RtrKinds(WRITE | READ) private data 0"
        );
    }

    #[test]
    fn truncated_frame_returns_known_length() {
        let bytes = hex(REQUEST);
        for cut in 0..bytes.len() {
            let known = if cut < HEADER_LEN { HEADER_LEN } else { bytes.len() };
            let progress = Frame::check(FrameKind::Request, 2, &bytes[..cut]);
            assert_eq!(progress, Ok(Progress::NeedMore(known)), "{cut}");
        }
    }

    #[test]
    fn every_word_of_enhanced_data() {
        for word in 0..=u16::MAX {
            let [high, low] = word.to_be_bytes();
            let first = Enhanced::parse([high, low, 0xC0, 0x07]);
            assert_eq!((first.ird, first.peer_to_peer), (word & 0x3FFF, word & 0x8000 != 0));
            assert_eq!(first.rtr.contains(RtrKinds::SEND), word & 0x4000 != 0);
            let second = Enhanced::parse([0x80, 0x07, high, low]);
            assert_eq!((second.ord, second.ird), (word & 0x3FFF, 7));
            assert_eq!(second.rtr.contains(RtrKinds::WRITE), word & 0x8000 != 0);
            assert_eq!(second.rtr.contains(RtrKinds::READ), word & 0x4000 != 0);
            assert_eq!(second.emit(), [0x80, 0x07, high, low]);
        }
    }

    #[test]
    fn rtr_bits_are_zero_without_peer_to_peer() {
        let rtr = RtrKinds::all();
        let enhanced = Enhanced { peer_to_peer: false, rtr, ird: 1, ord: 2 };
        assert_eq!(enhanced.emit(), [0, 1, 0, 2]);
    }
}
