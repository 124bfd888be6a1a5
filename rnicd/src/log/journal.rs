//! Priorities of lines for systemd's journal.
//!
//! If the standard error of a service is a stream of the journal, each line may begin with a
//! priority in angle brackets (`sd-daemon(3)`), which the journal removes. For other streams lines
//! stay as they are.

use std::io::{self, Write};

use rustix::fs::fstat;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use super::queue::Queue;

/// Creates the writer of each line.
pub(super) struct Lines {
    queue: Queue,
    to_journal: bool,
}

impl Lines {
    pub(super) fn new(queue: Queue) -> Self {
        Lines { queue, to_journal: is_journal() }
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { queue: self.queue.clone(), priority: None }
    }

    fn make_writer_for(&'a self, line: &Metadata<'_>) -> Line {
        let priority = self.to_journal.then(|| priority_of(*line.level()));
        Line { queue: self.queue.clone(), priority }
    }
}

/// Queues a line, with its priority if it has one.
pub(super) struct Line {
    queue: Queue,
    priority: Option<u8>,
}

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match self.priority {
            Some(priority) => self.queue.write(&with_priority(line, priority))?,
            None => self.queue.write(line)?,
        };
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the text of an error for standard error, with a priority for the journal.
pub fn error_text(text: &str) -> String {
    if is_journal() {
        let text = with_priority(text.as_bytes(), priority_of(Level::ERROR));
        String::from_utf8_lossy(&text).into_owned()
    } else {
        text.to_owned()
    }
}

/// Returns true if standard error is the stream of `JOURNAL_STREAM`, by device and inode. A process
/// may have inherited the variable together with a different standard error.
fn is_journal() -> bool {
    let Ok(named) = std::env::var("JOURNAL_STREAM") else { return false };
    fstat(io::stderr()).is_ok_and(|found| names(&named, found.st_dev, found.st_ino))
}

fn names(stream: &str, device: u64, inode: u64) -> bool {
    stream.split_once(':').is_some_and(|(d, i)| d.parse() == Ok(device) && i.parse() == Ok(inode))
}

/// Priority of `syslog(3)`.
fn priority_of(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Puts the priority before each line of a text, because the journal reads individual lines.
fn with_priority(text: &[u8], priority: u8) -> Vec<u8> {
    let prefix = format!("<{priority}>");
    let lines = text.split_inclusive(|byte| *byte == b'\n');
    lines.flat_map(|line| [prefix.as_bytes(), line].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_priority() {
        assert_eq!(with_priority(b"one\ntwo\n", 4), b"<4>one\n<4>two\n");
        assert_eq!(with_priority(b"", 3), b"");
        let all = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        assert_eq!(all.map(priority_of), [3, 4, 6, 7, 7]);
    }

    #[test]
    fn only_the_named_stream_is_the_journal() {
        assert!(names("7:99", 7, 99));
        for other in ["7:98", "8:99", "7", "", "7:99:1", "x:99"] {
            assert!(!names(other, 7, 99), "{other}");
        }
    }
}
