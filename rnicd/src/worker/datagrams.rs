//! The UDP sockets that exchange datagrams with other daemons, one for each address of the device.
//!
//! Packets that the kernel does not accept at once are lost, as on a network. Each call reads a
//! bounded number of packets, so that a flood does not delay other work, and packets that overflow
//! the kernel's buffer are lost. Packets whose source port is not `wired.port` are dropped and
//! counted. Management packets are checked here and passed to the control thread, see `management`.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};

use rnic_abi::roce::p_key::{DEFAULT_P_KEY, p_keys_match};
use rnic_abi::roce::packet::{MAX_LEN, destination, parse};
use rnic_abi::roce::{connection, mad, sidr};
use rnic_abi::types::Time;
use rnic_core::engine::Engine;
use slab::Slab;

use super::management::{Management, ManagementDatagram};

/// All datagram sockets of a worker.
#[derive(Debug)]
pub(super) struct DatagramSockets {
    /// By number. The number of a closed socket is reused.
    sockets: Slab<DatagramSocket>,
    /// Number of the socket that the next call reads first.
    first: usize,
    packet: Box<[u8]>,
}

#[derive(Debug)]
struct DatagramSocket {
    socket: UdpSocket,
    at: SocketAddr,
    /// Interface of a link-local address.
    scope: u32,
    /// The socket may have packets.
    readable: bool,
    /// The socket had packets recently, and is tried before the worker sleeps.
    hot: bool,
}

impl Default for DatagramSockets {
    fn default() -> Self {
        // One byte more than the longest packet, so that a longer one is not truncated to a valid
        // one.
        let packet = vec![0; MAX_LEN + 1].into();
        DatagramSockets { sockets: Slab::new(), first: 0, packet }
    }
}

impl DatagramSockets {
    /// Adds a non-blocking socket. Returns its number.
    pub(super) fn add(&mut self, socket: UdpSocket, at: SocketAddr) -> usize {
        let scope = match socket.local_addr() {
            Ok(SocketAddr::V6(bound)) => bound.scope_id(),
            _ => 0,
        };
        self.sockets.insert(DatagramSocket { socket, at, scope, readable: true, hot: false })
    }

    /// Removes the socket of an address. Returns it with its number, which is free from now on.
    pub(super) fn remove(&mut self, at: SocketAddr) -> Option<(usize, UdpSocket)> {
        let (number, _) = self.sockets.iter().find(|(_, socket)| socket.at == at)?;
        Some((number, self.sockets.remove(number).socket))
    }

    /// Records that a socket has become readable.
    pub(super) fn handle_readable(&mut self, number: usize) {
        if let Some(socket) = self.sockets.get_mut(number) {
            socket.readable = true;
        }
    }

    /// Marks recently active sockets as readable, to try them once more.
    pub(super) fn retry_hot(&mut self) {
        for (_, socket) in self.sockets.iter_mut().filter(|(_, socket)| socket.hot) {
            socket.readable = true;
        }
    }

    /// Forgets which sockets were recently active.
    pub(super) fn cool(&mut self) {
        for (_, socket) in &mut self.sockets {
            socket.hot = false;
        }
    }

    /// Returns true if a socket may have packets.
    pub(super) fn has_some(&self) -> bool {
        self.sockets.iter().any(|(_, socket)| socket.readable)
    }

    /// Reads at most `most` packets, one socket after the other. If more may be waiting, the next
    /// call begins with the next socket. Calls `wake` if the control thread must take datagrams
    /// from `management`. Returns true if any packets were received.
    pub(super) fn receive(
        &mut self,
        engine: &mut Engine,
        management: &Management,
        wake: impl Fn(),
        now: Time,
        most: u32,
    ) -> bool {
        let DatagramSockets { sockets, first, packet } = self;
        let mut any = false;
        let mut left = most;
        let places = sockets.capacity();
        let begin = *first;
        for n in (begin..begin + places).map(|n| n % places) {
            let Some(socket) = sockets.get_mut(n) else { continue };
            while socket.readable && left > 0 {
                left -= 1;
                match socket.socket.recv_from(packet) {
                    Ok((len, from)) => {
                        any = true;
                        socket.hot = true;
                        let from = unscoped(from);
                        let packet = &packet[..len];
                        if from.port() != socket.at.port() {
                            management.count_dropped();
                        } else if destination(packet) != Some(mad::QP) {
                            engine.handle_datagram(from, socket.at, packet, now);
                        } else if let Some(datagram) = for_management(from, socket.at, packet) {
                            if management.push(datagram) {
                                wake();
                            }
                        } else {
                            management.count_dropped();
                        }
                    }
                    // ECONNREFUSED for an earlier packet is expected here.
                    Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(_) => socket.readable = false,
                }
            }
            if left == 0 {
                *first = (n + 1) % places;
                break;
            }
        }
        any
    }

