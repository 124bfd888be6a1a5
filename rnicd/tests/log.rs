//! The log of a process whose stderr nobody reads.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use rnicd::config::{Log as LogConfig, Seccomp};
use rnicd::log::Log;

#[test]
fn a_panic_ends_a_process_whose_stderr_nobody_reads() {
    let (_unread, mut stderr) = std::io::pipe().unwrap();
    // As full as it gets.
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
                panic!("it waits for somebody to read its last words");
            }
            None => std::thread::yield_now(),
        }
    };
    // What the test runner makes of a panic that it has caught.
    assert_eq!(status.code(), Some(101));
}

/// The other half of the test above, in a process of its own.
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
