//! The effective values of a configuration on this machine.

use super::Config;
use super::guid::Guid;
use super::kind::Kind;

/// Effective values of a configuration in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    /// Number of worker threads.
    pub workers: u32,
    /// Limit for QPs of the device.
    pub qps: u32,
    /// Limit for connections in start-up.
    pub startups: u32,
    /// Reason why `qps` and `startups` are lower than configured.
    pub reason: String,
    /// The device's GUID, if known. A thread confined by seccomp cannot read the host name.
    pub guid: Option<Guid>,
}

impl InForce {
    /// Returns the values as written, for a machine with enough resources and one CPU.
    pub(super) fn as_written(config: &Config) -> Self {
        let device = &config.limits.device;
        InForce {
            workers: config.engine.workers.unwrap_or(1),
            qps: device.count(Kind::Qps),
            startups: device.count(Kind::Startups),
            reason: String::new(),
            guid: config.device.guid,
        }
    }
}
