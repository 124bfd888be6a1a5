//! Records that the daemon sends to a client without a request.
//!
//! Two kinds of `SOCK_SEQPACKET` socket pairs carry one packet per record: the event channel of a
//! session ([`EventSender`]) and its completion channels ([`ChannelSender`]). The client holds the
//! other end, may never read it, and may change all state that the two ends share. So every call
//! here passes `MSG_DONTWAIT | MSG_NOSIGNAL`, and nothing is ever read. Records that do not fit the
//! socket wait in bounded memory: events in order up to a limit, beyond which they are dropped and
//! counted, and at most one completion record per CQ. The control thread and the workers send. A
//! caller that gets [`Sent::Waiting`] must watch the descriptor.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rnic_abi::abi::control::{Event, MAX_MESSAGE};
use rnic_abi::abi::queue::ChannelRecord;
use rnic_abi::types::CqId;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

/// Result of sending a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sent {
    /// It and all earlier records are in the client's socket.
    Delivered,
    /// A record waits here. Watch the descriptor for writability, then flush.
    Waiting,
    /// The client's end is closed.
    Gone,
}

/// Sends the connection and asynchronous events of one session.
///
/// Shared by the control thread and the workers. The lock is held only for non-blocking system
/// calls.
#[derive(Debug)]
pub struct EventSender {
    socket: OwnedFd,
    state: Mutex<EventBacklog>,
}

/// Encoded events that the socket did not take, and the number of lost events.
#[derive(Debug)]
struct EventBacklog {
    waiting: VecDeque<Vec<u8>>,
    /// Maximum events in `waiting`, not counting the report of a loss.
    bound: usize,
    /// Events dropped since the last `EventsLost`, all after those in `waiting`.
    lost: u64,
    gone: bool,
}

impl EventSender {
    /// Creates an event channel that keeps at most `bound` unsent events. The descriptor is the
    /// client's end.
    pub fn pair(bound: usize) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = record_pair()?;
        let state = EventBacklog { waiting: VecDeque::new(), bound, lost: 0, gone: false };
        Ok((EventSender { socket: ours, state: Mutex::new(state) }, theirs))
    }

    /// Sends an event after all earlier ones, or keeps it, or counts it as lost.
    pub fn send(&self, event: &Event) -> Sent {
        let Some(packet) = encode(event) else {
            return self.state.lock().lose(&self.socket);
        };
        let mut state = self.state.lock();
        if state.gone {
            return Sent::Gone;
        }
        if state.waiting.is_empty() && state.lost == 0 {
            match send_packet(&self.socket, &packet) {
                Ok(true) => return Sent::Delivered,
                Ok(false) => {}
                Err(_) => return state.give_up(),
            }
        }
        if state.keep(packet) { state.flush(&self.socket) } else { state.lose(&self.socket) }
    }

    /// Sends waiting events as far as the socket accepts them.
    pub fn flush(&self) -> Sent {
        self.state.lock().flush(&self.socket)
    }

    /// Returns true if events wait for the socket to become writable.
    pub fn wants_writable(&self) -> bool {
        let state = self.state.lock();
        !state.gone && (!state.waiting.is_empty() || state.lost > 0)
    }
}

impl AsFd for EventSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl EventBacklog {
    /// Queues a packet, after a report of earlier losses. Returns false if there is no room.
    fn keep(&mut self, packet: Vec<u8>) -> bool {
        if self.waiting.len() >= self.bound {
            return false;
        }
        self.report_loss();
        self.waiting.push_back(packet);
        true
    }

    fn report_loss(&mut self) {
        if self.lost > 0
            && let Some(report) = encode(&Event::EventsLost { count: self.lost })
        {
            self.waiting.push_back(report);
            self.lost = 0;
        }
    }

    fn lose(&mut self, socket: &OwnedFd) -> Sent {
        self.lost += 1;
        self.flush(socket)
    }

    fn flush(&mut self, socket: &OwnedFd) -> Sent {
        if self.gone {
            return Sent::Gone;
        }
        loop {
            if self.waiting.is_empty() {
                self.report_loss();
            }
            let Some(packet) = self.waiting.front() else { return Sent::Delivered };
            match send_packet(socket, packet) {
                Ok(true) => drop(self.waiting.pop_front()),
                Ok(false) => return Sent::Waiting,
                Err(_) => return self.give_up(),
            }
        }
    }

    fn give_up(&mut self) -> Sent {
        self.gone = true;
        self.waiting = VecDeque::new();
        Sent::Gone
    }
}

/// Sends the completion events of one completion channel.
///
/// Arming is one-shot, so a CQ normally has at most one unread record. A client that arms again
/// without reading fills the socket. From then on at most one record per CQ waits here.
#[derive(Debug)]
pub struct ChannelSender {
    socket: OwnedFd,
    state: Mutex<ChannelState>,
}

