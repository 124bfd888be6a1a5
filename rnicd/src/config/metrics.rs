//! `[metrics]`: metrics in a file, for a collector.

use std::path::PathBuf;
use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file;

/// `[metrics]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metrics {
    /// File that is replaced at each update; default none.
    pub file: Option<PathBuf>,
    /// Time between two updates; default 15 s.
    pub interval: Duration,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics { file: None, interval: Duration::from_secs(15) }
    }
}

impl Checker<'_> {
    /// Checks `[metrics]` and applies the defaults.
    pub(super) fn metrics(&self, s: file::MetricsSection) -> Result<Metrics, ConfigError> {
        let file = self.optional(s.file, |path| {
            if path.is_absolute() { Ok(()) } else { Err("must be an absolute path".to_owned()) }
        })?;
        let interval =
            self.span(s.interval, Metrics::default().interval, SECOND..=SECOND * 86_400)?;
        Ok(Metrics { file, interval })
    }
}
