//! Limits in force: the configured limits, lowered to the available descriptors.

use super::policy::Rights;
use crate::cm::Quota;
use crate::config::{Config, InForce, Kind, Loopback};

/// Workers and limits in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Worker threads: as configured, or half the CPUs.
    pub workers: u32,
    /// QPs of the device: as configured, or as many as the descriptors allow.
    pub qps: u32,
    /// Connections in start-up that hold a descriptor and no QP: as configured, or as many as the
    /// descriptors allow.
    pub startups: u32,
    /// Maximum number of connections in start-up of one user: half of `startups` if descriptors
    /// have lowered it. Does not apply to the user that the daemon runs as.
    startups_of_user: u32,
    /// The soft limit on descriptors, after it was raised.
    pub nofile: u64,
    /// Descriptors of clients that may wait to be closed: as configured, or at most a quarter of
    /// the descriptors that are not for connections.
    pub closing: u64,
}

impl Capacity {
    /// Raises the soft limit on descriptors to the hard limit and derives the capacity from it.
    pub fn of_this_process(config: &Config) -> Self {
        Capacity::derive(config, crate::privilege::raise_descriptor_limit(), cpus())
    }

    /// Derives the capacity from `nofile` descriptors and `cpus` CPUs.
    pub fn derive(config: &Config, nofile: u64, cpus: u32) -> Self {
        // If both ends of a TCP connection are in this daemon, a single worker would serve them
        // alternately. On two CPUs, two workers reach 0.7 of the throughput of plain TCP, and one
        // worker reaches 0.36.
        let least = match config.engine.loopback {
            Loopback::Direct => 1,
            Loopback::Tcp => cpus.clamp(1, 2),
        };
        let workers = config.engine.workers.unwrap_or((cpus / 2).max(least));
        let nothing =
            Capacity { workers, qps: 0, startups: 0, startups_of_user: 0, nofile, closing: 0 };
        nothing.with_limits_of(config)
    }

    /// Returns the capacity with the limits of `config` and the same workers and descriptors.
    #[must_use]
    pub fn with_limits_of(&self, config: &Config) -> Self {
        let lowered = |configured: u32, room: u64| {
            u32::try_from(room).map_or(configured, |room| room.min(configured))
        };
        let limits = &config.limits;
        let configured = limits.device.count(Kind::Startups);
        let startups = lowered(configured, self.startups().max(1));
        let startups_of_user = if startups < configured { (startups / 2).max(1) } else { u32::MAX };
        let qps = lowered(config.device_count(Kind::Qps), self.room());
        let closing = limits.device.of(Kind::Closing);
        let closing = closing.min((self.not_for_connections() / 4).max(LEAST_CLOSING));
        Capacity { qps, startups, startups_of_user, closing, ..*self }
    }

    /// Returns the limits in force for `check-config`.
    pub fn in_force(&self) -> InForce {
        let Capacity { workers, qps, startups, .. } = *self;
        InForce { workers, qps, startups, reason: self.reason(), guid: None }
    }

    /// Describes how the descriptors are divided.
    fn reason(&self) -> String {
        let Capacity { nofile, closing, .. } = self;
        let room = self.room();
        format!(
            "RLIMIT_NOFILE = {nofile} allows {room} connections, and {closing} passed descriptors \
             that wait to be closed"
        )
    }

    /// Returns the limit to report when QPs run out: the configured key, with the limit that
    /// lowered it.
    pub fn qps_key(&self, configured: u32) -> String {
        self.key("limits.qps".to_owned(), self.qps < configured)
    }

    /// Returns the limit to report when there is no room for another connection in start-up.
    pub fn startups_key(&self, configured: u32) -> String {
        self.key("limits.startups".to_owned(), self.startups < configured)
    }

    /// Returns a user's limits on connections in start-up.
    pub fn quota(&self, rights: &Rights) -> Quota {
        let most = if rights.own { self.startups } else { self.startups_of_user };
        let configured = rights.user_count(Kind::Startups);
        let startups_key = self.key(rights.user_key(Kind::Startups), most < configured);
        Quota {
            user: rights.uid,
            startups: configured.min(most),
            startups_key,
            accepts_per_second: rights.user_count(Kind::AcceptsPerSecond),
        }
    }

