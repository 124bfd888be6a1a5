//! Queue of log lines to stderr. Only the thread that writes them may block.
//!
//! Other threads must never wait for a reader of stderr: a full pipe would stop the control thread
//! and every worker. Lines that do not fit are counted, and the count is written when there is room
//! again. The thread starts late, after privileges are dropped; lines wait for it.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

/// The sending half. Takes one line per `write`, which never blocks.
#[derive(Clone, Debug)]
pub struct Queue {
    lines: Sender<LogEntry>,
    lost: Arc<AtomicU64>,
}

/// The receiving half, which writes the lines.
#[derive(Clone, Debug)]
pub struct Drain {
    lines: Receiver<LogEntry>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum LogEntry {
    Line(Vec<u8>),
    /// The drain drops the sender when all earlier lines are written.
    Flush(Sender<()>),
}

/// Creates both halves, with room for `lines` lines.
pub fn queue(lines: usize) -> (Queue, Drain) {
    let (sender, receiver) = bounded(lines);
    let lost = Arc::new(AtomicU64::new(0));
    (Queue { lines: sender, lost: Arc::clone(&lost) }, Drain { lines: receiver, lost })
}

impl Queue {
    /// Waits until all lines queued so far are written, for at most `patience`. Returns true if
    /// they are.
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
    /// Queues one line, cut to [`MAX_LINE`].
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut kept = line[..line.len().min(MAX_LINE)].to_vec();
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
    /// Writes all lines that are queued now.
    pub fn write_queued(&self, mut out: impl Write) {
        for entry in self.lines.try_iter() {
            if let LogEntry::Line(line) = entry {
                let _ = out.write_all(&line);
            }
        }
        self.report_lost(&mut out);
    }

    /// Writes lines to `out` until the last [`Queue`] is dropped.
    pub fn write_all(&self, mut out: impl Write) {
        for entry in &self.lines {
            // Errors are ignored: there is no other place to report them.
            match entry {
                LogEntry::Line(line) => drop(out.write_all(&line)),
                LogEntry::Flush(held) => {
                    self.report_lost(&mut out);
                    drop(held);
                }
            }
            // Reports once the queue is empty: lines are lost only while it is full.
            if self.lines.is_empty() {
                self.report_lost(&mut out);
            }
        }
    }

    fn report_lost(&self, out: &mut impl Write) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(out, "rnicd: {lost} log lines were lost: stderr was not read in time");
        }
    }
}

/// Maximum bytes of a line. The rest is cut off.
const MAX_LINE: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that accepts bytes after a message from the test.
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
    fn unread_stderr_loses_lines_without_blocking() {
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
        let long = vec![b'x'; 2 * MAX_LINE];
        assert_eq!(lines.write(&long).ok(), Some(long.len()));
        drop(lines);
        let mut out = Vec::new();
        drain.write_all(&mut out);
        assert_eq!(out.len(), MAX_LINE + 4);
    }
}
