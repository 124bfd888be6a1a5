//! RDMAP (RFC 5040, RFC 7306): opcodes and headers.
//!
//! Contains only the formats of the RDMAP layer. [`crate::stream::inbound`] checks the order of
//! opcodes, and the device checks access to memory. Unassigned opcodes and error codes can be
//! represented, so that they can be reported.

mod atomic;
mod read_request;
mod terminate;

use std::fmt;

pub use atomic::{
    ATOMIC_REQUEST_LEN, ATOMIC_RESPONSE_LEN, AtomicRequest, AtomicResponse, UnknownOperation,
};
pub use read_request::{READ_REQUEST_LEN, ReadRequest};
pub use terminate::{Layout, Terminate, TerminateTooShort};

use crate::ddp::qn;
pub use rnic_abi::types::codes;

/// Size of Immediate Data in bytes (RFC 7306 section 6).
//= 7306-4-1
pub const IMMEDIATE_LEN: usize = 8;

/// Message type (section 4.1; RFC 7306 section 5 for types 8 to 11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// RDMA Write, tagged; any number of segments.
    Write,
    /// RDMA Read Request, untagged, on queue 1.
    ReadRequest,
    /// RDMA Read Response, tagged.
    ReadResponse,
    /// Send, untagged, on queue 0.
    Send,
    /// Send with Invalidate, untagged, on queue 0.
    SendInvalidate,
    /// Send with Solicited Event.
    SendSolicited,
    /// Send with Solicited Event and Invalidate.
    SendSolicitedInvalidate,
    /// Terminate, untagged, on queue 2.
    Terminate,
    /// Immediate Data (RFC 7306), untagged, on queue 0.
    Immediate,
    /// Immediate Data with Solicited Event (RFC 7306).
    ImmediateSolicited,
    /// Atomic Request (RFC 7306), untagged, on queue 1.
    AtomicRequest,
    /// Atomic Response (RFC 7306), untagged, on queue 3.
    AtomicResponse,
    /// Send with Solicited Event and four bytes of immediate data, untagged, on queue 0. Not
    /// defined by any RFC; both ends must have agreed to use it.
    SendSolicitedWithImmediate,
    /// Send with four bytes of immediate data, as above.
    SendWithImmediate,
    /// Any other 4-bit number.
    Unknown(u8),
}

impl Opcode {
    /// Returns the opcode for the low four bits.
    #[inline]
    #[must_use]
    pub fn from_bits(bits: u8) -> Opcode {
        match bits & Control::OPCODE {
            0 => Opcode::Write,
            1 => Opcode::ReadRequest,
            2 => Opcode::ReadResponse,
            3 => Opcode::Send,
            4 => Opcode::SendInvalidate,
            5 => Opcode::SendSolicited,
            6 => Opcode::SendSolicitedInvalidate,
            7 => Opcode::Terminate,
            8 => Opcode::Immediate,
            9 => Opcode::ImmediateSolicited,
            10 => Opcode::AtomicRequest,
            11 => Opcode::AtomicResponse,
            14 => Opcode::SendSolicitedWithImmediate,
            15 => Opcode::SendWithImmediate,
            other => Opcode::Unknown(other),
        }
    }

    /// Returns the 4-bit number of the opcode.
    #[inline]
    #[must_use]
    //= RDMAP-4.1-4, 7306-4.1-2, 7306-5.2-4
    pub fn bits(self) -> u8 {
        match self {
            Opcode::Write => 0,
            Opcode::ReadRequest => 1,
            Opcode::ReadResponse => 2,
            Opcode::Send => 3,
            Opcode::SendInvalidate => 4,
            Opcode::SendSolicited => 5,
            Opcode::SendSolicitedInvalidate => 6,
            Opcode::Terminate => 7,
            Opcode::Immediate => 8,
            Opcode::ImmediateSolicited => 9,
            Opcode::AtomicRequest => 10,
            Opcode::AtomicResponse => 11,
            Opcode::SendSolicitedWithImmediate => 14,
            Opcode::SendWithImmediate => 15,
            Opcode::Unknown(bits) => bits & Control::OPCODE,
        }
    }

    /// Returns true if segments of the message are tagged (RFC 5040 section 4.1, figure 4).
    #[inline]
    #[must_use]
    pub fn is_tagged(self) -> bool {
        matches!(self, Opcode::Write | Opcode::ReadResponse)
    }

    /// Returns the message's untagged queue (RFC 5040 section 4.1, figure 4); `None` for tagged and
    /// unknown opcodes.
    #[inline]
    #[must_use]
    //= 7306-4.1-5
    pub fn queue(self) -> Option<u32> {
        match self {
            Opcode::Send
            | Opcode::SendInvalidate
            | Opcode::SendSolicited
            | Opcode::SendSolicitedInvalidate
            | Opcode::SendSolicitedWithImmediate
            | Opcode::SendWithImmediate
            | Opcode::Immediate
            | Opcode::ImmediateSolicited => Some(qn::SEND),
            Opcode::ReadRequest | Opcode::AtomicRequest => Some(qn::READ_REQUEST),
            Opcode::Terminate => Some(qn::TERMINATE),
            Opcode::AtomicResponse => Some(qn::ATOMIC_RESPONSE),
            Opcode::Write | Opcode::ReadResponse | Opcode::Unknown(_) => None,
        }
    }

