//! DDP (RFC 5041): segment headers.
//!
//! Turns the first 14 or 18 bytes of a ULPDU into a [`Header`] and back. Decoding fails only if the
//! segment is shorter than its header, so that every other fault can be reported with the header.
//! [`crate::stream::inbound`] checks the fields of successive segments, and the device checks
//! STags. Section 5.3 prescribes the order of segments: the engine's requester keeps it at the data
//! source. At the data sink, `stream::inbound` checks which segment may arrive next, and the
//! engine's `arrival` checks placement and delivery.

use std::fmt;

use rnic_abi::types::{Msn, Stag, TaggedOffset};

/// Size of the longest header in bytes.
pub const MAX_HEADER_LEN: usize = UntaggedHeader::LEN;

/// Queue numbers that RDMAP uses (RFC 5040 section 3.1).
//= RDMAP-3.1-2
pub mod qn {
    /// Sends of every kind.
    //= RDMAP-5.3-8
    pub const SEND: u32 = 0;
    /// Read Requests and Atomic Requests.
    //= RDMAP-5.2.1-6
    pub const READ_REQUEST: u32 = 1;
    /// Terminate.
    //= RDMAP-5.4-2
    pub const TERMINATE: u32 = 2;
    /// Atomic Responses (RFC 7306 section 5.2.2).
    pub const ATOMIC_RESPONSE: u32 = 3;
}

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const VERSION: u8 = 0x03;

mod field {
    use std::ops::Range;

    pub(super) const CONTROL: usize = 0;
    pub(super) const RSVD_ULP: usize = 1;
    pub(super) const STAG: Range<usize> = 2..6;
    pub(super) const TO: Range<usize> = 6..14;
    pub(super) const INV_STAG: Range<usize> = 2..6;
    pub(super) const QN: Range<usize> = 6..10;
    pub(super) const MSN: Range<usize> = 10..14;
    pub(super) const MO: Range<usize> = 14..18;
}

/// The segment is shorter than its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("DDP segment too short for its header")]
pub struct TooShort;

/// A segment that is long enough for its header.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    bytes: &'a [u8],
    header_len: usize,
}

impl<'a> Segment<'a> {
    /// Checks that a ULPDU contains the complete header selected by its T bit.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Segment<'a>, TooShort> {
        let control = *bytes.first().ok_or(TooShort)?;
        let header_len =
            if control & TAGGED != 0 { TaggedHeader::LEN } else { UntaggedHeader::LEN };
        //= DDP-4.4-1
        if bytes.len() < header_len {
            return Err(TooShort);
        }
        Ok(Segment { bytes, header_len })
    }

    /// Returns the header as received, including reserved bits.
    #[inline]
    #[must_use]
    pub fn header_bytes(&self) -> &'a [u8] {
        &self.bytes[..self.header_len]
    }

    /// Returns the bytes after the header.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.header_len..]
    }

    fn control(&self) -> u8 {
        self.bytes[field::CONTROL]
    }

    fn u32_at(&self, range: std::ops::Range<usize>) -> u32 {
        let o = &self.bytes[range];
        u32::from_be_bytes([o[0], o[1], o[2], o[3]])
    }

    fn u64_at(&self, range: std::ops::Range<usize>) -> u64 {
        let o = &self.bytes[range];
        u64::from_be_bytes([o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]])
    }
}

/// Header of a tagged segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedHeader {
    /// L: the last segment of its message.
    pub last: bool,
    /// DV, the DDP version: 1, or 0 with an RDMAC peer. Two bits.
    pub dv: u8,
    /// RsvdULP: the RDMAP control byte.
    pub rsvd_ulp: u8,
    /// STag of the buffer at the receiver.
    pub stag: Stag,
    /// Tagged offset of the payload in the buffer.
    pub to: TaggedOffset,
}

/// Header of an untagged segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntaggedHeader {
    /// L: the last segment of its message.
    pub last: bool,
    /// DV, the DDP version: 1, or 0 with an RDMAC peer. Two bits.
    pub dv: u8,
    /// RsvdULP, first byte: the RDMAP control byte.
    pub rsvd_ulp: u8,
    /// RsvdULP, last four bytes: STag to invalidate or immediate data, depending on the opcode.
    pub inv_stag: Stag,
    /// QN: queue number; see [`qn`] for the queues of RDMAP.
    pub qn: u32,
    /// Message sequence number in the queue.
    pub msn: Msn,
    /// Message offset of the payload, in bytes.
    pub mo: u32,
}

