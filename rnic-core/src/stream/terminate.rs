//! Builds the Terminate message for a [`Fault`] (RFC 5040 section 4.8).
//!
//! The failing segment is given by its bytes as received, by stored header bytes, or on the direct
//! path, where there are no bytes, by a typed header.

use super::{Enclose, Fault};
use crate::ddp;
use crate::rdmap::{Layout, READ_REQUEST_LEN, ReadRequest, Terminate};

/// Returns the payload of a Terminate for a fault of the ULPDU `failing`, which is empty if there
/// is none.
///
/// `read` replaces the Read Request in the ULPDU, if the request had several segments or its
/// response was partly sent ([`ReadRequest::advanced`]).
#[must_use]
pub fn build(fault: Fault, failing: &[u8], read: Option<&ReadRequest>) -> Vec<u8> {
    // The length field of an FPDU limits the ULPDU to 65,535 bytes.
    //= RDMAP-4.8-7
    let len = u16::try_from(failing.len()).unwrap_or(u16::MAX);
    let Ok(segment) = ddp::Segment::new_checked(failing) else {
        let enclose = if fault.enclose == Enclose::None { Enclose::None } else { Enclose::Length };
        return build_from_bytes(Fault { enclose, ..fault }, len, &[], None);
    };
    let own = segment.payload().first_chunk::<READ_REQUEST_LEN>().map(ReadRequest::parse);
    build_from_bytes(fault, len, segment.header_bytes(), read.or(own.as_ref()))
}

/// Like [`build`], for a segment of the direct path.
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

/// Like [`build`], from the bytes of a DDP header and the length of its segment. Without `read`, a
/// Terminate for a Read Request encloses only the segment's length and DDP header.
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
    fn truncated_header_encloses_only_the_length() {
        let fault = Fault::segment(codes::OPERATION_UNSPECIFIED);
        let bytes = build(fault, &[0x41, 0x43, 0], None);
        let t = Terminate::parse(&bytes).expect("complete Terminate");
        assert_eq!((t.segment_len, t.ddp_header, t.read_request), (Some(3), None, None));
        assert_eq!(bytes.len(), 6);
    }
}
