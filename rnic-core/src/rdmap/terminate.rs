//! Terminate header (RFC 5040 section 4.8).

use std::fmt;

use super::{READ_REQUEST_LEN, codes};
use crate::ddp;
use rnic_abi::types::TerminateCode;

/// Number of bytes before the optional headers.
const CONTROL_LEN: usize = 4;
const SEGMENT_LENGTH_LEN: usize = 2;

const LENGTH_VALID: u8 = 0x80;
const DDP_HEADER: u8 = 0x40;
const RDMA_HEADER: u8 = 0x20;
const FLAGS: u8 = LENGTH_VALID | DDP_HEADER | RDMA_HEADER;

/// Layout of the first three bytes of a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// RFC 5040, figure 7.
    Rfc5040,
    /// Linux siw on little-endian machines: Layer and EType are exchanged, and M, D and R are the
    /// lowest bits of the third byte. Supported for received Terminates only.
    Siw,
}

/// The Terminate is shorter than its flags announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Terminate too short for the headers it announces")]
pub struct TerminateTooShort;

/// Payload of a Terminate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminate<'a> {
    /// Layer, error type and error code.
    pub code: TerminateCode,
    /// M: length of the failing DDP segment, header included.
    pub segment_len: Option<u16>,
    /// D: the failing segment's DDP header, 14 or 18 bytes.
    pub ddp_header: Option<&'a [u8]>,
    /// R: the failing Read Request's header.
    pub read_request: Option<&'a [u8; READ_REQUEST_LEN]>,
    /// Layout in which the Terminate was received.
    pub layout: Layout,
}

impl<'a> Terminate<'a> {
    /// Maximum length of a Terminate in bytes.
    pub const MAX_LEN: usize =
        CONTROL_LEN + SEGMENT_LENGTH_LEN + ddp::MAX_HEADER_LEN + READ_REQUEST_LEN;