#[derive(Debug, Default)]
struct ChannelState {
    /// Per CQ: number of records sent, and true if one waits.
    cqs: HashMap<CqId, (u64, bool)>,
    /// CQs with a waiting record, oldest first.
    waiting: VecDeque<CqId>,
    gone: bool,
}

impl ChannelSender {
    /// Creates a completion channel. The descriptor is the client's end.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = record_pair()?;
        // Records that do not fit wait in `ChannelState`, one for each CQ.
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, CHANNEL_BUFFER)?;
        Ok((ChannelSender { socket: ours, state: Mutex::default() }, theirs))
    }

    /// Sends the completion event of `cq`. The lock covers the record's sequence number and the
    /// send, so numbers ascend on the socket with any number of workers.
    pub fn notify(&self, cq: CqId) -> Sent {
        let mut state = self.state.lock();
        if state.gone {
            return Sent::Gone;
        }
        let (_, waits) = state.cqs.entry(cq).or_default();
        if !*waits {
            *waits = true;
            state.waiting.push_back(cq);
        }
        state.flush(&self.socket)
    }

    /// Sends waiting records as far as the socket accepts them.
    pub fn flush(&self) -> Sent {
        self.state.lock().flush(&self.socket)
    }

    /// Forgets a destroyed CQ and drops its waiting record.
    pub fn forget(&self, cq: CqId) {
        let mut state = self.state.lock();
        state.cqs.remove(&cq);
        state.waiting.retain(|w| *w != cq);
    }

    /// Returns true if records wait for the socket to become writable.
    pub fn wants_writable(&self) -> bool {
        let state = self.state.lock();
        !state.gone && !state.waiting.is_empty()
    }
}

impl AsFd for ChannelSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ChannelState {
    fn flush(&mut self, socket: &OwnedFd) -> Sent {
        while let Some(cq) = self.waiting.front() {
            let Some((sequence, waits)) = self.cqs.get_mut(cq) else {
                self.waiting.pop_front();
                continue;
            };
            let record = ChannelRecord { cq: cq.0, sequence: *sequence + 1 };
            match send_packet(socket, &record.to_bytes()) {
                Ok(true) => {
                    *sequence += 1;
                    *waits = false;
                    self.waiting.pop_front();
                }
                Ok(false) => return Sent::Waiting,
                Err(_) => *self = ChannelState { gone: true, ..ChannelState::default() },
            }
        }
        if self.gone { Sent::Gone } else { Sent::Delivered }
    }
}

/// Kernel memory for unread records of a completion channel, in bytes. The kernel doubles it.
const CHANNEL_BUFFER: usize = 32 << 10;

/// Creates a connected pair: the daemon's end non-blocking, the client's blocking as applications
/// expect.
fn record_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    // Nothing is ever read here. Descriptors that a client sends would be closed with this end, and
    // such a close can block for as long as their owner wants.
    rustix::net::shutdown(&ours, rustix::net::Shutdown::Read)?;
    Ok((ours, theirs))
}

/// Sends one whole packet. Returns `Ok(false)` if the socket is full, and an error if the peer's
/// end is closed.
fn send_packet(socket: &OwnedFd, packet: &[u8]) -> io::Result<bool> {
    loop {
        return match rustix::net::send(socket, packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::INTR) => continue,
            // A full socket or a lack of kernel buffers is temporary.
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::NOMEM,
            ) => Ok(false),
            Err(e) => Err(e.into()),
        };
    }
}

