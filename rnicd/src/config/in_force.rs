//! The effective values of a configuration on this machine.

use super::guid::Guid;
use super::section::Row;

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
    /// Replaces a configured value with the effective one.
    pub(super) fn apply_to(&self, row: &mut Row) {
        match row.key.as_str() {
            "device.guid" => {
                if let Some(guid) = self.guid {
                    row.value = guid.to_string();
                }
            }
            "engine.workers" => row.value = self.workers.to_string(),
            "limits.qps" => self.lower(row, self.qps),
            "limits.startups" => self.lower(row, self.startups),
            _ => {}
        }
    }

    /// Replaces the value of a limit that this machine may have lowered.
    fn lower(&self, Row { key, value, text }: &mut Row, effective: u32) {
        let effective = effective.to_string();
        if *value != effective {
            text.push_str(&format!(" ({key} = {value}, lowered: {})", self.reason));
            *value = effective;
        }
    }
}
