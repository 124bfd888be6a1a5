//! UD packets between hosts, over a link that may lose, duplicate and reorder them.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};

use super::World;

/// A packet in flight, with its UDP addresses.
#[derive(Clone, Debug)]
pub(in crate::engine::tests) struct Packet {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub bytes: Vec<u8>,
}

/// Packets in flight, and their treatment.
#[derive(Default)]
pub(in crate::engine::tests) struct Network {
    pub packets: VecDeque<Packet>,
    /// Packets wait until the test delivers them.
    pub holds: bool,
    /// State of the random choice between loss, duplication, delay and delivery. If `None`, all
    /// packets arrive.
    pub seed: Option<u64>,
    /// Number of packets lost, duplicated and overtaken.
    pub lost: usize,
    pub doubled: usize,
    pub overtaken: usize,
}

/// UDP port of every host.
pub(in crate::engine::tests) const PORT: u16 = 4791;

/// Returns the address of a host.
pub(in crate::engine::tests) fn address_of(host: usize) -> IpAddr {
    IpAddr::from([192, 0, 2, host as u8 + 1])
}

impl Network {
    pub fn send(&mut self, from: IpAddr, to: IpAddr, bytes: Vec<u8>) {
        let [from, to] = [from, to].map(|ip| SocketAddr::new(ip, PORT));
        self.packets.push_back(Packet { from, to, bytes });
    }

    /// Returns the next packet that arrives.
    fn next(&mut self) -> Option<Packet> {
        loop {
            let packet = self.packets.pop_front()?;
            match self.choose() {
                0 => self.lost += 1,
                1 => {
                    self.doubled += 1;
                    self.packets.push_back(packet.clone());
                    return Some(packet);
                }
                2 if !self.packets.is_empty() => {
                    self.overtaken += 1;
                    self.packets.push_back(packet);
                }
                _ => return Some(packet),
            }
        }
    }

    /// Returns a random number below 16 (Marsaglia's xorshift).
    fn choose(&mut self) -> u64 {
        let Some(state) = &mut self.seed else { return u64::MAX };
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state >> 32 & 15
    }
}

impl World {
    /// Delivers the packets in flight. Returns true if there were any.
    pub fn deliver_packets(&mut self) -> bool {
        let mut any = false;
        while let Some(Packet { from, to, bytes }) = self.network.next() {
            any = true;
            let host = (0..self.hosts.len()).find(|host| address_of(*host) == to.ip());
            if let Some(host) = host {
                self.engines[self.hosts[host][0]].handle_datagram(from, to, &bytes, self.now);
            }
        }
        any
    }
}
