//! Queue of management datagrams from the workers to the control thread.
//!
//! A host can send them faster than the control thread handles them, so the queue is bounded and
//! every host gets an equal share of it: hosts are served round-robin, and if the queue is full, a
//! datagram of a host with fewer waiting datagrams displaces the newest one of the host with the
//! most. A displaced message is repeated 4.3 s later, so the queue has room for a program that
//! connects hundreds of QPs at once.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rnic_abi::roce::mad;

use crate::rate::host;

/// A management datagram, sent by QP 1 of one port to QP 1 of another.
#[derive(Debug)]
pub struct ManagementDatagram {
    /// Source address.
    pub from: IpAddr,
    /// Destination address, one of the device's.
    pub to: IpAddr,
    /// The message, already validated.
    pub mad: Box<mad::Bytes>,
}

/// The waiting datagrams, and the number of packets that workers have dropped before queueing.
#[derive(Debug, Default)]
pub(super) struct Management {
    waiting: Mutex<Waiting>,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Hosts with at least one datagram, in the order of their turns. At most [`MAX_WAITING`].
    hosts: VecDeque<(IpAddr, VecDeque<ManagementDatagram>)>,
    /// Sum over all hosts.
    count: usize,
    /// The control thread has been woken and has not taken the datagrams since.
    control_woken: bool,
}

impl Management {
    /// Queues a datagram or drops it. Returns true if the control thread must be woken.
    pub(super) fn push(&self, datagram: ManagementDatagram) -> bool {
        let mut waiting = self.waiting();
        waiting.push(datagram) && !std::mem::replace(&mut waiting.control_woken, true)
    }

    /// Takes up to [`MAX_TAKEN`] waiting datagrams, in round-robin order of the hosts. If others
    /// remain, the caller must wake the control thread; otherwise the next datagram does.
    pub(super) fn take(&self) -> Vec<ManagementDatagram> {
        let mut waiting = self.waiting();
        let taken = std::iter::from_fn(|| waiting.pop()).take(MAX_TAKEN).collect();
        waiting.control_woken = waiting.count > 0;
        taken
    }

    /// Returns true if datagrams are waiting.
    pub(super) fn has_some(&self) -> bool {
        self.waiting().count > 0
    }

    /// Counts a packet that cannot be from a daemon: its source port or its message is wrong.
    pub(super) fn count_dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of packets dropped because they cannot be from a daemon.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Locks the queue. Poisoning is impossible, because a panic with the lock held ends the
    /// process.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Returns false if the datagram was dropped.
    fn push(&mut self, datagram: ManagementDatagram) -> bool {
        let from = host(datagram.from);
        let own = self.hosts.iter().position(|(host, _)| *host == from);
        if self.count >= MAX_WAITING {
            let lengths = self.hosts.iter().map(|(_, queue)| queue.len()).enumerate();
            let Some((longest, most)) = lengths.max_by_key(|(_, len)| *len) else { return false };
            if own.is_some_and(|own| self.hosts[own].1.len() + 1 >= most) || most == 1 {
                return false;
            }
            // That host keeps at least one datagram, so it stays in `hosts`.
            self.hosts[longest].1.pop_back();
            self.count -= 1;
        }
        match own {
            Some(own) => self.hosts[own].1.push_back(datagram),
            None => self.hosts.push_back((from, VecDeque::from([datagram]))),
        }
        self.count += 1;
        true
    }

    fn pop(&mut self) -> Option<ManagementDatagram> {
        let (host, mut queue) = self.hosts.pop_front()?;
        let next = queue.pop_front()?;
        self.count -= 1;
        if !queue.is_empty() {
            self.hosts.push_back((host, queue));
        }
        Some(next)
    }
}

/// Maximum number of waiting datagrams of all hosts, as in the receive queue of the kernel's QP 1.
const MAX_WAITING: usize = 512;
/// Maximum number of datagrams that the control thread handles before other work.
const MAX_TAKEN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(host: u8, number: u8) -> ManagementDatagram {
        ManagementDatagram {
            from: IpAddr::from([192, 0, 2, host]),
            to: IpAddr::from([192, 0, 2, 100]),
            mad: Box::new([number; mad::LEN]),
        }
    }

    /// Takes all datagrams. Returns their hosts and contents.
    fn taken(management: &Management) -> Vec<(IpAddr, u8)> {
        let mut all = Vec::new();
        while management.has_some() {
            let some = management.take();
            assert!((1..=MAX_TAKEN).contains(&some.len()));
            all.extend(some.into_iter().map(|d| (d.from, d.mad[0])));
        }
        all
    }

    #[test]
    fn a_flood_leaves_other_hosts_their_share() {
        let management = Management::default();
        let flood = || {
            for _ in 0..MAX_WAITING {
                management.push(datagram(1, 0));
            }
        };
        flood();
        management.push(datagram(2, 7));
        // The flood continues and does not displace the other host's datagrams.
        flood();
        let all = taken(&management);
        assert_eq!(all.len(), MAX_WAITING);
        // The other host's turn is the second.
        assert_eq!(all[1], ([192, 0, 2, 2].into(), 7));
        assert_eq!(all.iter().filter(|(from, _)| *from == all[0].0).count(), MAX_WAITING - 1);
    }

    #[test]
    fn a_hundred_requests_of_a_host_wait() {
        let management = Management::default();
        for number in 0..100 {
            assert_eq!(management.push(datagram(1, number)), number == 0);
        }
        assert_eq!(management.take().len(), MAX_TAKEN);
        // The control thread is awake as long as datagrams are waiting.
        assert!(management.has_some() && !management.push(datagram(1, 100)));
        assert_eq!(taken(&management).last(), Some(&([192, 0, 2, 1].into(), 100)));
        assert!(management.push(datagram(1, 101)));
    }

    #[test]
    fn hosts_that_flood_have_equal_shares() {
        let management = Management::default();
        for number in 0..=255 {
            for host in 1..=4 {
                management.push(datagram(host, number));
            }
        }
        let all = taken(&management);
        for host in 1..=4 {
            let from = IpAddr::from([192, 0, 2, host]);
            assert_eq!(all.iter().filter(|(of, _)| *of == from).count(), MAX_WAITING / 4, "{from}");
        }
        // Each host has one datagram per round.
        let round: std::collections::BTreeSet<_> = all[..4].iter().map(|(of, _)| *of).collect();
        assert_eq!(round.len(), 4);
    }

    #[test]
    fn an_ipv6_host_has_one_share() {
        let management = Management::default();
        for number in 0..MAX_WAITING {
            let from = format!("2001:db8::{number:x}").parse().unwrap_or_else(|e| panic!("{e}"));
            management.push(ManagementDatagram { from, ..datagram(1, 0) });
        }
        management.push(datagram(2, 7));
        assert_eq!(taken(&management)[1], ([192, 0, 2, 2].into(), 7));
    }

    #[test]
    fn waiting_datagrams_cause_one_wake_up() {
        let management = Management::default();
        assert!(management.push(datagram(1, 0)));
        assert!(!management.push(datagram(1, 1)) && !management.push(datagram(2, 0)));
        assert_eq!(taken(&management).len(), 3);
        assert!(management.push(datagram(1, 2)));
    }
}
