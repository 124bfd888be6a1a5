//! How far an attack is, told to whoever measures beside it.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts what an attack does, and prints the count again and again.
#[derive(Clone)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    /// Says that the attack is under way, and from now on how far it is, until nobody listens.
    pub fn begin() -> Self {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        println!("under way");
        std::thread::spawn(move || {
            loop {
                let line = format!("done {}\n", counted.load(Ordering::Relaxed));
                // Whoever started the attack is gone: so is its purpose.
                if std::io::stdout().write_all(line.as_bytes()).is_err() {
                    std::process::exit(0);
                }
                std::thread::sleep(EVERY);
            }
        });
        Progress(count)
    }

    /// So much more was done.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

/// How often the count is printed.
const EVERY: Duration = Duration::from_millis(10);
