//! A metrics file in the text format of Prometheus, for the textfile collector of node_exporter.
//! No port is opened.
//!
//! [`Page`] is the format; [`Writer`] is a thread that replaces the file. The control thread
//! renders pages and passes them to the writer, and skips pages if the disk is slow. A failed write
//! is logged at most every 10 minutes and has no other effect. The resource manager chooses the
//! metrics.

use std::fmt::{Display, Write as _};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::Seccomp;
use crate::log::RateLimitedLog;
use crate::privilege::{ThreadKind, spawn_confined};

/// Metric type of Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Goes up and down.
    Gauge,
    /// Only goes up, until the daemon restarts.
    Counter,
}

/// A page of metrics.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
}

impl Page {
    /// Begins a metric. Its samples follow. `help` is one line.
    pub fn metric(&mut self, name: &str, kind: MetricKind, help: &str) -> Metric<'_> {
        let kind = match kind {
            MetricKind::Gauge => "gauge",
            MetricKind::Counter => "counter",
        };
        // Writing to a string does not fail, here and below.
        let _ = writeln!(self.text, "# HELP rnicd_{name} {help}\n# TYPE rnicd_{name} {kind}");
        Metric { text: &mut self.text, name: name.to_owned() }
    }

    /// Returns the page in the text format of Prometheus.
    pub fn into_text(self) -> String {
        self.text
    }
}

/// A metric of a page.
pub struct Metric<'p> {
    text: &'p mut String,
    name: String,
}

impl Metric<'_> {
    /// Adds the value for these labels.
    pub fn sample(&mut self, labels: &[(&str, &dyn Display)], value: u64) -> &mut Self {
        let _ = write!(self.text, "rnicd_{}", self.name);
        for (n, (label, value)) in labels.iter().enumerate() {
            let before = if n == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{before}{label}=\"{}\"", escaped(&value.to_string()));
        }
        let after = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{after} {value}");
        self
    }
}

/// An order to the writer thread.
#[derive(Debug)]
enum Order {
    /// Replace files by these pages.
    Write(Vec<(PathBuf, String)>),
    /// Answer when all earlier pages are written.
    Flush(SyncSender<()>),
}

/// A thread that writes pages to files. The drop waits until all accepted pages are written,
/// because a process that ends during a write would leave a temporary file behind.
#[derive(Debug)]
pub struct Writer {
    /// `None` only during the drop.
    pages: Option<SyncSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread, with the control thread's rights: it opens and renames files.
    pub fn start(name: &'static str, seccomp: Seccomp) -> io::Result<Self> {
        let (pages, inbox) = sync_channel(1);
        let thread = spawn_confined(name, ThreadKind::Control, seccomp, move || {
            let mut log_limit = RateLimitedLog::new(1, LOG_EVERY);
            let written = inbox.into_iter().flat_map(|order| match order {
                Order::Write(pages) => pages,
                Order::Flush(done) => {
                    // The control thread waits, unless it has panicked.
                    let _ = done.send(());
                    Vec::new()
                }
            });
            for (path, page) in written {
                if let Err(error) = replace(&path, page.as_bytes())
                    && let Some(suppressed) = log_limit.count(Instant::now())
                {
                    let path = path.display();
                    tracing::warn!(%path, %error, suppressed, "cannot write metrics");
                }
            }
        })?;
        Ok(Writer { pages: Some(pages), thread: Some(thread) })
    }

    /// Queues pages that replace files. Returns false if earlier pages still wait.
    pub fn write(&self, pages: Vec<(PathBuf, String)>) -> bool {
        self.pages.as_ref().is_some_and(|writer| writer.try_send(Order::Write(pages)).is_ok())
    }

