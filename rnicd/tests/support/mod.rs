//! A daemon in this process and a client that speaks the control socket by hand, so that nothing
//! the client library checks stands between a test and the daemon.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rnic_core::abi::control::HelloStatus;
use rnicd::config::Config;
use rnicd::exec::PrivateDaemon;
use rustix::process::{Gid, Uid};

#[path = "../../../tests/src/omit.rs"]
mod omit;
#[path = "../../../tests/src/raw.rs"]
mod raw;

#[allow(unused_imports, reason = "few of the tests measure")]
pub use omit::timing;

#[allow(unused_imports, reason = "not all of the tests ask for each of these")]
pub use raw::{Raw, memfd, qp_request, reg_mr};

/// A daemon with a configuration of the test's choice.
pub fn daemon(configuration: &str) -> PrivateDaemon {
    let config = Config::parse(Path::new("test.toml"), configuration).expect("configuration");
    PrivateDaemon::start(config).expect("daemon")
}

/// The user these tests run as.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A daemon with one worker and this configuration.
pub fn one_worker(configuration: &str) -> PrivateDaemon {
    daemon(&format!("[engine]\nworkers = 1\n{configuration}"))
}

/// A daemon that other users reach as well; none if this test cannot be other users.
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

/// Connects as another user: identities belong to threads, and a socket keeps the one it was
/// connected with.
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
