//! Capture files of relayed connections: classic pcap with Ethernet, IP and TCP headers, as if
//! captured on a network.

use std::io::Write;
use std::path::Path;

use etherparse::{PacketBuilder, TcpOptionElement};

use crate::relay::{Content, Direction, Record};

/// Port of the responder. Wireshark assigns no other protocol to it over TCP.
pub const PORT: u16 = 4791;
/// Segment lengths, used cyclically, so that few segments start with an FPDU. Wireshark does not
/// recognise an FPDU in a segment that has only its first few bytes, so only the last segment of a
/// stream may be shorter than [`SMALLEST`].
const SEGMENTS: [usize; 8] = [1448, 71, 49, 600, SMALLEST, 1448, 90, 1001];
const SMALLEST: usize = 33;

/// How the byte stream is cut into segments.
pub enum Cuts {
    /// At any offset.
    Anywhere,
    /// At FPDU boundaries. Contains the lengths of the FPDUs in each direction.
    Fpdus([Vec<usize>; 2]),
}

/// An end of the connection.
struct End {
    address: [u8; 4],
    port: u16,
    next: u32,
}

/// Writes the connection to a file.
pub fn write(path: &Path, record: &Record, cuts: &Cuts) -> std::io::Result<()> {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    // Magic number for microseconds, version 2.4, snapshot length, Ethernet.
    for word in [0xA1B2_C3D4, 0x0004_0002, 0, 0, 262_144, 1u32] {
        file.write_all(&word.to_le_bytes())?;
    }
    let mut wire = Wire {
        ends: [
            End { address: [192, 0, 2, 1], port: 40_000, next: 0xFFFF_F000 },
            End { address: [192, 0, 2, 2], port: PORT, next: 77_000 },
        ],
        file,
        clock: 0,
    };
    wire.packet(Direction::Up, Flags::Syn, &[])?;
    wire.packet(Direction::Down, Flags::SynAck, &[])?;
    let mut anywhere = SEGMENTS.iter().cycle();
    let mut kept = [const { Vec::new() }; 2];
    let mut fpdus = match cuts {
        Cuts::Anywhere => [[].iter(), [].iter()],
        Cuts::Fpdus(lengths) => [lengths[0].iter(), lengths[1].iter()],
    };
    for (n, (way, content)) in joined(record).into_iter().enumerate() {
        let before = std::mem::take(&mut kept[way as usize]);
        let Content::Bytes(bytes) = content else {
            if !before.is_empty() {
                wire.packet(way, Flags::None, &before)?;
            }
            wire.packet(way, Flags::Fin, &[])?;
            continue;
        };
        let bytes = [before, bytes].concat();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let size = match cuts {
                // The start-up frames.
                _ if n < 2 => rest.len(),
                // A read of the relay may end with the first bytes of an FPDU. Start the next
                // segment with them.
                Cuts::Anywhere if rest.len() < SMALLEST => {
                    kept[way as usize] = rest.to_vec();
                    break;
                }
                Cuts::Anywhere => *anywhere.next().expect("a cycle"),
                Cuts::Fpdus(_) => *fpdus[way as usize].next().expect("all FPDUs"),
            };
            let (segment, behind) = rest.split_at(rest.len().min(size));
            wire.packet(way, Flags::None, segment)?;
            rest = behind;
        }
    }
    for (way, last) in [Direction::Up, Direction::Down].into_iter().zip(kept) {
        if !last.is_empty() {
            wire.packet(way, Flags::None, &last)?;
        }
    }
    wire.file.flush()
}

