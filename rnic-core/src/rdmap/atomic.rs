//! Atomic Request and Response headers (RFC 7306 section 5.2).

use std::fmt;
use std::ops::Range;

use rnic_abi::types::{AtomicOperation, Stag, TaggedOffset};

/// Size of the Atomic Request header in bytes.
//= 7306-4-1
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// Size of the Atomic Response header in bytes, by its figure; the text of section 4 gives 32.
//= 7306-4-1
pub const ATOMIC_RESPONSE_LEN: usize = 12;

//= 7306-5.2.1-1
mod field {
    use super::Range;

    pub(super) const OPERATION: Range<usize> = 0..4;
    pub(super) const ID: Range<usize> = 4..8;
    pub(super) const STAG: Range<usize> = 8..12;
    pub(super) const TO: Range<usize> = 12..20;
    pub(super) const DATA: Range<usize> = 20..28;
    pub(super) const MASK: Range<usize> = 28..36;
    pub(super) const COMPARE: Range<usize> = 36..44;
    pub(super) const COMPARE_MASK: Range<usize> = 44..52;
    pub(super) const ORIGINAL: Range<usize> = 4..12;
}

/// An operation that RFC 7306 does not define.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown atomic operation {0}")]
pub struct UnknownOperation(pub u8);

/// Parameters of an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// Operation with its operands.
    pub operation: AtomicOperation,
    /// ID chosen by the requester and repeated in the response.
    pub id: u32,
    /// Buffer that contains the target word.
    pub stag: Stag,
    /// Offset of the target word in that buffer.
    pub to: TaggedOffset,
}

impl AtomicRequest {
    const FETCH_ADD: u8 = 0;
    const COMPARE_SWAP: u8 = 2;

    /// Decodes the header. Ignores its 28 reserved bits.
    pub fn parse(bytes: &[u8; ATOMIC_REQUEST_LEN]) -> Result<AtomicRequest, UnknownOperation> {
        let [data, mask] = [field::DATA, field::MASK].map(|range| u64_at(bytes, range));
        //= 7306-1.1-1, 7306-5-4, 7306-5.2.1-3, 7306-5.2.1-4
        let operation = match bytes[field::OPERATION.end - 1] & 0x0F {
            //= 7306-5.2.1-12
            Self::FETCH_ADD => AtomicOperation::FetchAdd { add: data, boundaries: mask },
            Self::COMPARE_SWAP => AtomicOperation::CompareSwap {
                swap: data,
                swap_mask: mask,
                compare: u64_at(bytes, field::COMPARE),
                compare_mask: u64_at(bytes, field::COMPARE_MASK),
            },
            //= 7306-10.1-1
            other => return Err(UnknownOperation(other)),
        };
        let id = u32_at(bytes, field::ID);
        let stag = Stag(u32_at(bytes, field::STAG));
        Ok(AtomicRequest { operation, id, stag, to: TaggedOffset(u64_at(bytes, field::TO)) })
    }

    /// Encodes the header with reserved bits 0. For a FetchAdd, the compare data are 0 and all bits
    /// of the compare mask are set.
    #[must_use]
    pub fn emit(&self) -> [u8; ATOMIC_REQUEST_LEN] {
        let (number, data, mask, compare, compare_mask) = match self.operation {
            //= 7306-5.2.1-9, 7306-5.2.1-10
            AtomicOperation::FetchAdd { add, boundaries } => {
                //= 7306-5.2.1-11
                (Self::FETCH_ADD, add, boundaries, 0, u64::MAX)
            }
            AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                (Self::COMPARE_SWAP, swap, swap_mask, compare, compare_mask)
            }
        };
        //= 7306-5.2.1-2
        let mut out = [0; ATOMIC_REQUEST_LEN];
        out[field::OPERATION.end - 1] = number;
        out[field::ID].copy_from_slice(&self.id.to_be_bytes());
        out[field::STAG].copy_from_slice(&self.stag.0.to_be_bytes());
        out[field::TO].copy_from_slice(&self.to.0.to_be_bytes());
        //= 7306-5.1.1-9
        out[field::DATA].copy_from_slice(&data.to_be_bytes());
        out[field::MASK].copy_from_slice(&mask.to_be_bytes());
        out[field::COMPARE].copy_from_slice(&compare.to_be_bytes());
        out[field::COMPARE_MASK].copy_from_slice(&compare_mask.to_be_bytes());
        out
    }
}