/// Encodes an event. Returns `None` if it does not fit a message; then it counts as lost.
fn encode(event: &Event) -> Option<Vec<u8>> {
    postcard::to_stdvec(event).ok().filter(|packet| packet.len() <= MAX_MESSAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rnic_abi::types::QpId;

    fn event(n: u64) -> Event {
        Event::QpFatal { qp: QpId(7), context: n, reason: "x".repeat(1000) }
    }

    fn read(socket: &OwnedFd) -> Option<Vec<u8>> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let flags = rustix::net::RecvFlags::DONTWAIT;
        match rustix::net::recv(socket, buffer.as_mut_slice(), flags) {
            Ok((n, _)) => Some(buffer[..n].to_vec()),
            Err(rustix::io::Errno::AGAIN) => None,
            Err(e) => panic!("client read: {e}"),
        }
    }

    fn read_event(socket: &OwnedFd) -> Option<Event> {
        read(socket).map(|p| postcard::from_bytes(&p).expect("the sender encoded it"))
    }

    /// Sends numbered events until one waits. Returns the number of that event.
    fn fill(sender: &EventSender) -> u64 {
        let waits = |n: &u64| sender.send(&event(*n)) == Sent::Waiting;
        (0..MOST).find(waits).expect("a socket that takes no more")
    }

    /// Sends records of one CQ until one waits. Returns the number of records sent.
    fn fill_channel(sender: &ChannelSender) -> u64 {
        let waits = |_: &u64| sender.notify(CqId(1)) == Sent::Waiting;
        (0..MOST).find(waits).expect("a socket that takes no more")
    }

    /// More packets than any socket holds.
    const MOST: u64 = 1_000_000;
    /// Time limit for operations that should finish quickly.
    const DEADLINE: std::time::Duration = std::time::Duration::from_secs(180);

    #[test]
    fn events_that_wait_keep_their_order() {
        let (sender, client) = EventSender::pair(100).expect("socket pair");
        let first = fill(&sender);
        for n in first + 1..first + 50 {
            assert_eq!(sender.send(&event(n)), Sent::Waiting);
        }
        assert!(sender.wants_writable());
        let mut seen = 0;
        while let Some(e) = read_event(&client) {
            assert_eq!(e, event(seen));
            seen += 1;
            let _ = sender.flush();
        }
        assert_eq!(seen, first + 50);
        assert!(!sender.wants_writable());
    }

    #[test]
    fn loss_is_reported_in_order() {
        let (sender, client) = EventSender::pair(4).expect("socket pair");
        let first = fill(&sender);
        for n in first + 1..first + 4 {
            let _ = sender.send(&event(n));
        }
        for _ in 0..3 {
            assert_eq!(sender.send(&event(u64::MAX)), Sent::Waiting);
        }
        let mut seen = Vec::new();
        while let Some(e) = read_event(&client) {
            seen.push(e);
            let _ = sender.flush();
        }
        let kept = usize::try_from(first + 4).expect("small");
        assert_eq!(seen.len(), kept + 1);
        assert_eq!(seen[kept - 1], event(first + 3));
        assert_eq!(seen[kept], Event::EventsLost { count: 3 });
        assert_eq!(sender.send(&event(1)), Sent::Delivered);
        assert_eq!(read_event(&client), Some(event(1)));
    }

    #[test]
    fn blocking_client_end_does_not_block_sends() {
        let (sender, client) = EventSender::pair(2).expect("socket pair");
        // The client cannot change flags of the daemon's end. A blocking one would make no
        // difference.
        rustix::io::ioctl_fionbio(&client, false).expect("client end");
        rustix::io::ioctl_fionbio(&sender.socket, false).expect("our end");
        // A blocking call never returns, so another thread makes it.
        let (done, sent) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for n in 0..10_000 {
                let _ = sender.send(&event(n));
            }
            let _ = done.send(sender);
        });
        let sender = sent.recv_timeout(DEADLINE).expect("sending blocks");
        assert!(sender.wants_writable());
        assert!(sender.state.lock().waiting.len() <= 2);
    }

    #[test]
    fn closed_client_is_reported_gone() {
        let (sender, client) = EventSender::pair(8).expect("socket pair");
        drop(client);
        assert_eq!(sender.send(&event(1)), Sent::Gone);
        assert_eq!(sender.send(&event(2)), Sent::Gone);
        assert!(!sender.wants_writable());
    }

    #[test]
    fn an_event_too_long_for_a_message_is_a_loss() {
        let (sender, client) = EventSender::pair(8).expect("socket pair");
        let long = Event::QpFatal { qp: QpId(1), context: 0, reason: "y".repeat(MAX_MESSAGE) };
        assert_eq!(sender.send(&long), Sent::Delivered);
        assert_eq!(read_event(&client), Some(Event::EventsLost { count: 1 }));
    }

    #[test]
    fn a_full_channel_remembers_one_record_per_cq() {
        let (sender, client) = ChannelSender::pair().expect("socket pair");
        let delivered = fill_channel(&sender);
        for _ in 0..1000 {
            assert_eq!(sender.notify(CqId(1)), Sent::Waiting);
            assert_eq!(sender.notify(CqId(2)), Sent::Waiting);
        }
        assert_eq!(sender.state.lock().waiting.len(), 2);
        let mut seen = Vec::new();
        while let Some(packet) = read(&client) {
            seen.push(ChannelRecord::from_bytes(&packet).expect("a record"));
            let _ = sender.flush();
        }
        let of_first = seen.iter().filter(|r| r.cq == 1).map(|r| r.sequence);
        assert!(of_first.eq(1..=delivered + 1));
        let of_second: Vec<_> = seen.iter().filter(|r| r.cq == 2).map(|r| r.sequence).collect();
        assert_eq!(of_second, [1]);
        assert!(!sender.wants_writable());
    }

    #[test]
    fn a_forgotten_cq_is_not_announced() {
        let (sender, client) = ChannelSender::pair().expect("socket pair");
        fill_channel(&sender);
        assert_eq!(sender.notify(CqId(2)), Sent::Waiting);
        sender.forget(CqId(2));
        while let Some(packet) = read(&client) {
            assert_eq!(ChannelRecord::from_bytes(&packet).map(|r| r.cq), Some(1));
            let _ = sender.flush();
        }
        drop(client);
        assert_eq!(sender.notify(CqId(1)), Sent::Gone);
    }
}