/// Header of a DDP segment (RFC 5041 section 4), selected by its T bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// T = 1.
    Tagged(TaggedHeader),
    /// T = 0.
    Untagged(UntaggedHeader),
}

impl Header {
    /// Splits a ULPDU into its header and payload.
    #[inline]
    pub fn parse(ulpdu: &[u8]) -> Result<(Header, &[u8]), TooShort> {
        let segment = Segment::new_checked(ulpdu)?;
        let control = segment.control();
        let last = control & LAST != 0;
        //= DDP-4.1-9
        let dv = control & VERSION;
        let rsvd_ulp = segment.bytes[field::RSVD_ULP];
        let header = if control & TAGGED != 0 {
            //= DDP-4.2-1
            Header::Tagged(TaggedHeader {
                last,
                dv,
                rsvd_ulp,
                stag: Stag(segment.u32_at(field::STAG)),
                to: TaggedOffset(segment.u64_at(field::TO)),
            })
        } else {
            //= DDP-4.3-1
            Header::Untagged(UntaggedHeader {
                last,
                dv,
                rsvd_ulp,
                //= RDMAP-4.1-2
                inv_stag: Stag(segment.u32_at(field::INV_STAG)),
                qn: segment.u32_at(field::QN),
                msn: Msn(segment.u32_at(field::MSN)),
                mo: segment.u32_at(field::MO),
            })
        };
        Ok((header, segment.payload()))
    }

    /// Writes the header to the front of `out` and returns its length. `out` must have at least
    /// [`Header::len`] bytes. Reserved bits are 0.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        match self {
            Header::Tagged(h) => h.emit(out),
            Header::Untagged(h) => h.emit(out),
        }
    }

    /// Returns the length of the header in bytes.
    #[inline]
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no header is empty")]
    pub fn len(&self) -> usize {
        match self {
            Header::Tagged(_) => TaggedHeader::LEN,
            Header::Untagged(_) => UntaggedHeader::LEN,
        }
    }

    /// Returns the RDMAP control byte.
    #[inline]
    #[must_use]
    pub fn rsvd_ulp(&self) -> u8 {
        match self {
            Header::Tagged(h) => h.rsvd_ulp,
            Header::Untagged(h) => h.rsvd_ulp,
        }
    }
}

impl TaggedHeader {
    /// Size of the header in bytes (section 4.2).
    pub const LEN: usize = 14;

    /// Writes the header to the front of `out` and returns its length, 14.
    #[inline]
    //= DDP-4.2-1
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = &mut out[..Self::LEN];
        out[field::CONTROL] = control(TAGGED, self.last, self.dv);
        //= DDP-4.2-2, RDMAP-3.1-6
        out[field::RSVD_ULP] = self.rsvd_ulp;
        //= DDP-4.2-6, RDMAP-3.1-4
        out[field::STAG].copy_from_slice(&self.stag.0.to_be_bytes());
        out[field::TO].copy_from_slice(&self.to.0.to_be_bytes());
        Self::LEN
    }
}

impl UntaggedHeader {
    /// Size of the header in bytes (section 4.3).
    pub const LEN: usize = 18;

    /// Writes the header to the front of `out` and returns its length, 18.
    #[inline]
    //= DDP-4.3-1
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = &mut out[..Self::LEN];
        out[field::CONTROL] = control(0, self.last, self.dv);
        //= DDP-4.3-2, RDMAP-3.1-6
        out[field::RSVD_ULP] = self.rsvd_ulp;
        //= RDMAP-4.1-2
        out[field::INV_STAG].copy_from_slice(&self.inv_stag.0.to_be_bytes());
        out[field::QN].copy_from_slice(&self.qn.to_be_bytes());
        out[field::MSN].copy_from_slice(&self.msn.0.to_be_bytes());
        out[field::MO].copy_from_slice(&self.mo.to_be_bytes());
        Self::LEN
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Header::Tagged(h) => h.fmt(f),
            Header::Untagged(h) => h.fmt(f),
        }
    }
}

