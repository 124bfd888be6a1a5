//! What a machine leaves of a configuration.

use super::Config;
use super::guid::Guid;
use super::kind::Kind;

/// What this process makes of a configuration, on its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce {
    /// Worker threads that are started.
    pub workers: u32,
    /// Queue pairs of the device.
    pub qps: u32,
    /// Connections in start-up.
    pub startups: u32,
    /// What lowers the limits on them, in words.
    pub reason: String,
    /// The device's GUID, if it is known: a thread that is confined cannot ask for the host's name.
    pub guid: Option<Guid>,
}

impl InForce {
    /// As it is written, on a machine that has enough of everything and one CPU.
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
