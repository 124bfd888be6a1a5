//! `[tcp]`: how soon a peer that is gone is noticed.

use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file;

/// `[tcp]`, for every connection of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Silence after which the peer's host is asked whether it is there; default 20 s. `None`:
    /// never, or as whoever made the socket had it.
    pub keepalive: Option<Duration>,
    /// Between two such questions; default 10 s.
    pub keepalive_interval: Duration,
    /// How long what was sent, a question included, may stay unacknowledged; default 60 s. `None`
    /// leaves it to the kernel.
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
    /// Checks `[tcp]` and fills in what the file does not say.
    pub(super) fn tcp(&self, s: file::TcpSection) -> Result<Tcp, ConfigError> {
        let default = Tcp::default();
        // The kernel takes whole seconds, 32767 at most.
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
