//! Read Request header (RFC 5040 section 4.4).

use std::fmt;
use std::ops::Range;

use rnic_abi::types::{Stag, TaggedOffset};

/// Size of the header in bytes.
pub const READ_REQUEST_LEN: usize = 28;

mod field {
    use super::Range;

    pub(super) const SINK_STAG: Range<usize> = 0..4;
    pub(super) const SINK_TO: Range<usize> = 4..12;
    pub(super) const SIZE: Range<usize> = 12..16;
    pub(super) const SRC_STAG: Range<usize> = 16..20;
    pub(super) const SRC_TO: Range<usize> = 20..28;
}

/// Parameters of an RDMA Read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Destination buffer of the response. The responder does not interpret it.
    //= RDMAP-5.2.2-8
    pub sink_stag: Stag,
    /// Offset of the response in the destination buffer.
    pub sink_to: TaggedOffset,
    /// RDMARDSZ: number of bytes to read; may be 0.
    pub size: u32,
    /// Source buffer.
    pub src_stag: Stag,
    /// Offset of the data in the source buffer.
    pub src_to: TaggedOffset,
}

impl ReadRequest {
    /// The acknowledgement request of an RC QP, which names no buffer.
    pub const ACKNOWLEDGEMENT: ReadRequest = ReadRequest {
        sink_stag: Stag(0),
        sink_to: TaggedOffset(0),
        size: 0,
        src_stag: Stag(0),
        src_to: TaggedOffset(0),
    };

    /// Decodes the header. Every value is valid.
    #[must_use]
    //= RDMAP-4.4-1
    pub fn parse(bytes: &[u8; READ_REQUEST_LEN]) -> ReadRequest {
        let u32_at = |range: Range<usize>| {
            let o = &bytes[range];
            u32::from_be_bytes([o[0], o[1], o[2], o[3]])
        };
        let u64_at = |range: Range<usize>| {
            let o = &bytes[range];
            u64::from_be_bytes([o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]])
        };
        ReadRequest {
            sink_stag: Stag(u32_at(field::SINK_STAG)),
            sink_to: TaggedOffset(u64_at(field::SINK_TO)),
            size: u32_at(field::SIZE),
            src_stag: Stag(u32_at(field::SRC_STAG)),
            src_to: TaggedOffset(u64_at(field::SRC_TO)),
        }
    }

    /// Encodes the header.
    #[must_use]
    //= RDMAP-4.4-1
    pub fn emit(&self) -> [u8; READ_REQUEST_LEN] {
        let mut out = [0; READ_REQUEST_LEN];
        out[field::SINK_STAG].copy_from_slice(&self.sink_stag.0.to_be_bytes());
        out[field::SINK_TO].copy_from_slice(&self.sink_to.0.to_be_bytes());
        out[field::SIZE].copy_from_slice(&self.size.to_be_bytes());
        out[field::SRC_STAG].copy_from_slice(&self.src_stag.0.to_be_bytes());
        out[field::SRC_TO].copy_from_slice(&self.src_to.0.to_be_bytes());
        out
    }

    /// Returns the remaining request after `sent` bytes of the response, for a Terminate (section
    /// 4.8). Offsets wrap, as in the peer's arithmetic.
    #[must_use]
    //= RDMAP-4.8-12
    pub fn advanced(&self, sent: u32) -> ReadRequest {
        let forward = |to: TaggedOffset| TaggedOffset(to.0.wrapping_add(u64::from(sent)));
        ReadRequest {
            sink_to: forward(self.sink_to),
            size: self.size.saturating_sub(sent),
            src_to: forward(self.src_to),
            ..*self
        }
    }
}

impl fmt::Display for ReadRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadRequest { sink_stag, sink_to, size, src_stag, src_to } = self;
        write!(f, "read {size} from {src_stag}+{:#x} to {sink_stag}+{:#x}", src_to.0, sink_to.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The Read Request of test vector V6.
    const BYTES: [u8; READ_REQUEST_LEN] = [
        0xA1, 0xA2, 0xA3, 0xA4, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0x10, 0, 0xB1, 0xB2, 0xB3, 0xB4,
        0, 0, 0, 0, 0, 0, 0, 0x20,
    ];

    #[test]
    fn advanced_request_covers_the_rest() {
        let request = ReadRequest::parse(&BYTES).advanced(1000);
        assert_eq!(request.sink_to, TaggedOffset(0x10 + 1000));
        assert_eq!(request.src_to, TaggedOffset(0x20 + 1000));
        assert_eq!(request.size, 3096);
        assert_eq!(request.sink_stag, Stag(0xA1A2_A3A4));
    }
}
