//! What a daemon has counted.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use rnic_tests::{DEADLINE, Daemon};
use rustix::process::Signal;

/// What a daemon has counted since its start, by name and labels.
pub struct Figures(HashMap<String, u64>);

impl Figures {
    /// Has a daemon write its figures to the file that its configuration names, and reads them.
    pub fn read(daemon: &Daemon, file: &Path) -> Self {
        let deadline = Instant::now() + DEADLINE;
        // That of the start, or the last one.
        while std::fs::remove_file(file).is_err() {
            assert!(Instant::now() < deadline, "no {}", file.display());
            std::thread::yield_now();
        }
        // Its configuration read again, a daemon writes its figures.
        daemon.signal(Signal::HUP);
        loop {
            if let Ok(text) = std::fs::read_to_string(file) {
                // The next one removes it.
                return Figures::parse(&text);
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
        Figures(page.lines().filter(|line| !line.starts_with('#')).filter_map(figure).collect())
    }

    /// Nothing is counted of users who have not been there.
    pub fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}