impl fmt::Display for TaggedHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = if self.last { " last" } else { "" };
        write!(f, "DDP{} tagged{last} stag {} to {:#x}", self.dv, self.stag, self.to.0)
    }
}

impl fmt::Display for UntaggedHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = if self.last { " last" } else { "" };
        let UntaggedHeader { dv, qn, msn, mo, .. } = self;
        write!(f, "DDP{dv} untagged{last} qn {qn} msn {} mo {mo}", msn.0)?;
        if self.inv_stag != Stag(0) {
            write!(f, " ulp stag {}", self.inv_stag)?;
        }
        Ok(())
    }
}

#[inline]
fn control(tagged: u8, last: bool, dv: u8) -> u8 {
    //= DDP-4.1-8
    tagged | if last { LAST } else { 0 } | dv & VERSION
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mpa::tests::hex;

    //= DDP-4.2-1
    //= DDP-4.3-1
    #[test]
    fn literal_headers() {
        let tagged = hex("c140 12345678 00000000 00001000");
        let header = Header::Tagged(TaggedHeader {
            last: true,
            dv: 1,
            rsvd_ulp: 0x40,
            stag: Stag(0x1234_5678),
            to: TaggedOffset(0x1000),
        });
        assert_eq!(Header::parse(&tagged), Ok((header, &[][..])));
        assert_eq!(emitted(&header), tagged);
        assert_eq!(header.to_string(), "DDP1 tagged last stag 0x12345678 to 0x1000");

        let untagged = hex("0144 deadbeef 00000003 0000000a 000005ca");
        let header = Header::Untagged(UntaggedHeader {
            last: false,
            dv: 1,
            rsvd_ulp: 0x44,
            inv_stag: Stag(0xDEAD_BEEF),
            qn: 3,
            msn: Msn(10),
            mo: 1482,
        });
        assert_eq!(Header::parse(&untagged), Ok((header, &[][..])));
        assert_eq!(emitted(&header), untagged);
        assert_eq!(header.to_string(), "DDP1 untagged qn 3 msn 10 mo 1482 ulp stag 0xdeadbeef");
    }

    #[test]
    fn truncated_header_is_too_short() {
        for (first, len) in [(0xC1, TaggedHeader::LEN), (0x41, UntaggedHeader::LEN)] {
            let mut bytes = vec![0x55; len + 3];
            bytes[0] = first;
            for cut in 0..len {
                assert_eq!(Header::parse(&bytes[..cut]), Err(TooShort), "{cut} of {len}");
            }
            let (header, payload) = Header::parse(&bytes).expect("long enough");
            assert_eq!((header.len(), payload), (len, &[0x55; 3][..]));
        }
    }

    #[test]
    fn reserved_bits_are_not_emitted() {
        let mut bytes = [0x11; 20];
        bytes[0] = 0xFD;
        let segment = Segment::new_checked(&bytes).expect("long enough");
        assert_eq!(segment.header_bytes(), &bytes[..14]);
        let (header, _) = Header::parse(&bytes).expect("long enough");
        assert_eq!(emitted(&header)[0], 0xC1);
    }

    fn emitted(header: &Header) -> Vec<u8> {
        let mut out = [0xAA; MAX_HEADER_LEN + 1];
        let len = header.emit(&mut out);
        assert_eq!(len, header.len());
        assert!(out[len..].iter().all(|&junk| junk == 0xAA));
        out[..len].to_vec()
    }

    proptest! {
        #[test]
        fn any_header_round_trips(
            (tagged, last) in any::<(bool, bool)>(),
            dv in 0u8..4,
            rsvd_ulp in any::<u8>(),
            (stag, qn, msn, mo) in any::<(u32, u32, u32, u32)>(),
            to in any::<u64>(),
        ) {
            let stag = Stag(stag);
            let to = TaggedOffset(to);
            let header = if tagged {
                Header::Tagged(TaggedHeader { last, dv, rsvd_ulp, stag, to })
            } else {
                let msn = Msn(msn);
                Header::Untagged(UntaggedHeader { last, dv, rsvd_ulp, inv_stag: stag, qn, msn, mo })
            };
            let bytes = emitted(&header);
            prop_assert_eq!(Header::parse(&bytes), Ok((header, &[][..])));
        }
    }
}
