//! The printed report of the demo.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Prints a line. A closed pipe is no reason to stop, because the exit code is the result.
macro_rules! print_line {
    ($($line:tt)*) => {{
        let _ = writeln!(std::io::stdout(), $($line)*);
    }};
}

/// Prints the report as the demo proceeds.
pub(super) struct Report {
    began: Instant,
    verified: u32,
}

impl Report {
    pub(super) fn begin() -> Self {
        print_line!("rnicd {}: an RDMA NIC in a daemon (iWARP)", env!("CARGO_PKG_VERSION"));
        Report { began: Instant::now(), verified: 0 }
    }

    pub(super) fn section(&mut self, title: &str) {
        print_line!("\n{title}");
    }

    pub(super) fn pair(&mut self, host: u32, guest: u32) {
        print_line!("  processes {host} (server) and {guest} (client) run every operation:");
    }

    /// Prints a line of the client: name, verified detail, microseconds.
    pub(super) fn step(&mut self, line: &str) {
        let mut fields = line.split('\t');
        let (Some(name), Some(detail), Some(took)) = (fields.next(), fields.next(), fields.next())
        else {
            return;
        };
        self.verified += 1;
        print_line!("    ok  {name:<42} {took:>7} us  {detail}");
    }

    /// Prints a line of the sender: bytes, digest, seconds.
    pub(super) fn copied(&mut self, file: &Path, line: &str) {
        let mut fields = line.split('\t');
        let bytes: f64 = fields.next().and_then(|f| f.parse().ok()).unwrap_or_default();
        let digest = fields.next().unwrap_or_default();
        let seconds: f64 = fields.next().and_then(|f| f.parse().ok()).unwrap_or_default();
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        self.verified += 1;
        print_line!(
            "    ok  rnic-copy of {name}: {:.0} MiB in {seconds:.2} s, {:.0} MB/s \
             with hashing and disk",
            bytes / f64::from(1 << 20),
            bytes / seconds / 1e6,
        );
        print_line!("        SHA-256 {digest} on both sides");
    }

    /// Prints a line of the measuring process.
    pub(super) fn measurement(&mut self, line: &str) {
        if let Some((_, measurement)) = line.split_once('\t') {
            print_line!("        {measurement}");
        }
    }

    pub(super) fn end(&self) {
        let seconds = self.began.elapsed().as_secs_f64();
        print_line!("\nAll {} steps verified in {seconds:.1} s.", self.verified);
    }
}
