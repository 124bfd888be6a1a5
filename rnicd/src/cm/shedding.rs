//! Resets connections when descriptors run out, and reports limits that were reached.

use std::collections::HashMap;
use std::fs::File;
use std::time::Duration;

use rnic_abi::types::Time;

use super::listener::Listener;
use super::net;
use crate::socket::Socket;

/// Resets new connections when no descriptor is free, and rate-limits the log of rejected
/// connections.
#[derive(Debug)]
pub(super) struct Shedding {
    /// Open descriptor that is closed for an accept when all others are in use.
    spare: Option<File>,
    /// By limit: connections rejected since the last report, and the time of that report.
    limits: HashMap<String, (u64, Option<Time>)>,
}

impl Shedding {
    pub(super) fn new() -> Self {
        Shedding { spare: open_spare(), limits: HashMap::new() }
    }

    /// Accepts one connection with the spare descriptor and resets it.
    pub(super) fn shed(&mut self, listener: &Listener) -> bool {
        let Some(listener) = listener.socket() else { return false };
        if self.spare.take().is_none() {
            // Another thread took the spare descriptor. Try to open a new one.
            self.spare = open_spare();
            return false;
        }
        let shed = net::accept(listener).map(|s| Socket::own(s).reset()).is_ok();
        self.spare = open_spare();
        shed
    }

    pub(super) fn note(&mut self, limit: &str, value: usize, now: Time) {
        let over = |at: &Option<Time>| at.is_none_or(|at| now.since(at) >= REPORT_PAUSE);
        if !self.limits.contains_key(limit) {
            // Remove limits with nothing left to report.
            self.limits.retain(|_, (unreported, at)| *unreported > 0 || !over(at));
            self.limits.insert(limit.to_owned(), (0, None));
        }
        let Some((unreported, reported)) = self.limits.get_mut(limit) else { return };
        *unreported += 1;
        if over(reported) {
            let connections = std::mem::take(unreported);
            tracing::warn!(connections, "{limit} = {value} reached: connections rejected");
            *reported = Some(now);
        }
    }
}

fn open_spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Minimum time between two reports of the same limit.
const REPORT_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_is_reported_once_a_second() {
        let mut shedding = Shedding::new();
        let start = Time(7_000_000_000);
        for _ in 0..3 {
            shedding.note("limits.startups", 1, start);
        }
        shedding.note("descriptors (RLIMIT_NOFILE)", 1, start);
        let of = |s: &Shedding, limit: &str| s.limits.get(limit).copied();
        assert_eq!(of(&shedding, "limits.startups"), Some((2, Some(start))));
        assert_eq!(of(&shedding, "descriptors (RLIMIT_NOFILE)"), Some((0, Some(start))));
        let later = start.after(REPORT_PAUSE);
        shedding.note("limits.startups", 1, later);
        assert_eq!(of(&shedding, "limits.startups"), Some((0, Some(later))));
        // Entries without unreported connections are removed.
        shedding.note("another", 1, later);
        assert_eq!(of(&shedding, "descriptors (RLIMIT_NOFILE)"), None);
    }
}