impl fmt::Display for AtomicRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.operation {
            AtomicOperation::FetchAdd { .. } => "fetch and add",
            AtomicOperation::CompareSwap { .. } => "compare and swap",
        };
        write!(f, "{what} at {}+{:#x}", self.stag, self.to.0)
    }
}

/// Response to an [`AtomicRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// ID of the request.
    pub id: u32,
    /// Value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Decodes the header. Every value is valid.
    #[must_use]
    pub fn parse(bytes: &[u8; ATOMIC_RESPONSE_LEN]) -> AtomicResponse {
        AtomicResponse { id: u32_at(bytes, 0..4), original: u64_at(bytes, field::ORIGINAL) }
    }

    /// Encodes the header.
    #[must_use]
    pub fn emit(self) -> [u8; ATOMIC_RESPONSE_LEN] {
        let mut out = [0; ATOMIC_RESPONSE_LEN];
        //= 7306-5.2.2-1
        out[..4].copy_from_slice(&self.id.to_be_bytes());
        //= 7306-5.1.1-9, 7306-5.1.2-4
        out[field::ORIGINAL].copy_from_slice(&self.original.to_be_bytes());
        out
    }
}

fn u32_at(bytes: &[u8], range: Range<usize>) -> u32 {
    let o = &bytes[range];
    u32::from_be_bytes([o[0], o[1], o[2], o[3]])
}

fn u64_at(bytes: &[u8], range: Range<usize>) -> u64 {
    let o = &bytes[range];
    u64::from_be_bytes([o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]])
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: AtomicRequest = AtomicRequest {
        operation: AtomicOperation::FetchAdd { add: 0x0102_0304_0506_0708, boundaries: 0 },
        id: 0xA1A2_A3A4,
        stag: Stag(0xB1B2_B3B4),
        to: TaggedOffset(0xC1C2_C3C4_C5C6_C7C8),
    };

    //= 7306-5.1.1-9
    //= 7306-5.2.1-1
    //= 7306-5.2.1-2
    //= 7306-5.2.1-9
    //= 7306-5.2.1-10
    //= 7306-5.2.1-11
    #[test]
    fn literal_requests() {
        let mut bytes = vec![0, 0, 0, 0, 0xA1, 0xA2, 0xA3, 0xA4, 0xB1, 0xB2, 0xB3, 0xB4];
        bytes.extend([0xC1, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8]);
        bytes.extend([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0; 8].into_iter().chain([0xFF; 8]));
        assert_eq!(ADD.emit()[..], bytes);
        let operation = AtomicOperation::CompareSwap {
            swap: 0x0102_0304_0506_0708,
            swap_mask: 0xFF,
            compare: 0x11,
            compare_mask: 0xF0F0,
        };
        let swap = AtomicRequest { operation, ..ADD };
        bytes[3] = 2;
        bytes[28..52].fill(0);
        bytes[35] = 0xFF;
        bytes[43] = 0x11;
        bytes[50] = 0xF0;
        bytes[51] = 0xF0;
        assert_eq!(swap.emit()[..], bytes);
        for request in [ADD, swap] {
            assert_eq!(AtomicRequest::parse(&request.emit()), Ok(request));
        }
        assert_eq!(ADD.to_string(), "fetch and add at 0xb1b2b3b4+0xc1c2c3c4c5c6c7c8");
    }

    //= 7306-1.1-1
    //= 7306-5.2.1-3
    //= 7306-5.2.1-4
    //= 7306-10.1-1
    #[test]
    fn unknown_atomic_operations_are_refused() {
        for number in 0..16 {
            let mut bytes = ADD.emit();
            bytes[..4].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xF0 | number]);
            match AtomicRequest::parse(&bytes) {
                Ok(request) => assert!(number == 0 || number == 2, "{request}"),
                Err(error) => assert_eq!(error, UnknownOperation(number)),
            }
        }
    }

    //= 7306-5.2.1-12
    #[test]
    fn compare_fields_of_fetch_add_are_ignored() {
        let mut bytes = ADD.emit();
        bytes[36..].copy_from_slice(&[0x5A; 16]);
        assert_eq!(AtomicRequest::parse(&bytes), Ok(ADD));
    }

    //= 7306-5.1.1-9
    //= 7306-5.2.2-1
    #[test]
    fn literal_response() {
        let response = AtomicResponse { id: 0x0102_0304, original: 0x1112_1314_1516_1718 };
        let bytes = [1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
        assert_eq!(response.emit(), bytes);
        assert_eq!(AtomicResponse::parse(&bytes), response);
    }
}
