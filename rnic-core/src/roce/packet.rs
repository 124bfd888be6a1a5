//! A datagram as the payload of a UDP packet: base transport header, datagram extended transport
//! header, immediate data if there are any, the data with padding, and the checksum (IBTA
//! specification, volume 1, sections 9.2, 9.3.3 and 9.3.6).
//!
//! ```text
//!  0  opcode                      12  Q_Key
//!  1  event, migration, padding   16  zero
//!  2  partition key               17  queue pair that sends
//!  4  zero                        20  immediate data, or data
//!  5  queue pair that is meant
//!  8  zero
//!  9  packet sequence number
//! ```

use std::net::SocketAddr;

use super::{Datagram, MAX_DATA, icrc};
use crate::types::{Gid, QpId};

/// Bytes of the largest packet.
pub const MAX_LEN: usize = HEADERS + IMMEDIATE + MAX_DATA + icrc::LEN;

/// Why bytes are no datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketFault {
    /// There are fewer bytes than headers and checksum have, or more than a datagram has.
    #[error("{0} bytes are no datagram's")]
    Length(usize),
    /// It is of another transport, or another version.
    #[error("opcode {0:#04x} is no datagram's")]
    Opcode(u8),
    /// It is of a partition that this device is not in.
    #[error("partition key {0:#06x} is not the default one")]
    Partition(u16),
    /// The checksum is of other bytes.
    #[error("the ICRC is wrong")]
    Checksum,
}

/// Bytes of the packet of a datagram with so many bytes of data.
pub fn len(datagram: &Datagram, data: usize) -> usize {
    let immediate = if datagram.immediate.is_some() { IMMEDIATE } else { 0 };
    HEADERS + immediate + data.next_multiple_of(4) + icrc::LEN
}

/// The packet of a datagram between these ports of UDP.
#[expect(clippy::cast_possible_truncation, reason = "padding has at most three bytes")]
pub fn emit(datagram: &Datagram, data: &[u8], (from_port, to_port): (u16, u16)) -> Vec<u8> {
    let padding = data.len().next_multiple_of(4) - data.len();
    let opcode = match datagram.immediate {
        None => SEND_ONLY,
        Some(_) => SEND_ONLY_IMMEDIATE,
    };
    let event = if datagram.solicited { SOLICITED } else { 0 };
    let mut packet = Vec::with_capacity(len(datagram, data.len()));
    packet.extend([opcode, event | MIGRATED | (padding as u8) << 4]);
    packet.extend(DEFAULT_PARTITION.to_be_bytes());
    packet.extend((datagram.qp.0 & LOW_24).to_be_bytes());
    packet.extend((datagram.psn & LOW_24).to_be_bytes());
    packet.extend(datagram.q_key.to_be_bytes());
    packet.extend((datagram.source.0 & LOW_24).to_be_bytes());
    packet.extend(datagram.immediate.iter().flat_map(|data| data.to_be_bytes()));
    packet.extend(data);
    packet.resize(packet.len() + padding, 0);
    let [from, to] = route(datagram, (from_port, to_port));
    let checksum = icrc::of(from, to, &packet);
    packet.extend(checksum);
    packet
}

/// The queue pair that a packet is for, if it has a header; nothing of it is checked.
pub fn destination(packet: &[u8]) -> Option<QpId> {
    let bytes = packet.get(4..8)?.try_into().ok()?;
    Some(QpId(u32::from_be_bytes(bytes) & LOW_24))
}

/// The datagram that came in a packet from one address to another, and its data.
pub fn parse(
    from: SocketAddr,
    to: SocketAddr,
    packet: &[u8],
) -> Result<(Datagram, &[u8]), PacketFault> {
    let length = || PacketFault::Length(packet.len());
    let (checked, checksum) = packet.split_last_chunk::<{ icrc::LEN }>().ok_or_else(length)?;
    let (header, mut data) = checked.split_first_chunk::<HEADERS>().ok_or_else(length)?;
    let half = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let word = |at: usize| {
        let bytes: [u8; 4] = header[at..at + 4].try_into().unwrap_or_default();
        u32::from_be_bytes(bytes)
    };
    let (opcode, bits) = (header[0], header[1]);
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
    // The high bit says full membership, which a sender need not have.
    if half(2) | FULL_MEMBER != DEFAULT_PARTITION {
        return Err(PacketFault::Partition(half(2)));
    }
    if icrc::of(from, to, checked) != *checksum {
        return Err(PacketFault::Checksum);
    }
    let datagram = Datagram {
        from: Gid::from(from.ip()),
        source: QpId(word(16) & LOW_24),
        to: Gid::from(to.ip()),
        qp: QpId(word(4) & LOW_24),
        q_key: word(12),
        psn: word(8) & LOW_24,
        immediate,
        solicited: bits & SOLICITED != 0,
    };
    Ok((datagram, data))
}

/// The addresses of UDP that a datagram goes between.
fn route(datagram: &Datagram, (from_port, to_port): (u16, u16)) -> [SocketAddr; 2] {
    let from = SocketAddr::new(datagram.from.address(), from_port);
    [from, SocketAddr::new(datagram.to.address(), to_port)]
}

/// Bytes of both headers.
const HEADERS: usize = 20;
const IMMEDIATE: usize = 4;
/// `UD SEND Only`, and with immediate data.
const SEND_ONLY: u8 = 0x64;
const SEND_ONLY_IMMEDIATE: u8 = 0x65;
const SOLICITED: u8 = 0x80;
/// The path is the one that was told first.
const MIGRATED: u8 = 0x40;
/// Version of the transport header, which is 0.
const VERSION: u8 = 0x0F;
const DEFAULT_PARTITION: u16 = 0xFFFF;
const FULL_MEMBER: u16 = 0x8000;
const LOW_24: u32 = 0xFF_FFFF;
