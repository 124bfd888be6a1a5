//! Log of a process with an unread standard error.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use rnicd::config::{Log as LogConfig, Seccomp};
use rnicd::log::Log;

#[test]
fn panic_ends_a_process_with_full_stderr() {
    let (_unread, mut stderr) = std::io::pipe().unwrap();
    // Fill the pipe.
    let capacity = rustix::pipe::fcntl_setpipe_size(&stderr, 4096).unwrap();
    stderr.write_all(&vec![b'x'; capacity]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "panics", "--nocapture"])
        .env("PANIC", "yes")
        .stdout(std::process::Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                panic!("the process waits for a reader of its stderr");
            }
            None => std::thread::yield_now(),
        }
    };
    // Exit code of the test runner after a caught panic.
    assert_eq!(status.code(), Some(101));
}

/// The other side of the test above, in a separate process.
#[test]
fn panics() {
    if std::env::var_os("PANIC").is_none() {
        return;
    }
    let (mut log, _) = Log::start(&LogConfig::default());
    log.start_writing(Seccomp::Enforce).unwrap();
    tracing::error!("a line");
    panic!("on purpose");
}
