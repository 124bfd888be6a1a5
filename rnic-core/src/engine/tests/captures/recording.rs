//! Extracts TCP connections from a capture file.

use std::collections::HashMap;

use etherparse::{LaxSlicedPacket, TcpOptionElement, TcpSlice, TransportSlice};

/// An end of a recorded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    Initiator,
    Responder,
}

impl Side {
    pub fn other(self) -> Side {
        match self {
            Side::Initiator => Side::Responder,
            Side::Responder => Side::Initiator,
        }
    }
}

/// Content of one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Bytes(Vec<u8>),
    Fin,
    Reset,
}

/// A connection, in the order in which it was recorded.
pub struct Connection {
    /// EMSS: the MSS of the initiator's SYN, less the timestamps in every segment.
    pub emss: usize,
    pub events: Vec<(Side, What)>,
    initiator_port: u16,
    /// Next sequence number of each side.
    next: HashMap<Side, u32>,
}

/// Size of the timestamps option with its padding, in bytes (RFC 7323 section 3).
const TIMESTAMPS: usize = 12;

/// Reads the connections from a classic pcap file of Ethernet packets, with the byte order and time
/// resolution of all recordings here.
pub fn connections(file: &[u8]) -> Vec<Connection> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap()) as usize;
    assert_eq!((word(0), word(20)), (0xA1B2_C3D4, 1), "a little-endian pcap file of Ethernet");
    let mut found = Vec::new();
    let mut at = 24;
    while at < file.len() {
        let kept = word(at + 8);
        let was = word(at + 12);
        assert_eq!(kept, was, "no packet is truncated");
        take(&mut found, &file[at + 16..at + 16 + kept]);
        at += 16 + kept;
    }
    found
}

/// Adds a packet to its connection. Lax parsing accepts the IP length of 0 that segmentation
/// offload causes.
fn take(found: &mut Vec<Connection>, packet: &[u8]) {
    let packet = LaxSlicedPacket::from_ethernet(packet).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { panic!("not TCP: {packet:?}") };
    if tcp.syn() && !tcp.ack() {
        found.push(Connection::begin(tcp));
        return;
    }
    let ports = [tcp.source_port(), tcp.destination_port()];
    let of = |c: &&mut Connection| ports.contains(&c.initiator_port);
    found.iter_mut().rfind(of).expect("a SYN precedes it").take(tcp);
}

impl Connection {
    fn begin(syn: &TcpSlice<'_>) -> Connection {
        let mss = syn.options_iterator().find_map(|option| match option {
            Ok(TcpOptionElement::MaximumSegmentSize(mss)) => Some(usize::from(mss)),
            _ => None,
        });
        Connection {
            emss: mss.expect("the SYN has an MSS") - TIMESTAMPS,
            events: Vec::new(),
            initiator_port: syn.source_port(),
            next: HashMap::from([(Side::Initiator, syn.sequence_number().wrapping_add(1))]),
        }
    }

    fn take(&mut self, tcp: &TcpSlice<'_>) {
        let initiated = tcp.source_port() == self.initiator_port;
        let from = if initiated { Side::Initiator } else { Side::Responder };
        if tcp.syn() {
            self.next.insert(from, tcp.sequence_number().wrapping_add(1));
            return;
        }
        let bytes = tcp.payload();
        let fresh = !bytes.is_empty() || tcp.fin();
        // Recordings with loss or reordering are not supported. Loopback has neither.
        assert!(!fresh || self.next[&from] == tcp.sequence_number(), "in order");
        if !bytes.is_empty() {
            self.events.push((from, What::Bytes(bytes.to_vec())));
        }
        if tcp.fin() {
            self.events.push((from, What::Fin));
        }
        if tcp.rst() {
            self.events.push((from, What::Reset));
        }
        let step = bytes.len() as u32 + u32::from(tcp.fin());
        self.next.entry(from).and_modify(|next| *next = next.wrapping_add(step));
    }
}