    /// Waits until all accepted pages are written.
    pub fn flush(&self) {
        let (done, written) = sync_channel(1);
        if self.pages.as_ref().is_some_and(|writer| writer.send(Order::Flush(done)).is_ok()) {
            // Fails if the thread has panicked: then it writes nothing any more.
            let _ = written.recv();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.pages = None;
        // A thread that has panicked writes nothing either.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Replaces a file atomically: readers see the old or the new content, never a part.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(".tmp");
    let temporary = path.with_file_name(hidden);
    let mut file = match make(&temporary) {
        // Left by a daemon that died, or a link of another user with write access to the folder.
        // Remove it, do not write to it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&temporary)?;
            make(&temporary)?
        }
        made => made?,
    };
    // The collector runs as another user, so the umask must not apply.
    let written = file
        .set_permissions(Permissions::from_mode(0o644))
        .and_then(|()| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Creates a new file. No other user may read it before it is complete.
fn make(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Minimum interval between log lines about failures.
const LOG_EVERY: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_in_the_text_format() {
        let mut page = Page::default();
        page.metric("sessions", MetricKind::Gauge, "Sessions.").sample(&[], 3);
        page.metric("objects", MetricKind::Counter, "Objects.")
            .sample(&[("uid", &1000), ("kind", &"qps")], 7)
            .sample(&[("uid", &"a\"b\\c\n"), ("kind", &"mrs")], 0);
        let expected = "# HELP rnicd_sessions Sessions.\n# TYPE rnicd_sessions gauge\n\
                        rnicd_sessions 3\n\
                        # HELP rnicd_objects Objects.\n# TYPE rnicd_objects counter\n\
                        rnicd_objects{uid=\"1000\",kind=\"qps\"} 7\n\
                        rnicd_objects{uid=\"a\\\"b\\\\c\\n\",kind=\"mrs\"} 0\n";
        assert_eq!(page.into_text(), expected);
    }

    #[test]
    fn file_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("rnicd.prom");
        for text in ["first and longer", "second"] {
            replace(&path, text.as_bytes()).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), Some(text));
        }
        assert_eq!(fs::read_dir(dir.path()).map(Iterator::count).ok(), Some(1));
        // A directory cannot be replaced by a file.
        let taken = dir.path().join("taken");
        fs::create_dir(&taken).unwrap_or_else(|e| panic!("{e}"));
        assert!(replace(&taken, b"x").is_err());
        assert!(replace(&dir.path().join("no/such/folder"), b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).map(Iterator::count).ok(), Some(2));
    }

    /// The page is long enough that a drop without waiting would fail.
    #[test]
    fn drop_waits_for_accepted_pages() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("rnicd.prom");
        let page = "0123456789abcde\n".repeat(4 << 20);
        let writer = Writer::start("writer", Seccomp::Off).unwrap_or_else(|e| panic!("{e}"));
        assert!(writer.write(vec![(path.clone(), page.clone())]));
        drop(writer);
        assert!(fs::read_to_string(&path).is_ok_and(|text| text == page));
        assert_eq!(fs::read_dir(dir.path()).map(Iterator::count).ok(), Some(1));
    }

    /// The page is long, and is read at arbitrary times.
    #[test]
    fn reader_never_sees_a_partial_page() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("rnicd.prom");
        let page = |n: usize| format!("{n:03}").repeat(100_000);
        let write = |n| replace(&path, page(n).as_bytes()).unwrap_or_else(|e| panic!("{e}"));
        write(0);
        let done = std::sync::atomic::AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{e}"));
                    let n = text.get(..3).and_then(|n| n.parse().ok());
                    assert!(n.is_some_and(|n| text == page(n)), "a part of a page");
                    seen += 1;
                }
                seen
            });
            let mut n = 0;
            while n < 100 && !reader.is_finished() {
                n += 1;
                write(n);
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            reader.join().unwrap_or_else(|_| panic!("the reader panicked"))
        });
        assert!(seen > 0);
    }

    #[test]
    fn other_users_can_read_the_file() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("rnicd.prom");
        replace(&path, b"x").unwrap_or_else(|e| panic!("{e}"));
        let mode = fs::metadata(&path).map(|m| m.permissions().mode() & 0o7777).ok();
        assert_eq!(mode, Some(0o644));
    }

    #[test]
    fn temporary_file_is_never_followed() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let at = |name: &str| dir.path().join(name);
        let path = at("rnicd.prom");
        let temporary = at(".rnicd.prom.tmp");
        fs::write(at("secret"), "kept").unwrap_or_else(|e| panic!("{e}"));
        let links: [fn(&Path, &Path) -> io::Result<()>; 2] =
            [|from, to| std::os::unix::fs::symlink(from, to), |from, to| fs::hard_link(from, to)];
        for link in links {
            link(&at("secret"), &temporary).unwrap_or_else(|e| panic!("{e}"));
            replace(&path, b"new").unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(fs::read_to_string(at("secret")).ok().as_deref(), Some("kept"));
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), Some("new"));
            assert!(fs::symlink_metadata(&path).is_ok_and(|m| m.is_file()));
        }
        // A folder cannot be removed. It stays, and nothing is written.
        fs::create_dir(&temporary).unwrap_or_else(|e| panic!("{e}"));
        assert!(replace(&path, b"x").is_err());
        assert_eq!(fs::read_to_string(&path).ok().as_deref(), Some("new"));
    }
}
