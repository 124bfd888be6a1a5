//! `[tcp]`: keepalive and timeouts of connections.

use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file;

/// `[tcp]`, for every connection of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Idle time before a keepalive probe; default 20 s. `None` sends no probes, or leaves a passed
    /// socket as it is.
    pub keepalive: Option<Duration>,
    /// Time between two probes; default 10 s.
    pub keepalive_interval: Duration,
    /// Time limit for unacknowledged bytes and probes; default 60 s. `None` leaves the limit to the
    /// kernel.
    pub user_timeout: Option<Duration>,
}

impl Default for Tcp {
    fn default() -> Self {
        Tcp {
            keepalive: Some(Duration::from_secs(20)),
            keepalive_interval: Duration::from_secs(10),
            user_timeout: Some(Duration::from_secs(60)),
        }
    }
}

impl Checker<'_> {
    /// Checks `[tcp]` and applies the defaults.
    pub(super) fn tcp(&self, s: file::TcpSection) -> Result<Tcp, ConfigError> {
        let default = Tcp::default();
        // The kernel takes whole seconds, at most 32767.
        let range = SECOND..=SECOND * 3600;
        Ok(Tcp {
            keepalive: self.span_or_off(s.keepalive, default.keepalive, range.clone())?,
            keepalive_interval: self.span(
                s.keepalive_interval,
                default.keepalive_interval,
                range.clone(),
            )?,
            user_timeout: self.span_or_off(s.user_timeout, default.user_timeout, range)?,
        })
    }
}
