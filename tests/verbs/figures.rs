//! Metrics of a daemon.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use rnic_tests::{DEADLINE, Daemon};
use rustix::process::Signal;

/// Metrics of a daemon since its start, by name and labels.
pub struct Metrics(HashMap<String, u64>);

impl Metrics {
    /// Makes a daemon write its metrics to the configured file, and reads them.
    pub fn read(daemon: &Daemon, file: &Path) -> Self {
        let deadline = Instant::now() + DEADLINE;
        // Removes the file from the start or from the previous call.
        while std::fs::remove_file(file).is_err() {
            assert!(Instant::now() < deadline, "no {}", file.display());
            std::thread::yield_now();
        }
        // A daemon writes its metrics when it reloads its configuration.
        daemon.signal(Signal::HUP);
        loop {
            if let Ok(text) = std::fs::read_to_string(file) {
                // The next call removes the file.
                return Metrics::parse(&text);
            }
            assert!(Instant::now() < deadline, "no {}", file.display());
            std::thread::yield_now();
        }
    }

    fn parse(page: &str) -> Self {
        let figure = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Metrics(page.lines().filter(|line| !line.starts_with('#')).filter_map(figure).collect())
    }

    /// Returns a metric, or 0 if it is missing, as for users without sessions so far.
    pub fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}