    fn key(&self, name: String, lowered: bool) -> String {
        if lowered { format!("{name} (lowered by RLIMIT_NOFILE = {})", self.nofile) } else { name }
    }

    /// Returns the number of descriptors for sessions, channels and bound addresses together.
    pub fn control_descriptors(&self) -> u64 {
        self.not_for_connections().saturating_sub(self.closing)
    }

    /// Returns the limit to report when too many descriptors wait to be closed: the configured key,
    /// with the limit that lowered it.
    pub fn closing_key(&self, configured: u32) -> String {
        self.key("limits.closing".to_owned(), self.closing < u64::from(configured))
    }

    /// Returns the maximum number of descriptors of one user that may wait to be closed: `limit`,
    /// or half of the device's limit if that is less.
    pub fn closing_of_user(&self, limit: u32) -> u64 {
        u64::from(limit).min(self.closing.div_ceil(2))
    }

    fn not_for_connections(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) - self.room() - self.startups()
    }

    /// Returns the number of descriptors of a session without objects: socket, pidfd, event
    /// channel, and an eventfd per worker.
    pub fn per_session(&self) -> u64 {
        3 + u64::from(self.workers)
    }

    /// Returns the number of descriptors for connected QPs: five eighths, one descriptor per QP.
    /// One eighth is for connections in start-up, and a quarter for sessions, channels, bound
    /// addresses and descriptors that wait to be closed. Each use has its own limit, so that it
    /// cannot exhaust the descriptors for another use.
    fn room(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) / 8 * 5
    }

    fn startups(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) / 8
    }
}

/// Returns the number of CPUs this process may run on.
fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Minimum of [`Capacity::closing`]. With a lower limit, a client that passes descriptors one after
/// the other could be refused, because the reaper has not closed the earlier ones yet.
const LEAST_CLOSING: u64 = 8;

/// Descriptors of the daemon itself.
const RESERVED: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_lower_the_qp_limit() {
        let config = Config::default();
        let small = Capacity::derive(&config, 1024, 2);
        assert_eq!((small.qps, small.startups, small.control_descriptors()), (600, 120, 180));
        let key = small.qps_key(config.limits.device.count(Kind::Qps));
        assert_eq!(key, "limits.qps (lowered by RLIMIT_NOFILE = 1024)");
        let large = Capacity::derive(&config, 1 << 20, 2);
        assert_eq!(large.qps, config.limits.device.count(Kind::Qps));
        assert_eq!(large.qps_key(config.limits.device.count(Kind::Qps)), "limits.qps");
        assert_eq!(Capacity::derive(&config, 10, 1).qps, 0);
        assert_eq!(
            Capacity::derive(&config, u64::MAX, 1).qps,
            config.limits.device.count(Kind::Qps)
        );
    }

    #[test]
    fn closing_descriptors_are_limited() {
        let config = Config::default();
        let small = Capacity::derive(&config, 1024, 2);
        assert_eq!((small.closing, small.control_descriptors()), (60, 180));
        assert_eq!((small.closing_of_user(128), small.closing_of_user(7)), (30, 7));
        assert_eq!(small.closing_key(512), "limits.closing (lowered by RLIMIT_NOFILE = 1024)");
        let large = Capacity::derive(&config, 1 << 20, 2);
        assert_eq!((large.closing, large.closing_of_user(128)), (512, 128));
        assert_eq!(large.closing_key(512), "limits.closing");
        let tiny = Capacity::derive(&config, 10, 1);
        assert_eq!(
            (tiny.closing, tiny.control_descriptors(), tiny.closing_of_user(128)),
            (8, 0, 4)
        );
    }

    #[test]
    fn workers_are_half_the_cpus_unless_configured() {
        let mut config = Config::default();
        assert_eq!(Capacity::derive(&config, 1024, 1).workers, 1);
        assert_eq!(Capacity::derive(&config, 1024, 9).workers, 4);
        config.engine.loopback = Loopback::Tcp;
        assert_eq!(Capacity::derive(&config, 1024, 1).workers, 1);
        assert_eq!(Capacity::derive(&config, 1024, 2).workers, 2);
        assert_eq!(Capacity::derive(&config, 1024, 9).workers, 4);
        config.engine.workers = Some(3);
        assert_eq!(Capacity::derive(&config, 1024, 1).workers, 3);
    }
}
