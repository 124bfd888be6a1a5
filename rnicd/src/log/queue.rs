//! The way of a log line to stderr: a bounded queue and a thread that alone may block.
//!
//! Whoever logs must never wait for a reader of stderr: a full pipe would stop the control thread
//! and every worker. Lines for which there is no room are counted, and the count is written when
//! there is room again. The thread starts late, after privileges were dropped; lines wait for it.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

/// The sending half: a line per `write`, never waiting.
#[derive(Clone, Debug)]
pub struct Queue {
    lines: Sender<LogEntry>,
    lost: Arc<AtomicU64>,
}

/// The receiving half, which takes the lines out and writes them.
#[derive(Clone, Debug)]
pub struct Drain {
    lines: Receiver<LogEntry>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum LogEntry {
    Line(Vec<u8>),
    /// Dropped by the drain when everything before it is written.
    Flush(Sender<()>),
}

/// Both halves, with room for so many lines.
pub fn queue(lines: usize) -> (Queue, Drain) {
    let (sender, receiver) = bounded(lines);
    let lost = Arc::new(AtomicU64::new(0));
    (Queue { lines: sender, lost: Arc::clone(&lost) }, Drain { lines: receiver, lost })
}

impl Queue {
    /// Waits until everything is written that was queued before, but no longer than `patience`;
    /// whether it is.
    pub fn flush_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let (held, written) = bounded(0);
        if self.lines.send_deadline(LogEntry::Flush(held), deadline).is_err() {
            return false;
        }
        matches!(
            written.recv_deadline(deadline),
            Err(crossbeam_channel::RecvTimeoutError::Disconnected)
        )
    }
}

impl Write for Queue {
    /// Queues one line, cut to [`LONGEST`].
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut kept = line[..line.len().min(LONGEST)].to_vec();
        if kept.len() < line.len() {
            kept.extend_from_slice(b"...\n");
        }
        if let Err(TrySendError::Full(_)) = self.lines.try_send(LogEntry::Line(kept)) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drain {
    /// Writes what is queued now.
    pub fn write_queued(&self, mut out: impl Write) {
        for entry in self.lines.try_iter() {
            if let LogEntry::Line(line) = entry {
                let _ = out.write_all(&line);
            }
        }
        self.tell_lost(&mut out);
    }

    /// Writes lines to `out` until the last [`Queue`] is gone.
    pub fn write_all(&self, mut out: impl Write) {
        for entry in &self.lines {
            // A line that cannot be written is lost: there is nowhere to say so.
            match entry {
                LogEntry::Line(line) => drop(out.write_all(&line)),
                LogEntry::Flush(held) => {
                    self.tell_lost(&mut out);
                    drop(held);
                }
            }
            // At the end of what was there: the lines that found no room came after those.
            if self.lines.is_empty() {
                self.tell_lost(&mut out);
            }
        }
    }

    fn tell_lost(&self, out: &mut impl Write) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(out, "rnicd: {lost} log lines were lost: stderr was not read in time");
        }
    }
}

/// Bytes of a line that are kept.
const LONGEST: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that takes what it gets once it is told to.
    struct Gate(Receiver<()>, Sender<Vec<u8>>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Open for good once the test has dropped its end.
            let _ = self.0.recv();
            let _ = self.1.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_does_not_read_costs_lines_and_no_time() {
        let (mut lines, drain) = queue(4);
        let (open, closed) = bounded(0);
        let (out, seen) = crossbeam_channel::unbounded();
        let thread = std::thread::spawn(move || drain.write_all(Gate(closed, out)));
        for n in 0..100 {
            lines.write_all(format!("{n}\n").as_bytes()).unwrap_or_else(|e| panic!("{e}"));
        }
        assert!(!lines.flush_within(Duration::from_millis(1)));
        drop(open);
        assert!(lines.flush_within(Duration::from_secs(60)));
        drop(lines);
        thread.join().unwrap_or_else(|_| panic!("the drain"));
        let written: Vec<u8> = seen.try_iter().flatten().collect();
        let written = String::from_utf8_lossy(&written);
        assert!(written.starts_with("0\n1\n"), "{written}");
        let lost: u64 = written
            .lines()
            .filter_map(|line| line.strip_prefix("rnicd: ")?.split(' ').next()?.parse::<u64>().ok())
            .sum();
        let kept = written.lines().filter(|line| line.parse::<u64>().is_ok()).count();
        assert_eq!(lost + kept as u64, 100, "{written}");
    }

    #[test]
    fn a_line_is_bounded() {
        let (mut lines, drain) = queue(1);
        let long = vec![b'x'; 2 * LONGEST];
        assert_eq!(lines.write(&long).ok(), Some(long.len()));
        drop(lines);
        let mut out = Vec::new();
        drain.write_all(&mut out);
        assert_eq!(out.len(), LONGEST + 4);
    }
}
