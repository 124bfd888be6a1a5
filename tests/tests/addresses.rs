//! Addresses of the host that appear and disappear while the daemon runs, in a network namespace.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Instant;

use rnic_client::{Context, Event, Gid, GidRow};
use rnic_tests::{DEADLINE, Process, built, omit};
use tempfile::TempDir;

/// A daemon in a network namespace with a loopback interface and one other interface.
struct Host {
    dir: TempDir,
    daemon: Process,
    context: Context,
}

impl Host {
    fn new() -> Option<Host> {
        let dir = TempDir::with_prefix("rnic-addresses-").unwrap();
        let script = "ip link set lo up && ip link add eth type veth peer name far && \
                      ip link set eth up && ip link set far up && \
                      ip addr add 10.78.0.1/24 dev eth && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", script, "sh", "true"]);
        if !command.output().is_ok_and(|output| output.status.success()) {
            omit("network namespaces with interfaces require root");
            return None;
        }
        let mut command = Command::new("unshare");
        command.args([
            "--net",
            "sh",
            "-c",
            script,
            "sh",
            &built::program("rnicd"),
            "run",
            "--socket",
        ]);
        command.arg(dir.path().join("rnicd.sock"));
        let mut daemon = Process::start(command);
        daemon.line_after("listening");
        let context = Context::open_at(dir.path().join("rnicd.sock")).unwrap();
        Some(Host { dir, daemon, context })
    }

    /// Runs `ip addr` in the daemon's namespace.
    fn ip_addr(&self, arguments: &[&str]) {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.daemon.id()));
        let output = command.args(["ip", "addr"]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Waits for changes of the GID table until `is_expected` returns true.
    fn gids(&self, is_expected: impl Fn(&[GidRow]) -> bool) -> Vec<GidRow> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let event = self.context.next_event(Some(deadline - Instant::now())).unwrap();
            assert!(matches!(event, Some(Event::GidsChanged)), "{event:?}");
            let gids = self.context.gids().unwrap();
            if is_expected(&gids) {
                return gids;
            }
        }
    }

    /// Waits until a file of the device tree contains this text.
    fn shows(&self, file: &str, text: &str) {
        let path = self.dir.path().join("rnicd.sock.tree/class/infiniband/rnicd1/ports/1");
        let deadline = Instant::now() + DEADLINE;
        loop {
            let found = std::fs::read_to_string(path.join(file)).unwrap_or_default();
            if found.trim() == text {
                return;
            }
            assert!(Instant::now() < deadline, "{file}: {found:?} instead of {text:?}");
            std::thread::yield_now();
        }
    }
}

fn gid(address: &str) -> Gid {
    Gid::from(address.parse::<IpAddr>().unwrap())
}

fn index_of(gids: &[GidRow], address: &str) -> Option<usize> {
    gids.iter().position(|row| row.gid == gid(address))
}

#[test]
fn gids_follow_addresses_and_keep_their_index() {
    let Some(host) = Host::new() else { return };
    let before = host.context.gids().unwrap();
    let first = index_of(&before, "10.78.0.1").unwrap();
    host.ip_addr(&["add", "10.78.0.2/24", "dev", "eth"]);
    let gids = host.gids(|gids| index_of(gids, "10.78.0.2").is_some());
    assert_eq!(gids[..before.len()], before);
    let second = index_of(&gids, "10.78.0.2").unwrap();
    assert_eq!(gids[second].interface, "eth");
    host.shows(&format!("gids/{second}"), "0000:0000:0000:0000:0000:ffff:0a4e:0002");
    host.shows(&format!("gid_attrs/ndevs/{second}"), "eth");
    // The daemon also listens on the new address, at `wired.port`.
    let status = host.context.status().unwrap();
    assert_eq!((&*status.wired_port_problem, status.gids as usize), ("", gids.len()));
    let at = SocketAddr::new("10.78.0.2".parse().unwrap(), status.wired_port);
    let mut sockets = Command::new("nsenter");
    sockets.arg(format!("--net=/proc/{}/ns/net", host.daemon.id()));
    sockets.args(["cat", "/proc/net/udp"]);
    let table = String::from_utf8(sockets.output().unwrap().stdout).unwrap();
    assert!(table.contains(&format!("02004E0A:{:04X}", at.port())), "{table}");

    // The deleted address leaves an empty entry, which the next address takes.
    host.ip_addr(&["del", "10.78.0.1/24", "dev", "eth"]);
    let gids = host.gids(|gids| index_of(gids, "10.78.0.1").is_none());
    assert!(gids[first].gid.is_zero());
    // The kernel deletes secondary addresses with their primary one.
    host.ip_addr(&["add", "10.79.0.3/24", "dev", "eth"]);
    let gids = host.gids(|gids| index_of(gids, "10.79.0.3").is_some());
    assert!([first, second].contains(&index_of(&gids, "10.79.0.3").unwrap()));
    host.daemon.signal(rustix::process::Signal::TERM);
    let Host { daemon, dir, context } = host;
    drop(context);
    daemon.succeed();
    // The daemon has also removed the files of the added addresses.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