    /// Decodes a Terminate according to its flags, with any code and in either layout. Ignores
    /// bytes after the announced headers.
    pub fn parse(bytes: &'a [u8]) -> Result<Terminate<'a>, TerminateTooShort> {
        let (control, mut rest) =
            bytes.split_first_chunk::<CONTROL_LEN>().ok_or(TerminateTooShort)?;
        let (code, flags, layout) = read_control(control, !rest.is_empty());
        let mut segment_len = None;
        let mut ddp_header = None;
        //= RDMAP-4.8-8
        if flags & (LENGTH_VALID | DDP_HEADER) != 0 {
            let (length, after) = rest.split_first_chunk().ok_or(TerminateTooShort)?;
            segment_len = Some(u16::from_be_bytes(*length));
            rest = after;
        }
        //= RDMAP-4.8-9
        if flags & DDP_HEADER != 0 {
            let segment = ddp::Segment::new_checked(rest).map_err(|_| TerminateTooShort)?;
            ddp_header = Some(segment.header_bytes());
            rest = segment.payload();
        }
        //= RDMAP-4.8-11
        let read_request = match flags & RDMA_HEADER {
            0 => None,
            _ => Some(rest.first_chunk().ok_or(TerminateTooShort)?),
        };
        Ok(Terminate { code, segment_len, ddp_header, read_request, layout })
    }

    /// Returns the length of the Terminate in bytes.
    #[must_use]
    pub fn buffer_len(&self) -> usize {
        let length = if self.flags() & LENGTH_VALID != 0 { SEGMENT_LENGTH_LEN } else { 0 };
        CONTROL_LEN
            + length
            + self.ddp_header.map_or(0, <[u8]>::len)
            + self.read_request.map_or(0, |r| r.len())
    }

    /// Encodes the Terminate, always in the layout of the RFC. With a DDP header there is always a
    /// length field, which is 0 if the length is unknown.
    #[must_use]
    //= RDMAP-4.8-1
    pub fn to_vec(&self) -> Vec<u8> {
        let TerminateCode { layer, etype, code } = self.code;
        let mut out = Vec::with_capacity(self.buffer_len());
        //= RDMAP-4.8-2, RDMAP-4.8-6
        out.extend_from_slice(&[layer << 4 | etype & 0x0F, code, self.flags(), 0]);
        if self.flags() & LENGTH_VALID != 0 {
            out.extend_from_slice(&self.segment_len.unwrap_or(0).to_be_bytes());
        }
        out.extend_from_slice(self.ddp_header.unwrap_or_default());
        out.extend_from_slice(self.read_request.map_or(&[][..], |r| r));
        out
    }

    /// Returns the bytes after the control word, for reports: segment length, DDP header and Read
    /// Request header, if present.
    #[must_use]
    pub fn headers(&self) -> Vec<u8> {
        self.to_vec().split_off(CONTROL_LEN)
    }

    fn flags(&self) -> u8 {
        let mut flags = 0;
        if self.segment_len.is_some() || self.ddp_header.is_some() {
            flags |= LENGTH_VALID;
        }
        if self.ddp_header.is_some() {
            flags |= DDP_HEADER;
        }
        if self.read_request.is_some() {
            flags |= RDMA_HEADER;
        }
        flags
    }
}

/// Decodes code and flags of the control word; the flags are at their positions in [`FLAGS`].
/// `headers` is true if headers follow.
///
/// The layout is siw's if the flags are in siw's position, or if the code is assigned only with
/// Layer and EType exchanged. In the RFC's layout, siw's flags are reserved bits and may have any
/// value. But an RFC Terminate without flags has no headers, whereas a siw Terminate with flags has
/// some.
fn read_control(control: &[u8; CONTROL_LEN], headers: bool) -> (TerminateCode, u8, Layout) {
    //= RDMAP-4.8-2, RDMAP-4.8-6
    let [first, code, third, _] = *control;
    let plain = TerminateCode { layer: first >> 4, etype: first & 0x0F, code };
    let swapped = TerminateCode { layer: plain.etype, etype: plain.layer, code };
    let high = third & FLAGS;
    let low = third & 0x07;
    let low_as_high = (low & 1) << 7 | (low & 2) << 5 | (low & 4) << 3;
    let misplaced = high == 0 && low != 0 && headers;
    let only_swapped = codes::name(plain).is_none() && codes::name(swapped).is_some();
    match (misplaced, only_swapped) {
        (true, _) => (swapped, low_as_high, Layout::Siw),
        (false, true) => (swapped, high, Layout::Siw),
        (false, false) => (plain, high, Layout::Rfc5040),
    }
}

impl fmt::Display for Terminate<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Terminate {}", self.code)?;
        if let Some(len) = self.segment_len {
            write!(f, ", segment of {len}")?;
        }
        if let Some((header, _)) = self.ddp_header.and_then(|h| ddp::Header::parse(h).ok()) {
            write!(f, ", {header}")?;
        }
        if let Some(request) = self.read_request {
            write!(f, ", {}", super::ReadRequest::parse(request))?;
        }
        if self.layout == Layout::Siw {
            f.write_str(", in siw's layout")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mpa::tests::hex;

    const READ: &str = "a1a2a3a4 0000000000000010 00001000 b1b2b3b4 0000000000000020";
    const UNTAGGED: &str = "4141 00000000 00000001 00000001 00000000";

    #[test]
    fn every_header_set_round_trips() {
        let code = codes::PROTECTION_ACCESS;
        let tagged = hex("c140 12345678 0000000000001000");
        let untagged = hex(UNTAGGED);
        let read: [u8; READ_REQUEST_LEN] = hex(READ).try_into().expect("28 bytes");
        for (segment_len, ddp_header, read_request, len) in [
            (None, None, None, 4),
            (Some(9), None, None, 6),
            (Some(60), Some(&tagged[..]), None, 20),
            (Some(60), Some(&untagged[..]), None, 24),
            (Some(46), Some(&untagged[..]), Some(&read), 52),
            (None, None, Some(&read), 32),
        ] {
            let layout = Layout::Rfc5040;
            let repr = Terminate { code, segment_len, ddp_header, read_request, layout };
            let bytes = repr.to_vec();
            assert_eq!((bytes.len(), repr.buffer_len()), (len, len));
            assert_eq!(Terminate::parse(&bytes), Ok(repr));
            for cut in 0..len {
                assert_eq!(Terminate::parse(&bytes[..cut]), Err(TerminateTooShort), "{cut}");
            }
        }
    }

    #[test]
    fn siw_layout_is_recognised() {
        for (bytes, code, flags) in [
            ("21020300", codes::UNTAGGED_NO_BUFFER, 2),
            ("10000700", codes::PROTECTION_INVALID_STAG, 3),
            ("02020000", codes::LLP_CRC, 0),
            ("11010300", codes::TAGGED_BOUNDS, 2),
        ] {
            let bytes = [hex(bytes), hex("0000"), hex(UNTAGGED), hex(READ)].concat();
            let t = Terminate::parse(&bytes).expect("long enough");
            assert_eq!((t.code, t.layout), (code, Layout::Siw));
            assert_eq!(t.segment_len, (flags > 0).then_some(0));
            assert_eq!(t.ddp_header.map(<[u8]>::to_vec), (flags > 1).then(|| hex(UNTAGGED)));
            assert_eq!(t.read_request.map(|r| r.to_vec()), (flags > 2).then(|| hex(READ)));
        }
        // Each flag alone.
        let bytes = [hex("10000400"), hex(READ)].concat();
        let t = Terminate::parse(&bytes).expect("long enough");
        assert_eq!((t.segment_len, t.ddp_header), (None, None));
        assert_eq!(t.read_request.map(|r| r.to_vec()), Some(hex(READ)));
    }

    #[test]
    fn rfc_layout_is_recognised() {
        for (bytes, code) in [
            ("1202c000", codes::UNTAGGED_NO_BUFFER),
            ("0100e000", codes::PROTECTION_INVALID_STAG),
            ("20020000", codes::LLP_CRC),
            ("0205c000", codes::OPERATION_VERSION),
            ("10000000", codes::DDP_LOCAL_CATASTROPHIC),
        ] {
            let bytes = [hex(bytes), hex("0000"), hex(UNTAGGED), hex(READ)].concat();
            let t = Terminate::parse(&bytes).expect("long enough");
            assert_eq!((t.code, t.layout), (code, Layout::Rfc5040));
        }
    }

    //= RDMAP-4.8-6
    #[test]
    fn reserved_terminate_bits_are_ignored() {
        let headers = [hex("0000"), hex(UNTAGGED), hex(READ)].concat();
        for control in ["1202c000", "0100e000", "20020000", "11018000", "10000000", "11000000"] {
            let control = hex(control);
            // Without flags no headers follow, which distinguishes reserved bits from siw's flags.
            let headers = if control[2] == 0 { &[][..] } else { &headers[..] };
            let plain = [&control, headers].concat();
            let expected = Terminate::parse(&plain).expect("long enough");
            assert_eq!(expected.to_vec()[2..4], control[2..4]);
            for reserved in 0..1u16 << 13 {
                let [third, fourth] = reserved.to_be_bytes();
                let bytes = [&[control[0], control[1], control[2] | third, fourth], headers];
                assert_eq!(Terminate::parse(&bytes.concat()), Ok(expected), "{reserved:#x}");
            }
        }
    }

    #[test]
    fn unassigned_code_is_kept() {
        let t = Terminate::parse(&[0xF7, 0x33, 0, 0]).expect("four bytes");
        assert_eq!(t.to_string(), "Terminate f/7/33");
        assert_eq!(t.to_vec(), [0xF7, 0x33, 0, 0]);
    }

    #[test]
    fn terminate_display() {
        let bytes = [hex("0102e000 002e"), hex(UNTAGGED), hex(READ)].concat();
        let t = Terminate::parse(&bytes).expect("complete");
        assert_eq!(
            t.to_string(),
            "Terminate 0/1/02 (RDMA protection: access rights violation), segment of 46, \
             DDP1 untagged last qn 1 msn 1 mo 0, \
             read 4096 from 0xb1b2b3b4+0x20 to 0xa1a2a3a4+0x10"
        );
        assert_eq!(t.headers(), bytes[4..]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_parsed_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..70),
        ) {
            if let Ok(t) = Terminate::parse(&bytes) {
                prop_assert!(t.buffer_len() <= Terminate::MAX_LEN);
                let again = t.to_vec();
                let reread = Terminate::parse(&again).expect("complete");
                prop_assert_eq!(reread.ddp_header, t.ddp_header);
                prop_assert_eq!(reread.read_request, t.read_request);
            }
        }
    }
}
