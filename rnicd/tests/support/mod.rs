//! A daemon in this process and a raw client of its control socket, which has none of the checks of
//! the client library.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{Event, HelloStatus, MAX_MESSAGE};
use rnicd::config::Config;
use rnicd::exec::PrivateDaemon;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;
use rustix::process::{Gid, Uid};

#[path = "../../../tests/src/omit.rs"]
mod omit;
#[path = "../../../tests/src/raw.rs"]
mod raw;

#[allow(unused_imports, reason = "few tests measure time")]
pub use omit::timing;

#[allow(unused_imports, reason = "not every test uses all of these")]
pub use raw::{Raw, memfd, qp_request, reg_mr};

/// Starts a daemon with this configuration.
pub fn daemon(configuration: &str) -> PrivateDaemon {
    let config = Config::parse(Path::new("test.toml"), configuration).expect("configuration");
    PrivateDaemon::start(config).expect("daemon")
}

/// Returns the next event of a session, if one arrives within this time.
pub fn event_within(raw: &Raw, time: Duration) -> Option<Event> {
    let socket = &raw.descriptors[1];
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let mut ready = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    if rustix::event::poll(&mut ready, Some(&time)).unwrap() == 0 {
        return None;
    }
    let mut bytes = vec![0; MAX_MESSAGE];
    let (_, n) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).unwrap();
    Some(postcard::from_bytes(&bytes[..n]).unwrap())
}

/// Returns the next event of a session.
pub fn event(raw: &Raw) -> Event {
    event_within(raw, Duration::from_secs(180)).expect("an event")
}

/// Waits until `condition` returns true.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout: {what}");
        std::thread::yield_now();
    }
}

/// Returns the user id of the tests.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Starts a daemon with one worker and this configuration.
pub fn one_worker(configuration: &str) -> PrivateDaemon {
    daemon(&format!("[engine]\nworkers = 1\n{configuration}"))
}

/// Starts a daemon that other users can reach. Returns `None` unless the test runs as root.
pub fn for_others(configuration: &str) -> Option<PrivateDaemon> {
    if uid() != 0 {
        omit::omit("only root can be several users");
        return None;
    }
    let daemon = one_worker(&format!("{configuration}[control]\nmode = \"0666\"\n"));
    let folder = daemon.socket().parent().unwrap().to_owned();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(daemon)
}

/// Connects as another user: IDs belong to threads, and a socket keeps those of its connect.
pub fn connect_as(socket: &Path, user: u32, groups: &[u32]) -> Raw {
    std::thread::scope(|scope| {
        let connect = || {
            let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
            rustix::thread::set_thread_groups(&groups).unwrap();
            rustix::thread::set_thread_uid(Uid::from_raw(user)).unwrap();
            Raw::connect(socket)
        };
        scope.spawn(connect).join().unwrap()
    })
}

pub fn open_as(socket: &Path, user: u32, groups: &[u32]) -> Raw {
    let mut raw = connect_as(socket, user, groups);
    assert_eq!(raw.hello().unwrap().0.status, HelloStatus::Ok as u32);
    raw
}