    /// Sends a packet from one of the sockets' addresses to the same port of another address.
    pub(super) fn send(&self, from: IpAddr, to: IpAddr, packet: &[u8]) {
        if let Some(socket) =
            self.sockets.iter().map(|(_, socket)| socket).find(|socket| socket.at.ip() == from)
        {
            let to = match to {
                IpAddr::V6(ip) => SocketAddrV6::new(ip, socket.at.port(), 0, socket.scope).into(),
                ip => SocketAddr::new(ip, socket.at.port()),
            };
            // Datagrams may get lost.
            let _ = socket.socket.send_to(packet, to);
        }
    }
}

/// Returns the management datagram in a packet, or `None` if its source, P_Key or Q_Key is wrong,
/// the message is invalid, or the addresses in a request are not those of the packet. The Q_Key
/// authenticates nothing, because any QP may use it.
fn for_management(from: SocketAddr, to: SocketAddr, packet: &[u8]) -> Option<ManagementDatagram> {
    let (datagram, data) = parse(from, to, packet).ok()?;
    let of_partition = p_keys_match(DEFAULT_P_KEY, datagram.p_key);
    let of_management = datagram.source == mad::QP && datagram.q_key == mad::Q_KEY;
    let mad: mad::Bytes = data.try_into().ok().filter(|_| of_partition && of_management)?;
    let (from, to) = (from.ip(), to.ip());
    let named = match (sidr::parse(data), connection::parse(data)) {
        (Ok(sidr::Message::Request(request)), _) => Some((request.from.ip(), request.to)),
        (_, Ok(connection::Message::Request(request))) => Some((request.from.ip(), request.to)),
        (Err(_), Err(_)) if mad::unsupported(&mad).is_none() => return None,
        _ => None,
    };
    let is_honest = named.is_none_or(|named| named == (from, to));
    is_honest.then(|| ManagementDatagram { from, to, mad: Box::new(mad) })
}

/// Returns an address without the scope of a link, which packets do not carry.
fn unscoped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

#[cfg(test)]
mod tests {
    use rnic_abi::roce::Datagram;
    use rnic_abi::roce::mad::Exchange;
    use rnic_abi::roce::packet::emit;
    use rnic_abi::roce::sidr::{REQUEST_DATA, Request};
    use rnic_abi::roce::{PortSpace, ServiceId};
    use rnic_abi::types::{Gid, QpId};

    use super::*;

    #[test]
    fn invalid_management_packets_are_dropped() {
        let [from, to]: [SocketAddr; 2] =
            [([192, 0, 2, 1], 4791).into(), ([192, 0, 2, 2], 4791).into()];
        let packet = |source, q_key, data: &[u8]| {
            let [from, to] = [from, to].map(|at| Gid::from(at.ip()));
            let qp = mad::QP;
            let psn = 0;
            let immediate = None;
            let solicited = false;
            let p_key = DEFAULT_P_KEY;
            let datagram =
                Datagram { from, source, to, qp, p_key, q_key, psn, immediate, solicited };
            emit(&datagram, data, 4791, 4791)
        };
        let request = |from: SocketAddr, to: IpAddr| {
            let exchange = Exchange { transaction: 7, id: 8 };
            let service = ServiceId::new(PortSpace::Udp, 7);
            let private_data = [9; REQUEST_DATA];
            Request { exchange, service, from, to, private_data }.emit()
        };
        let mad = request(from, to.ip());
        let right = packet(mad::QP, mad::Q_KEY, &mad);
        let others = [
            packet(QpId(2), mad::Q_KEY, &mad),
            packet(mad::QP, 7, &mad),
            packet(mad::QP, mad::Q_KEY, &mad[..mad::LEN - 4]),
            packet(mad::QP, mad::Q_KEY, &[7; mad::LEN]),
            packet(mad::QP, mad::Q_KEY, &request(to, to.ip())),
            packet(mad::QP, mad::Q_KEY, &request(from, from.ip())),
            right[..right.len() - 1].to_vec(),
        ];
        assert!(others.iter().all(|packet| for_management(from, to, packet).is_none()));
        let datagram = for_management(from, to, &right).expect("a request");
        assert_eq!((datagram.from, datagram.to, *datagram.mad), (from.ip(), to.ip(), mad));
        // A performance management Get, which the daemon answers.
        let mut get = [0; mad::LEN];
        get[..4].copy_from_slice(&[1, 4, 1, 1]);
        assert!(for_management(from, to, &packet(mad::QP, mad::Q_KEY, &get)).is_some());
    }
}
