//! `[log]`

use super::checker::Checker;
use super::error::ConfigError;
use super::file;

/// `[log]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Filter of `tracing`; default `info`. `RUST_LOG` overrides it.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Log { level: "info".to_owned() }
    }
}

impl Checker<'_> {
    /// Validates the section.
    pub(super) fn log(&self, s: file::LogSection) -> Result<Log, ConfigError> {
        let level = self.checked(s.level, Log::default().level, |level| {
            tracing_subscriber::EnvFilter::try_new(level)
                .map(|_| ())
                .map_err(|e| format!("is no log filter like \"info\" or \"rnicd=debug\": {e}"))
        })?;
        Ok(Log { level })
    }
}
