//! What the daemon tells a client without being asked.
//!
//! Two kinds of `SOCK_SEQPACKET` socket pairs, one packet per record: the event channel of a
//! session ([`EventSender`]) and the completion channels it makes ([`ChannelSender`]). The client
//! holds the other end, may never read it, and may change whatever the two ends share; so every
//! call here carries `MSG_DONTWAIT | MSG_NOSIGNAL`, and nothing is ever read. What does not fit is
//! kept in bounded memory: events in order up to a limit and counted beyond it, completion records
//! at most one per CQ. This module knows no session and no queue; the control thread and the
//! workers send, and whoever was told that something is waiting watches the descriptor.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rnic_core::abi::control::{Event, MAX_MESSAGE};
use rnic_core::abi::queue::ChannelRecord;
use rnic_core::types::CqId;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

/// What became of a record that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Sent {
    /// It and everything before it is in the client's socket.
    Delivered,
    /// Something waits here; watch the descriptor for writability, then flush.
    Waiting,
    /// The client's end is closed; nobody will ever read it.
    Gone,
}

/// Sends the connection and asynchronous events of one session.
///
/// Shared by the control thread and the workers; the lock covers one non-blocking system call.
#[derive(Debug)]
pub struct EventSender {
    socket: OwnedFd,
    state: Mutex<EventBacklog>,
}

/// Encoded events the socket did not take, and how many fitted nowhere.
#[derive(Debug)]
struct EventBacklog {
    waiting: VecDeque<Vec<u8>>,
    /// Most events in `waiting`, not counting the one that reports a loss.
    bound: usize,
    /// Events dropped since the last `EventsLost`; their place is behind all of `waiting`.
    lost: u64,
    gone: bool,
}

impl EventSender {
    /// Makes an event channel that keeps at most `bound` unsent events; the descriptor is the
    /// client's end.
    pub fn pair(bound: usize) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = record_pair()?;
        let state = EventBacklog { waiting: VecDeque::new(), bound, lost: 0, gone: false };
        Ok((EventSender { socket: ours, state: Mutex::new(state) }, theirs))
    }

    /// Sends an event behind all earlier ones, or keeps it, or counts it as lost.
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

    /// Sends what waits, as far as the socket takes it.
    pub fn flush(&self) -> Sent {
        self.state.lock().flush(&self.socket)
    }

    /// Whether something waits for the socket to become writable.
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
    /// Queues a packet, with the report of an earlier loss in front of it; false if there is no
    /// room.
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
/// Arming is one-shot, so a CQ normally has at most one record unread. A client that arms again
/// without reading fills the socket; from then on one record per CQ is remembered here.
#[derive(Debug)]
pub struct ChannelSender {
    socket: OwnedFd,
    state: Mutex<ChannelState>,
}

#[derive(Debug, Default)]
struct ChannelState {
    /// Per CQ: records sent so far, and whether one waits.
    cqs: HashMap<CqId, (u64, bool)>,
    /// CQs whose record waits, oldest first.
    waiting: VecDeque<CqId>,
    gone: bool,
}

impl ChannelSender {
    /// Makes a completion channel; the descriptor is the client's end.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = record_pair()?;
        Ok((ChannelSender { socket: ours, state: Mutex::default() }, theirs))
    }

    /// Tells the client that `cq` fired. The record's sequence is given out here, under the lock,
    /// so that it ascends on the socket whichever worker sends.
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

    /// Sends what waits, as far as the socket takes it.
    pub fn flush(&self) -> Sent {
        self.state.lock().flush(&self.socket)
    }

    /// Forgets a CQ that is being destroyed; its waiting record is dropped.
    pub fn forget(&self, cq: CqId) {
        let mut state = self.state.lock();
        state.cqs.remove(&cq);
        state.waiting.retain(|w| *w != cq);
    }

    /// Whether something waits for the socket to become writable.
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

/// A connected pair: our end non-blocking, the client's as an application expects it.
fn record_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    // Nothing is ever read here, and descriptors in what a client sends would be closed with this
    // end, which may take as long as their owner wants.
    rustix::net::shutdown(&ours, rustix::net::Shutdown::Read)?;
    Ok((ours, theirs))
}

/// Sends one packet whole: `Ok(false)` if the socket is full, an error if nobody can read it.
fn send_packet(socket: &OwnedFd, packet: &[u8]) -> io::Result<bool> {
    loop {
        return match rustix::net::send(socket, packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::INTR) => continue,
            // Full, or the kernel is out of buffers: both pass.
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::NOMEM,
            ) => Ok(false),
            Err(e) => Err(e.into()),
        };
    }
}

/// The packet of an event; `None` if it does not encode within a message, which is a loss.
fn encode(event: &Event) -> Option<Vec<u8>> {
    postcard::to_stdvec(event).ok().filter(|packet| packet.len() <= MAX_MESSAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rnic_core::types::QpId;

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

    /// Sends numbered events until one waits; returns the number of the first that did.
    fn fill(sender: &EventSender) -> u64 {
        let waits = |n: &u64| sender.send(&event(*n)) == Sent::Waiting;
        (0..MOST).find(waits).expect("a socket that takes no more")
    }

    /// The same with records of one CQ.
    fn fill_channel(sender: &ChannelSender) -> u64 {
        let waits = |_: &u64| sender.notify(CqId(1)) == Sent::Waiting;
        (0..MOST).find(waits).expect("a socket that takes no more")
    }

    /// More packets than any socket takes.
    const MOST: u64 = 1_000_000;
    /// How long anything may take that should take a moment.
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
    fn a_loss_is_counted_and_reported_where_it_happened() {
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
    fn a_client_that_clears_nonblocking_and_never_reads_blocks_nobody() {
        let (sender, client) = EventSender::pair(2).expect("socket pair");
        // The client can reach no flag of our end; ours being blocking would change nothing.
        rustix::io::ioctl_fionbio(&client, false).expect("client end");
        rustix::io::ioctl_fionbio(&sender.socket, false).expect("our end");
        // A call that blocks never returns, so another thread makes it.
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
    fn a_closed_client_is_gone_and_costs_nothing_more() {
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
