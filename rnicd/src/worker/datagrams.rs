//! The sockets of UDP by which datagrams come from other daemons and leave for them: one for each
//! address of the device.
//!
//! What the kernel does not take at once is lost, as on a wire. What comes is read a few at a time,
//! so that floods keep nobody from his turn; what does not fit the kernel's buffer meanwhile is
//! lost. Packets from another port than that of daemons are dropped and counted. What is for the
//! management of a port is checked here and then the control thread's, see `management`.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use rnic_core::engine::Engine;
use rnic_core::roce::packet::{MAX_LEN, destination, parse};
use rnic_core::roce::sidr::{self, Message};
use rnic_core::types::Time;
use slab::Slab;

use super::management::{Management, ManagementDatagram};

/// All of them.
#[derive(Debug)]
pub(super) struct DatagramSockets {
    /// By number. A socket that is closed leaves its place to the next one.
    sockets: Slab<DatagramSocket>,
    /// Number of the one that is read first next time.
    first: usize,
    packet: Box<[u8]>,
}

#[derive(Debug)]
struct DatagramSocket {
    socket: UdpSocket,
    at: SocketAddr,
    /// It may have something.
    readable: bool,
    /// It had something lately, and is tried before the worker sleeps.
    hot: bool,
}

impl Default for DatagramSockets {
    fn default() -> Self {
        // One byte more than the longest has: what is longer is none.
        let packet = vec![0; MAX_LEN + 1].into();
        DatagramSockets { sockets: Slab::new(), first: 0, packet }
    }
}

impl DatagramSockets {
    /// Takes a socket that does not block: its number.
    pub(super) fn add(&mut self, socket: UdpSocket, at: SocketAddr) -> usize {
        self.sockets.insert(DatagramSocket { socket, at, readable: true, hot: false })
    }

    /// Returns the socket of an address, with its number, which is free from now on.
    pub(super) fn remove(&mut self, at: SocketAddr) -> Option<(usize, UdpSocket)> {
        let (number, _) = self.sockets.iter().find(|(_, socket)| socket.at == at)?;
        Some((number, self.sockets.remove(number).socket))
    }

    /// Something has come.
    pub(super) fn handle_readable(&mut self, number: usize) {
        if let Some(socket) = self.sockets.get_mut(number) {
            socket.readable = true;
        }
    }

    /// Those that had something lately are tried once more.
    pub(super) fn retry_hot(&mut self) {
        for (_, socket) in self.sockets.iter_mut().filter(|(_, socket)| socket.hot) {
            socket.readable = true;
        }
    }

    /// Forgets which had something lately.
    pub(super) fn cool(&mut self) {
        for (_, socket) in &mut self.sockets {
            socket.hot = false;
        }
    }

    /// Whether one may have something.
    pub(super) fn has_some(&self) -> bool {
        self.sockets.iter().any(|(_, socket)| socket.readable)
    }

    /// Reads at most so many packets, of one socket after the other and the next time from where
    /// this ended. `wake` is called if the control thread must look at `management`. Returns true
    /// if any packets came.
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
                        (any, socket.hot) = (true, true);
                        let (from, packet) = (unscoped(from), &packet[..len]);
                        if from.port() != socket.at.port() {
                            management.count_dropped();
                        } else if destination(packet) != Some(sidr::QP) {
                            engine.handle_datagram(from, socket.at, packet, now);
                        } else if let Some(datagram) = for_management(from, socket.at, packet) {
                            if management.push(datagram) {
                                wake();
                            }
                        } else {
                            management.count_dropped();
                        }
                    }
                    // That nobody was there for what was sent is no news.
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

    /// Sends a packet from one address, if it is one of these, to the same port of another.
    pub(super) fn send(&self, from: IpAddr, to: IpAddr, packet: &[u8]) {
        if let Some(socket) =
            self.sockets.iter().map(|(_, socket)| socket).find(|socket| socket.at.ip() == from)
        {
            let to = SocketAddr::new(to, socket.at.port());
            // Nobody waits for what is lost.
            let _ = socket.socket.send_to(packet, to);
        }
    }
}

/// Returns the management datagram in a packet, or `None` if it is not of another port's queue pair
/// 1, is no message, or does not name the addresses that it came from and to. Its key says little:
/// any queue pair may be given it.
fn for_management(from: SocketAddr, to: SocketAddr, packet: &[u8]) -> Option<ManagementDatagram> {
    let (datagram, data) = parse(from, to, packet).ok()?;
    let of_management = datagram.source == sidr::QP && datagram.q_key == sidr::Q_KEY;
    let mad = data.try_into().ok().filter(|_| of_management)?;
    let (from, to) = (from.ip(), to.ip());
    match sidr::parse(data).ok()? {
        Message::Request(request) if (request.from.ip(), request.to) != (from, to) => None,
        Message::Request(_) | Message::Reply(_) => {
            Some(ManagementDatagram { from, to, mad: Box::new(mad) })
        }
    }
}

/// An address without the scope of a link, which no packet has.
fn unscoped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

#[cfg(test)]
mod tests {
    use rnic_core::roce::Datagram;
    use rnic_core::roce::packet::emit;
    use rnic_core::roce::sidr::{Exchange, Request, ServiceId};
    use rnic_core::types::{Gid, QpId};

    use super::*;

    #[test]
    fn nonsense_is_dropped_before_it_waits() {
        let [from, to]: [SocketAddr; 2] =
            [([192, 0, 2, 1], 4791).into(), ([192, 0, 2, 2], 4791).into()];
        let packet = |source, q_key, data: &[u8]| {
            let [from, to] = [from, to].map(|at| Gid::from(at.ip()));
            let qp = sidr::QP;
            let (psn, immediate, solicited) = (0, None, false);
            let datagram = Datagram { from, source, to, qp, q_key, psn, immediate, solicited };
            emit(&datagram, data, (4791, 4791))
        };
        let request = |from: SocketAddr, to: IpAddr| {
            let exchange = Exchange { transaction: 7, id: 8 };
            let service = ServiceId::of_port(7);
            let private_data = [9; sidr::REQUEST_DATA];
            Request { exchange, service, from, to, private_data }.emit()
        };
        let mad = request(from, to.ip());
        let right = packet(sidr::QP, sidr::Q_KEY, &mad);
        let others = [
            packet(QpId(2), sidr::Q_KEY, &mad),
            packet(sidr::QP, 7, &mad),
            packet(sidr::QP, sidr::Q_KEY, &mad[..sidr::LEN - 4]),
            packet(sidr::QP, sidr::Q_KEY, &[7; sidr::LEN]),
            packet(sidr::QP, sidr::Q_KEY, &request(to, to.ip())),
            packet(sidr::QP, sidr::Q_KEY, &request(from, from.ip())),
            right[..right.len() - 1].to_vec(),
        ];
        assert!(others.iter().all(|packet| for_management(from, to, packet).is_none()));
        let datagram = for_management(from, to, &right).expect("a request");
        assert_eq!((datagram.from, datagram.to, *datagram.mad), (from.ip(), to.ip(), mad));
    }
}