    /// Returns true if the message requests a solicited event at the receiver.
    #[inline]
    #[must_use]
    pub fn solicits(self) -> bool {
        matches!(
            self,
            Opcode::SendSolicited
                | Opcode::SendSolicitedInvalidate
                | Opcode::SendSolicitedWithImmediate
                | Opcode::ImmediateSolicited
        )
    }

    /// Returns true if the message invalidates an STag of the receiver.
    #[inline]
    #[must_use]
    pub fn invalidates(self) -> bool {
        matches!(self, Opcode::SendInvalidate | Opcode::SendSolicitedInvalidate)
    }

    /// Returns true for a response to a request that the receiver sent.
    #[inline]
    #[must_use]
    pub fn is_response(self) -> bool {
        matches!(self, Opcode::ReadResponse | Opcode::AtomicResponse)
    }

    /// Returns true for Immediate Data.
    #[inline]
    #[must_use]
    pub fn is_immediate(self) -> bool {
        matches!(self, Opcode::Immediate | Opcode::ImmediateSolicited)
    }

    /// Returns true for a Send whose immediate data replace the STag to invalidate.
    #[inline]
    #[must_use]
    pub fn has_immediate(self) -> bool {
        matches!(self, Opcode::SendWithImmediate | Opcode::SendSolicitedWithImmediate)
    }

    /// Returns true for opcodes of RFC 7306.
    #[inline]
    #[must_use]
    pub fn is_extension(self) -> bool {
        self.is_immediate() || matches!(self, Opcode::AtomicRequest | Opcode::AtomicResponse)
    }

    /// Returns the Send with these attributes.
    #[inline]
    #[must_use]
    pub fn send(solicited: bool, invalidate: bool) -> Opcode {
        match (solicited, invalidate) {
            (false, false) => Opcode::Send,
            (false, true) => Opcode::SendInvalidate,
            (true, false) => Opcode::SendSolicited,
            (true, true) => Opcode::SendSolicitedInvalidate,
        }
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Opcode::Write => "RDMA Write",
            Opcode::ReadRequest => "RDMA Read Request",
            Opcode::ReadResponse => "RDMA Read Response",
            Opcode::Send => "Send",
            Opcode::SendInvalidate => "Send with Invalidate",
            Opcode::SendSolicited => "Send with SE",
            Opcode::SendSolicitedInvalidate => "Send with SE and Invalidate",
            Opcode::Terminate => "Terminate",
            Opcode::Immediate => "Immediate Data",
            Opcode::ImmediateSolicited => "Immediate Data with SE",
            Opcode::AtomicRequest => "Atomic Request",
            Opcode::AtomicResponse => "Atomic Response",
            Opcode::SendSolicitedWithImmediate => "Send with SE and immediate data",
            Opcode::SendWithImmediate => "Send with immediate data",
            Opcode::Unknown(bits) => return write!(f, "opcode {bits:#x}"),
        })
    }
}

/// RDMAP control byte, the first of DDP's RsvdULP bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// RV, the RDMAP version: 1, or 0 with an RDMAC peer. Two bits.
    pub rv: u8,
    /// Opcode, the message type. Four bits.
    pub opcode: Opcode,
}

impl Control {
    const OPCODE: u8 = 0x0F;

    /// Decodes the byte. Ignores the two reserved bits.
    #[inline]
    #[must_use]
    pub fn parse(byte: u8) -> Control {
        //= RDMAP-4.1-8
        Control { rv: byte >> 6, opcode: Opcode::from_bits(byte) }
    }

    /// Encodes the byte with reserved bits 0.
    #[inline]
    #[must_use]
    pub fn byte(self) -> u8 {
        //= RDMAP-4.1-1, RDMAP-4.1-7
        self.rv << 6 | self.opcode.bits()
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RDMAP{} {}", self.rv, self.opcode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_control_byte_round_trips() {
        for byte in 0..=255 {
            let control = Control::parse(byte);
            assert_eq!(control.byte(), byte & !0x30, "{control}");
            assert_eq!(Control::parse(control.byte()), control);
        }
    }

    #[test]
    fn buffer_model_and_queue_of_every_opcode() {
        for bits in 0..16 {
            let opcode = Opcode::from_bits(bits);
            let expected = match bits {
                0 | 2 => (true, None),
                1 => (false, Some(1)),
                3..=6 | 8 | 9 | 14 | 15 => (false, Some(0)),
                7 => (false, Some(2)),
                10 => (false, Some(1)),
                11 => (false, Some(3)),
                _ => (false, None),
            };
            assert_eq!((opcode.is_tagged(), opcode.queue()), expected, "{opcode}");
            let facts = (opcode.solicits(), opcode.invalidates(), opcode.is_response());
            let solicits = matches!(bits, 5 | 6 | 9 | 14);
            let expected = (solicits, bits == 4 || bits == 6, bits == 2 || bits == 11);
            assert_eq!(facts, expected, "{opcode}");
        }
    }

    #[test]
    fn unassigned_opcodes_display_as_numbers() {
        assert_eq!(Control::parse(0x4C).to_string(), "RDMAP1 opcode 0xc");
        assert_eq!(Control::parse(0x43).to_string(), "RDMAP1 Send");
    }

    #[test]
    fn send_opcode_of_attributes() {
        assert_eq!(Opcode::send(false, false).bits(), 3);
        assert_eq!(Opcode::send(false, true).bits(), 4);
        assert_eq!(Opcode::send(true, false).bits(), 5);
        assert_eq!(Opcode::send(true, true).bits(), 6);
    }
}
