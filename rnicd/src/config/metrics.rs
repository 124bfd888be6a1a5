//! `[metrics]`: figures in a file, for a collector to read.

use std::path::PathBuf;
use std::time::Duration;

use super::checker::{Checker, SECOND};
use super::error::ConfigError;
use super::file;

/// `[metrics]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metrics {
    /// File that is written anew each time; by default there is none.
    pub file: Option<PathBuf>,
    /// Time between two writings; default 15 s.
    pub interval: Duration,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics { file: None, interval: Duration::from_secs(15) }
    }
}

impl Checker<'_> {
    /// Checks `[metrics]` and fills in what the file does not say.
    pub(super) fn metrics(&self, s: file::MetricsSection) -> Result<Metrics, ConfigError> {
        let file = self.optional(s.file, |path| match path.is_absolute() {
            true => Ok(()),
            false => Err("must be an absolute path".to_owned()),
        })?;
        let interval =
            self.span(s.interval, Metrics::default().interval, SECOND..=SECOND * 86_400)?;
        Ok(Metrics { file, interval })
    }
}
