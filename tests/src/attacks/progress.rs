//! Progress reports of an attack to the test that measures its effect.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts the operations of an attack and prints the count periodically.
#[derive(Clone)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Prints that the attack has started, then its progress until standard output is closed.
    pub fn begin() -> Self {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        println!("under way");
        std::thread::spawn(move || {
            loop {
                let line = format!("done {}\n", counted.load(Ordering::Relaxed));
                // The test has exited. End the attack, too.
                if std::io::stdout().write_all(line.as_bytes()).is_err() {
                    std::process::exit(0);
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Progress(count)
    }

    /// Adds `n` operations.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

/// Interval between two reports.
const INTERVAL: Duration = Duration::from_millis(10);
