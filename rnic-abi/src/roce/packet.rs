//! Encodes a datagram as the payload of a UDP packet: base transport header, datagram extended
//! transport header, optional immediate data, data with padding, and the ICRC (IBTA specification,
//! volume 1, sections 9.2, 9.3.3 and 9.3.6). Offsets in bytes:
//!
//! ```text
//!  0  opcode                         9  packet sequence number
//!  1  solicited event, migration,   12  Q_Key
//!     padding and version bits      16  zero
//!  2  partition key                 17  source QP
//!  4  zero                          20  immediate data, or data
//!  5  destination QP
//!  8  zero
//! ```

use std::net::SocketAddr;

use super::{Datagram, MAX_DATA, icrc};
use crate::types::{Gid, QpId};

/// Maximum length of a packet in bytes.
pub const MAX_LEN: usize = HEADERS + IMMEDIATE + MAX_DATA + icrc::LEN;

/// Reason why bytes are not a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketFault {
    /// Too short for headers and ICRC, or too long for a datagram.
    #[error("{0} bytes is not a valid datagram packet length")]
    Length(usize),
    /// A different transport, opcode or header version.
    #[error("not a UD SEND Only packet with header version 0 (opcode {0:#04x})")]
    Opcode(u8),
    /// The ICRC does not match.
    #[error("ICRC mismatch")]
    Checksum,
}

/// Returns the length of the packet for a datagram with `data` bytes of data.
pub fn len(datagram: &Datagram, data: usize) -> usize {
    let immediate = if datagram.immediate.is_some() { IMMEDIATE } else { 0 };
    HEADERS + immediate + data.next_multiple_of(4) + icrc::LEN
}

/// Encodes the packet of a datagram between two UDP ports.
#[expect(clippy::cast_possible_truncation, reason = "padding has at most three bytes")]
pub fn emit(datagram: &Datagram, data: &[u8], from_port: u16, to_port: u16) -> Vec<u8> {
    let padding = data.len().next_multiple_of(4) - data.len();
    let opcode = match datagram.immediate {
        None => SEND_ONLY,
        Some(_) => SEND_ONLY_IMMEDIATE,
    };
    let event = if datagram.solicited { SOLICITED } else { 0 };
    let mut packet = Vec::with_capacity(len(datagram, data.len()));
    packet.extend([opcode, event | MIGRATED | (padding as u8) << 4]);
    packet.extend(datagram.p_key.to_be_bytes());
    packet.extend((datagram.qp.0 & LOW_24).to_be_bytes());
    packet.extend((datagram.psn & LOW_24).to_be_bytes());
    packet.extend(datagram.q_key.to_be_bytes());
    packet.extend((datagram.source.0 & LOW_24).to_be_bytes());
    packet.extend(datagram.immediate.iter().flat_map(|data| data.to_be_bytes()));
    packet.extend(data);
    packet.resize(packet.len() + padding, 0);
    let [from, to] = route(datagram, from_port, to_port);
    let checksum = icrc::of(from, to, &packet);
    packet.extend(checksum);
    packet
}

/// Returns the destination QP of a packet, without any other check; `None` if it is too short.
pub fn destination(packet: &[u8]) -> Option<QpId> {
    let bytes = packet.get(4..8)?.try_into().ok()?;
    Some(QpId(u32::from_be_bytes(bytes) & LOW_24))
}

/// Decodes a packet between two UDP addresses into the datagram and its data.
pub fn parse(
    from: SocketAddr,
    to: SocketAddr,
    packet: &[u8],
) -> Result<(Datagram, &[u8]), PacketFault> {
    let length = || PacketFault::Length(packet.len());
    let (checked, checksum) = packet.split_last_chunk::<{ icrc::LEN }>().ok_or_else(length)?;
    let (header, mut data) = checked.split_first_chunk::<HEADERS>().ok_or_else(length)?;
    let word = |at: usize| {
        let bytes: [u8; 4] = header[at..at + 4].try_into().unwrap_or_default();
        u32::from_be_bytes(bytes)
    };
    let opcode = header[0];
    let bits = header[1];
    let immediate = match opcode {
        SEND_ONLY => None,
        SEND_ONLY_IMMEDIATE => {
            let (immediate, rest) = data.split_first_chunk().ok_or_else(length)?;
            data = rest;
            Some(u32::from_be_bytes(*immediate))
        }
        _ => return Err(PacketFault::Opcode(opcode)),
    };
    if bits & VERSION != 0 {
        return Err(PacketFault::Opcode(opcode));
    }
    let padding = usize::from(bits >> 4 & 3);
    let data = data.get(..data.len().wrapping_sub(padding)).ok_or_else(length)?;
    if data.len() > MAX_DATA || (data.len() + padding) % 4 != 0 {
        return Err(length());
    }
    if icrc::of(from, to, checked) != *checksum {
        return Err(PacketFault::Checksum);
    }
    let datagram = Datagram {
        from: Gid::from(from.ip()),
        source: QpId(word(16) & LOW_24),
        to: Gid::from(to.ip()),
        qp: QpId(word(4) & LOW_24),
        p_key: u16::from_be_bytes([header[2], header[3]]),
        q_key: word(12),
        psn: word(8) & LOW_24,
        immediate,
        solicited: bits & SOLICITED != 0,
    };
    Ok((datagram, data))
}

/// Returns the UDP packet's source and destination.
fn route(datagram: &Datagram, from_port: u16, to_port: u16) -> [SocketAddr; 2] {
    let from = SocketAddr::new(datagram.from.address(), from_port);
    [from, SocketAddr::new(datagram.to.address(), to_port)]
}

/// Total size of both transport headers, in bytes.
const HEADERS: usize = 20;
const IMMEDIATE: usize = 4;
/// `UD SEND Only`, without and with immediate data.
const SEND_ONLY: u8 = 0x64;
const SEND_ONLY_IMMEDIATE: u8 = 0x65;
const SOLICITED: u8 = 0x80;
/// `MigReq` bit, set in migration state `Migrated`, the only one here.
const MIGRATED: u8 = 0x40;
/// Version of the transport header, which is 0.
const VERSION: u8 = 0x0F;
const LOW_24: u32 = 0xFF_FFFF;
