//! What a Terminate says of a [`Fault`] (RFC 5040 section 4.8).
//!
//! Three ways to name the failing segment: its bytes as received, its header bytes kept for
//! later, or a typed header where no bytes ever existed (the direct path).

use super::{Enclose, Fault};
use crate::ddp;
use crate::rdmap::{Layout, READ_REQUEST_LEN, ReadRequest, Terminate};

/// The Terminate's payload for a fault of the ULPDU `failing` (empty if there is none).
///
/// `read` takes the place of the Read Request in the ULPDU: for one of several segments, or one
/// whose response was partly sent ([`ReadRequest::advanced`]).
#[must_use]
pub fn build(fault: Fault, failing: &[u8], read: Option<&ReadRequest>) -> Vec<u8> {
    // A ULPDU cannot be longer than its length field says.
    //= RDMAP-4.8-7
    let len = u16::try_from(failing.len()).unwrap_or(u16::MAX);
    let Ok(segment) = ddp::Segment::new_checked(failing) else {
        let enclose = if fault.enclose == Enclose::None { Enclose::None } else { Enclose::Length };
        return build_from_bytes(Fault { enclose, ..fault }, len, &[], None);
    };
    let own = segment.payload().first_chunk::<READ_REQUEST_LEN>().map(ReadRequest::parse);
    build_from_bytes(fault, len, segment.header_bytes(), read.or(own.as_ref()))
}

/// The same for a segment that never was bytes.
#[must_use]
pub fn build_from_header(
    fault: Fault,
    segment_len: u16,
    header: &ddp::Header,
    read: Option<&ReadRequest>,
) -> Vec<u8> {
    let mut bytes = [0; ddp::MAX_HEADER_LEN];
    let len = header.emit(&mut bytes);
    build_from_bytes(fault, segment_len, &bytes[..len], read)
}

/// The same from a DDP header kept as bytes and the length of the segment it came with. Without
/// `read`, a fault that would enclose a Read Request encloses the segment only.
#[must_use]
pub fn build_from_bytes(
    fault: Fault,
    segment_len: u16,
    header: &[u8],
    read: Option<&ReadRequest>,
) -> Vec<u8> {
    //= RDMAP-4.8-11
    let read = read.filter(|_| fault.enclose == Enclose::SegmentAndRead).map(ReadRequest::emit);
    //= RDMAP-4.8-9
    let with_header = matches!(fault.enclose, Enclose::Segment | Enclose::SegmentAndRead);
    Terminate {
        code: fault.code,
        segment_len: (fault.enclose != Enclose::None).then_some(segment_len),
        ddp_header: with_header.then_some(header),
        read_request: read.as_ref(),
        layout: Layout::Rfc5040,
    }
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdmap::codes;

    #[test]
    fn of_a_segment_without_a_whole_header_only_the_length_is_told() {
        let fault = Fault::segment(codes::OPERATION_UNSPECIFIED);
        let bytes = build(fault, &[0x41, 0x43, 0], None);
        let t = Terminate::parse(&bytes).expect("as long as can be");
        assert_eq!((t.segment_len, t.ddp_header, t.read_request), (Some(3), None, None));
        assert_eq!(bytes.len(), 6);
    }
}