/// Joins consecutive entries of the same direction, except the start-up frames.
fn joined(record: &Record) -> Record {
    let mut all = record[..2].to_vec();
    for (way, content) in &record[2..] {
        match (all[2..].last_mut(), content) {
            (Some((last, Content::Bytes(before))), Content::Bytes(more)) if last == way => {
                before.extend(more);
            }
            _ => all.push((*way, content.clone())),
        }
    }
    all
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flags {
    None,
    Syn,
    SynAck,
    Fin,
}

struct Wire<W> {
    ends: [End; 2],
    file: W,
    /// Time in microseconds.
    clock: u32,
}

impl<W: Write> Wire<W> {
    fn packet(&mut self, way: Direction, flags: Flags, payload: &[u8]) -> std::io::Result<()> {
        let (from, to) = match way {
            Direction::Up => (&self.ends[0], &self.ends[1]),
            Direction::Down => (&self.ends[1], &self.ends[0]),
        };
        let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2])
            .ipv4(from.address, to.address, 64)
            .tcp(from.port, to.port, from.next, u16::MAX);
        let mss = [TcpOptionElement::MaximumSegmentSize(1460)];
        let options = |b: etherparse::PacketBuilderStep<etherparse::TcpHeader>| {
            b.options(&mss).expect("one option fits")
        };
        let builder = match flags {
            Flags::None => builder.ack(to.next).psh(),
            Flags::Syn => options(builder.syn()),
            Flags::SynAck => options(builder.syn().ack(to.next)),
            Flags::Fin => builder.ack(to.next).fin(),
        };
        let mut packet = Vec::with_capacity(builder.size(payload.len()));
        builder.write(&mut packet, payload).expect("a packet below 64 KiB");
        self.clock += 1;
        let len = packet.len() as u32;
        for word in [self.clock / 1_000_000, self.clock % 1_000_000, len, len] {
            self.file.write_all(&word.to_le_bytes())?;
        }
        self.file.write_all(&packet)?;
        let end = &mut self.ends[if way == Direction::Up { 0 } else { 1 }];
        let step = payload.len() as u32 + u32::from(flags != Flags::None);
        end.next = end.next.wrapping_add(step);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{SlicedPacket, TransportSlice};

    use super::*;

    /// Returns the payload of each segment, and true if the responder sent it.
    fn segments(file: &[u8]) -> Vec<(bool, Vec<u8>)> {
        let mut rest = &file[24..];
        let mut found = Vec::new();
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
            let (packet, behind) = rest[16..].split_at(len);
            let packet = SlicedPacket::from_ethernet(packet).unwrap();
            let Some(TransportSlice::Tcp(tcp)) = packet.transport else { panic!("no TCP") };
            found.push((tcp.source_port() == PORT, tcp.payload().to_vec()));
            rest = behind;
        }
        found.retain(|(_, payload)| !payload.is_empty());
        found
    }

    /// Reads of the relay may have any length and alternate between the directions.
    #[test]
    fn only_the_last_segment_is_short() {
        let bytes = |len: usize| Content::Bytes((0..len).map(|n| n as u8).collect());
        let mut record = vec![(Direction::Up, bytes(20)), (Direction::Down, bytes(20))];
        for len in 1..200 {
            record.push((Direction::Up, bytes(len)));
            record.push((Direction::Down, bytes(200 - len)));
        }
        record.push((Direction::Up, Content::Fin));
        record.push((Direction::Down, Content::Fin));
        let file = tempfile::NamedTempFile::new().unwrap();
        write(file.path(), &record, &Cuts::Anywhere).unwrap();
        let found = segments(&std::fs::read(file.path()).unwrap());
        for way in [Direction::Up, Direction::Down] {
            let of_way = |(down, payload)| (down == (way == Direction::Down)).then_some(payload);
            let segments: Vec<Vec<u8>> = found.iter().cloned().filter_map(of_way).collect();
            let carried: Vec<u8> = record
                .iter()
                .filter_map(|(w, content)| match content {
                    Content::Bytes(bytes) if *w == way => Some(&bytes[..]),
                    _ => None,
                })
                .collect::<Vec<_>>()
                .concat();
            assert_eq!(segments.concat(), carried);
            let [_start_up, between @ .., _last] = &segments[..] else {
                panic!("too few segments")
            };
            assert!(between.iter().all(|segment| segment.len() >= SMALLEST), "{way:?}");
        }
    }
}
