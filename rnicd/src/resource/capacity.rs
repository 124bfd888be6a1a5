//! What this process can really give: limits of the configuration met with those of the machine.

use super::policy::Rights;
use crate::cm::Quota;
use crate::config::{Config, InForce, Kind, Loopback};

/// Workers and limits in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Worker threads: as configured, or half the CPUs.
    pub workers: u32,
    /// Queue pairs of the device: as configured, or what the descriptors allow.
    pub qps: u32,
    /// Connections in start-up that hold a descriptor and no QP: the same.
    pub startups: u32,
    /// Those of one user: half of them where descriptors have lowered them, unless the daemon is
    /// his.
    startups_of_user: u32,
    /// The soft limit on descriptors, after it was raised.
    pub nofile: u64,
    /// Descriptors of clients that may wait to be closed: as configured, or what the others leave.
    pub closing: u64,
}

impl Capacity {
    /// Raises the soft limit on descriptors to the hard one and derives what follows from it.
    pub fn of_this_process(config: &Config) -> Self {
        Capacity::derive(config, crate::privilege::raise_descriptor_limit(), cpus())
    }

    /// What `nofile` descriptors and `cpus` CPUs allow.
    pub fn derive(config: &Config, nofile: u64, cpus: u32) -> Self {
        // With both ends of a connection in this daemon and TCP between them, one worker would take
        // turns at either end: on two CPUs, two moved 0.7 of what raw TCP does, one 0.36.
        let least = match config.engine.loopback {
            Loopback::Direct => 1,
            Loopback::Tcp => cpus.clamp(1, 2),
        };
        let workers = config.engine.workers.unwrap_or((cpus / 2).max(least));
        let nothing =
            Capacity { workers, qps: 0, startups: 0, startups_of_user: 0, nofile, closing: 0 };
        nothing.with_limits_of(config)
    }

    /// The same machine under other limits.
    #[must_use]
    pub fn with_limits_of(&self, config: &Config) -> Self {
        let lowered = |configured: u32, room: u64| {
            u32::try_from(room).map_or(configured, |room| room.min(configured))
        };
        let limits = &config.limits;
        let configured = limits.device.count(Kind::Startups);
        let startups = lowered(configured, self.startups().max(1));
        let startups_of_user = match startups < configured {
            true => (startups / 2).max(1),
            false => u32::MAX,
        };
        let qps = lowered(limits.device.count(Kind::Qps), self.room());
        let closing = limits.device.of(Kind::Closing);
        let closing = closing.min((self.not_for_connections() / 4).max(LEAST_CLOSING));
        Capacity { qps, startups, startups_of_user, closing, ..*self }
    }

    /// What `check-config` says of it.
    pub fn in_force(&self) -> InForce {
        let Capacity { workers, qps, startups, .. } = *self;
        InForce { workers, qps, startups, reason: self.reason(), guid: None }
    }

    /// Where the descriptors come from, in words.
    fn reason(&self) -> String {
        let Capacity { nofile, closing, .. } = self;
        let room = self.room();
        format!(
            "RLIMIT_NOFILE = {nofile} leaves {room} for connections, {closing} for what clients passed and is not closed yet"
        )
    }

    /// The key to name when QPs run out: the configured one, or what lowered it.
    pub fn qps_key(&self, configured: u32) -> String {
        self.key("limits.qps".to_owned(), self.qps < configured)
    }

    /// The key to name when there is no room for another connection in start-up.
    pub fn startups_key(&self, configured: u32) -> String {
        self.key("limits.startups".to_owned(), self.startups < configured)
    }

    /// What the start-up of a user's connections may take up.
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
        match lowered {
            true => format!("{name} (lowered by RLIMIT_NOFILE = {})", self.nofile),
            false => name,
        }
    }

    /// Descriptors for sessions, channels and bound addresses together.
    pub fn rest(&self) -> u64 {
        self.not_for_connections().saturating_sub(self.closing)
    }

    /// The key to name when too many descriptors wait to be closed: the configured one, or what
    /// lowered it.
    pub fn closing_key(&self, configured: u32) -> String {
        match self.closing < u64::from(configured) {
            true => format!("limits.closing (lowered by RLIMIT_NOFILE = {})", self.nofile),
            false => "limits.closing".to_owned(),
        }
    }

    /// How many of one user's may wait, given his own limit: half of them at most.
    pub fn closing_of_user(&self, limit: u32) -> u64 {
        u64::from(limit).min(self.closing.div_ceil(2))
    }

    fn not_for_connections(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) - self.room() - self.startups()
    }

    /// Descriptors of a session without objects: its socket, its process, its event channel, and an
    /// eventfd per worker.
    pub fn per_session(&self) -> u64 {
        3 + u64::from(self.workers)
    }

    /// A connected QP holds one descriptor. A quarter stays for sessions, channels, bound addresses
    /// and what waits to be closed, an eighth for connections in start-up. All of them are counted,
    /// so that none of them takes the descriptors of another.
    fn room(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) / 8 * 5
    }

    fn startups(&self) -> u64 {
        self.nofile.saturating_sub(RESERVED) / 8
    }
}

/// CPUs this process may run on.
fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Descriptors that may wait to be closed however few there are: with fewer, whoever only just
/// passed one would be refused another.
const LEAST_CLOSING: u64 = 8;

/// Descriptors of the daemon itself.
const RESERVED: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_lower_the_queue_pairs_and_say_so() {
        let config = Config::default();
        let small = Capacity::derive(&config, 1024, 2);
        assert_eq!((small.qps, small.startups, small.rest()), (600, 120, 180));
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
    fn what_waits_to_be_closed_takes_no_session_s_descriptors() {
        let config = Config::default();
        let small = Capacity::derive(&config, 1024, 2);
        assert_eq!((small.closing, small.rest()), (60, 180));
        assert_eq!((small.closing_of_user(128), small.closing_of_user(7)), (30, 7));
        assert_eq!(small.closing_key(512), "limits.closing (lowered by RLIMIT_NOFILE = 1024)");
        let large = Capacity::derive(&config, 1 << 20, 2);
        assert_eq!((large.closing, large.closing_of_user(128)), (512, 128));
        assert_eq!(large.closing_key(512), "limits.closing");
        let tiny = Capacity::derive(&config, 10, 1);
        assert_eq!((tiny.closing, tiny.rest(), tiny.closing_of_user(128)), (8, 0, 4));
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
