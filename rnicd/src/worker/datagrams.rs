//! The sockets of UDP by which datagrams come from other daemons and leave for them: one for each
//! address of the device.
//!
//! What the kernel does not take at once is lost, as on a wire. What comes is read a few at a time,
//! so that floods keep nobody from his turn; what does not fit the kernel's buffer meanwhile is
//! lost. What is for the management of a port is the control thread's, and lost when that has
//! enough.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use rnic_core::engine::Engine;
use rnic_core::roce::packet::{MAX_LEN, destination, parse};
use rnic_core::roce::sidr;
use rnic_core::types::Time;

/// All of them.
#[derive(Debug)]
pub(super) struct DatagramSockets {
    sockets: Vec<DatagramSocket>,
    /// The one that is read first next time.
    first: usize,
    packet: Box<[u8]>,
    management: VecDeque<ManagementDatagram>,
    /// Each of these that has not been looked at has a share of this.
    unread: Arc<()>,
}

/// A datagram for the management of a port: queue pair 1 of one has sent it to that of another.
#[derive(Debug)]
pub struct ManagementDatagram {
    /// The address that it comes from.
    pub from: IpAddr,
    /// The device's address that it came to.
    pub to: IpAddr,
    /// What it says.
    pub mad: Box<sidr::Bytes>,
    _counted: Arc<()>,
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
        let (sockets, management) = (Vec::new(), VecDeque::new());
        DatagramSockets { sockets, first: 0, packet, management, unread: Arc::default() }
    }
}

impl DatagramSockets {
    /// Takes a socket that does not block: its number.
    pub(super) fn add(&mut self, socket: UdpSocket, at: SocketAddr) -> usize {
        self.sockets.push(DatagramSocket { socket, at, readable: true, hot: false });
        self.sockets.len() - 1
    }

    /// Something has come.
    pub(super) fn handle_readable(&mut self, number: usize) {
        if let Some(socket) = self.sockets.get_mut(number) {
            socket.readable = true;
        }
    }

    /// Those that had something lately are tried once more.
    pub(super) fn retry_hot(&mut self) {
        for socket in self.sockets.iter_mut().filter(|socket| socket.hot) {
            socket.readable = true;
        }
    }

    /// Forgets which had something lately.
    pub(super) fn cool(&mut self) {
        for socket in &mut self.sockets {
            socket.hot = false;
        }
    }

    /// Whether one may have something.
    pub(super) fn has_some(&self) -> bool {
        self.sockets.iter().any(|socket| socket.readable)
    }

    /// Reads at most so many packets, of one socket after the other and the next time from where
    /// this ended; whether any came.
    pub(super) fn receive(&mut self, engine: &mut Engine, now: Time, most: u32) -> bool {
        let DatagramSockets { sockets, first, packet, management, unread } = self;
        let (mut any, mut left, count, begin) = (false, most, sockets.len(), *first);
        for n in (begin..begin + count).map(|n| n % count) {
            let socket = &mut sockets[n];
            while socket.readable && left > 0 {
                left -= 1;
                match socket.socket.recv_from(packet) {
                    Ok((len, from)) => {
                        (any, socket.hot) = (true, true);
                        let (from, packet) = (unscoped(from), &packet[..len]);
                        match destination(packet) {
                            Some(sidr::QP) => {
                                management.extend(for_management(from, socket.at, packet, unread));
                            }
                            _ => engine.handle_datagram(from, socket.at, packet, now),
                        }
                    }
                    // That nobody was there for what was sent is no news.
                    Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(_) => socket.readable = false,
                }
            }
            if left == 0 {
                *first = (n + 1) % count;
                break;
            }
        }
        any
    }

    /// One that is for the management of a port.
    pub(super) fn poll_management(&mut self) -> Option<ManagementDatagram> {
        self.management.pop_front()
    }

    /// Sends a packet from one address, if it is one of these, to the same port of another.
    pub(super) fn send(&self, from: IpAddr, to: IpAddr, packet: &[u8]) {
        if let Some(socket) = self.sockets.iter().find(|socket| socket.at.ip() == from) {
            let to = SocketAddr::new(to, socket.at.port());
            // Nobody waits for what is lost.
            let _ = socket.socket.send_to(packet, to);
        }
    }
}

/// What came for the management of a port: none if it is not of another port's, or if so many wait
/// that one more would be no use. Its key says little: any queue pair may be given it.
fn for_management(
    from: SocketAddr,
    to: SocketAddr,
    packet: &[u8],
    unread: &Arc<()>,
) -> Option<ManagementDatagram> {
    if Arc::strong_count(unread) > MOST_UNREAD {
        return None;
    }
    let (datagram, data) = parse(from, to, packet).ok()?;
    let of_management = datagram.source == sidr::QP && datagram.q_key == sidr::Q_KEY;
    let mad = data.try_into().ok().filter(|_| of_management)?;
    let (from, to) = (from.ip(), to.ip());
    Some(ManagementDatagram { from, to, mad: Box::new(mad), _counted: unread.clone() })
}

/// Datagrams for the management of ports that wait for the control thread.
const MOST_UNREAD: usize = 64;

/// An address without the scope of a link, which no packet has.
fn unscoped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

#[cfg(test)]
mod tests {
    use rnic_core::roce::Datagram;
    use rnic_core::roce::packet::emit;
    use rnic_core::types::{Gid, QpId};

    use super::*;

    #[test]
    fn management_datagrams_are_of_queue_pair_1_and_few_wait() {
        let [from, to]: [SocketAddr; 2] =
            [([192, 0, 2, 1], 4791).into(), ([192, 0, 2, 2], 4791).into()];
        let packet = |source, q_key, data: &[u8]| {
            let [from, to] = [from, to].map(|at| Gid::from(at.ip()));
            let (qp, psn, immediate, solicited) = (sidr::QP, 0, None, false);
            let datagram = Datagram { from, source, to, qp, q_key, psn, immediate, solicited };
            emit(&datagram, data, (4791, 4791))
        };
        let unread = Arc::default();
        let take = |packet: &[u8]| for_management(from, to, packet, &unread);
        let right = packet(sidr::QP, sidr::Q_KEY, &[7; sidr::LEN]);
        let others = [
            packet(QpId(2), sidr::Q_KEY, &[7; sidr::LEN]),
            packet(sidr::QP, 7, &[7; sidr::LEN]),
            packet(sidr::QP, sidr::Q_KEY, &[7; sidr::LEN - 4]),
            right[..right.len() - 1].to_vec(),
        ];
        assert!(others.iter().all(|packet| take(packet).is_none()));
        let mut waiting: Vec<_> = (0..100).map_while(|_| take(&right)).collect();
        assert_eq!(waiting.len(), MOST_UNREAD);
        let first = waiting.pop().expect("one of them");
        assert_eq!((first.from, first.to, *first.mad), (from.ip(), to.ip(), [7; sidr::LEN]));
        drop(first);
        assert!(take(&right).is_some());
    }
}
