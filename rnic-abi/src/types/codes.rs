//! Assigned Terminate codes and their names (RFC 5040 section 4.8, RFC 5041 section 7.2, RFC 5044
//! section 8, RFC 6580, RFC 6581).

use std::fmt;

use serde::{Deserialize, Serialize};

/// Layer, error type and error code of a Terminate (RFC 5040 section 4.8). Unassigned codes are
/// displayed as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TerminateCode {
    /// 0 RDMAP, 1 DDP, 2 LLP (MPA).
    pub layer: u8,
    /// Error type within the layer, 4 bits.
    pub etype: u8,
    /// Error code within the error type.
    pub code: u8,
}

impl TerminateCode {
    /// Returns the code as the RFCs write it: `1/2/02`.
    #[must_use]
    pub fn number(self) -> String {
        format!("{:x}/{:x}/{:02x}", self.layer, self.etype, self.code)
    }
}

/// Displays the numbers and the name of the code: `1/2/02 (untagged buffer: ...)`.
impl fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.number())?;
        match name(*self) {
            Some(name) => write!(f, " ({name})"),
            None => Ok(()),
        }
    }
}

macro_rules! codes {
    ($($name:ident = $layer:literal / $etype:literal / $code:literal, $text:literal;)+) => {
        $(
            #[doc = concat!($text, ".")]
            pub const $name: TerminateCode =
                TerminateCode { layer: $layer, etype: $etype, code: $code };
        )+

        /// Returns the name of an assigned code.
        #[must_use]
        pub fn name(code: TerminateCode) -> Option<&'static str> {
            match (code.layer, code.etype, code.code) {
                $(($layer, $etype, $code) => Some($text),)+
                //= RDMAP-4.8-13
                (0, 0, _) => Some("RDMA local catastrophic error"),
                (1, 3, _) => Some("LLP error seen by DDP"),
                _ => None,
            }
        }

        #[cfg(test)]
        const ALL: &[TerminateCode] = &[$($name),+];
    };
}

//= DDP-7.2-1, RDMAP-4.8-3
codes! {
    RDMA_LOCAL_CATASTROPHIC = 0 / 0 / 0x00,
        "RDMA local catastrophic error: the sender's program or device failed";
    PROTECTION_INVALID_STAG = 0 / 1 / 0x00, "RDMA protection: invalid STag";
    PROTECTION_BOUNDS = 0 / 1 / 0x01, "RDMA protection: base or bounds violation";
    PROTECTION_ACCESS = 0 / 1 / 0x02, "RDMA protection: access rights violation";
    PROTECTION_STREAM = 0 / 1 / 0x03, "RDMA protection: STag not associated with the RDMAP stream";
    PROTECTION_TO_WRAP = 0 / 1 / 0x04, "RDMA protection: TO wrap";
    PROTECTION_INVALIDATE = 0 / 1 / 0x09, "RDMA protection: STag cannot be invalidated";
    PROTECTION_UNSPECIFIED = 0 / 1 / 0xFF, "RDMA protection: unspecified";
    OPERATION_VERSION = 0 / 2 / 0x05, "RDMA operation: invalid RDMAP version";
    OPERATION_OPCODE = 0 / 2 / 0x06, "RDMA operation: unexpected opcode";
    OPERATION_CATASTROPHIC_STREAM = 0 / 2 / 0x07, "RDMA operation: catastrophic, this stream";
    OPERATION_CATASTROPHIC_GLOBAL = 0 / 2 / 0x08, "RDMA operation: catastrophic, global";
    OPERATION_INVALIDATE = 0 / 2 / 0x09, "RDMA operation: STag cannot be invalidated";
    OPERATION_UNSPECIFIED = 0 / 2 / 0xFF, "RDMA operation: unspecified";
    DDP_LOCAL_CATASTROPHIC = 1 / 0 / 0x00, "DDP local catastrophic error";
    TAGGED_INVALID_STAG = 1 / 1 / 0x00, "tagged buffer: invalid STag";
    TAGGED_BOUNDS = 1 / 1 / 0x01, "tagged buffer: base or bounds violation";
    TAGGED_STREAM = 1 / 1 / 0x02, "tagged buffer: STag not associated with the DDP stream";
    TAGGED_TO_WRAP = 1 / 1 / 0x03, "tagged buffer: TO wrap";
    TAGGED_VERSION = 1 / 1 / 0x04, "tagged buffer: invalid DDP version";
    UNTAGGED_QN = 1 / 2 / 0x01, "untagged buffer: invalid QN";
    UNTAGGED_NO_BUFFER = 1 / 2 / 0x02, "untagged buffer: invalid MSN, no buffer available";
    UNTAGGED_MSN = 1 / 2 / 0x03, "untagged buffer: invalid MSN, range not valid";
    UNTAGGED_MO = 1 / 2 / 0x04, "untagged buffer: invalid MO";
    UNTAGGED_TOO_LONG = 1 / 2 / 0x05, "untagged buffer: message too long for the buffer";
    UNTAGGED_VERSION = 1 / 2 / 0x06, "untagged buffer: invalid DDP version";
    LLP_CLOSED = 2 / 0 / 0x01, "TCP closed, terminated or lost";
    LLP_CRC = 2 / 0 / 0x02, "CRC mismatch";
    LLP_MARKER = 2 / 0 / 0x03, "Marker and ULPDU_Length disagree";
    LLP_STARTUP = 2 / 0 / 0x04, "invalid start-up frame";
    LLP_LOCAL_CATASTROPHIC = 2 / 0 / 0x05, "set-up: local catastrophic";
    LLP_IRD = 2 / 0 / 0x06, "set-up: insufficient IRD resources";
    LLP_RTR = 2 / 0 / 0x07, "set-up: no matching RTR option";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_assigned_codes_have_names() {
        let mut named = 0;
        for layer in 0..16 {
            for etype in 0..16 {
                for code in 0..=255 {
                    let code = TerminateCode { layer, etype, code };
                    let catch_all = matches!((layer, etype), (0, 0) | (1, 3));
                    let assigned = ALL.contains(&code) || catch_all;
                    assert_eq!(name(code).is_some(), assigned, "{code}");
                    named += usize::from(ALL.contains(&code));
                }
            }
        }
        assert_eq!(named, ALL.len(), "no code is listed twice");
        assert_eq!(ALL.len(), 33);
    }
}
