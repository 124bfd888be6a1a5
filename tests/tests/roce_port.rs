//! `wired.port`: a daemon binds it at start or later, accepts its sockets from a service manager,
//! and without it refuses peers on other hosts.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

use rnic_client::{Access, Context, Error, Gid, ListKind, Qp, QpId, QpState, QpType, Rows, Wiring};
use rnic_tests::client::Client;
use rnic_tests::{Daemon, Process, built, ports};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// Address of the daemon, and an address that it treats as another host's.
const HERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 31);
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 32);

/// Another address of the daemon.
const ALSO: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 33);

fn config(port: u16) -> String {
    format!("[device]\naddresses = [\"{HERE}\"]\n[wired]\nport = {port}\n")
}

/// Moves a QP to RTR with a peer at this address.
fn to_rtr(qp: &Qp, peer: Ipv4Addr) -> Result<(), Error> {
    let gid = |address: Ipv4Addr| Gid::from(IpAddr::from(address));
    qp.to_rtr(&Wiring {
        local: gid(HERE),
        remote: gid(peer),
        remote_qp: QpId(7777),
        rq_psn: 7,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 4,
        rights: Access::REMOTE_WRITE,
    })
}

/// Returns the output of `rnicctl` or `rnic-run --check`.
fn printed(program: &str, daemon: &Daemon, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn port_is_bound_before_the_first_client() {
    let port = ports::unused_port();
    let daemon = Daemon::start(&config(port));
    let at = SocketAddr::from((HERE, port));
    assert!(TcpListener::bind(at).is_err() && UdpSocket::bind(at).is_err());
    let status = daemon.status();
    assert_eq!((status.wired_port, &*status.wired_port_problem), (port, ""));
}

#[test]
fn taken_port_is_named_and_retried() {
    let port = ports::unused_port();
    let other = TcpListener::bind((HERE, port)).unwrap();
    let daemon = Daemon::start(&config(port));
    let client = Client::new(&daemon);
    let qp = client.qp_of(QpType::Rc);
    let refused = to_rtr(&qp, ELSEWHERE).unwrap_err().to_string();
    assert!(refused.contains(&format!("port {port} (wired.port)")), "{refused}");
    assert!(refused.contains("in use"), "{refused}");
    assert_eq!(qp.query().unwrap().state, QpState::Idle);
    // A peer at a GID of this host needs no port.
    let near = client.qp_of(QpType::Rc);
    to_rtr(&near, HERE).unwrap();
    let status = daemon.status();
    assert!(status.wired_port_problem.contains("in use"), "{status:?}");
    let ctl = built::program("rnicctl");
    let said = printed(&ctl, &daemon, &["status"]);
    assert!(said.contains(&format!("{port}: bind {HERE}:{port}")), "{said}");
    assert!(printed(&ctl, &daemon, &["why"]).contains("wired.port"), "why");
    let said = printed(&built::program("rnic-run"), &daemon, &["--check"]);
    assert!(said.contains("wired.port") && said.contains("in use"), "{said}");
    let Rows::Events(rows) = client.context.list(ListKind::Events, 0).unwrap().rows else {
        panic!("no events")
    };
    assert!(rows.iter().any(|row| row.text.contains("wired.port")), "{rows:?}");
    // The daemon tries again before it refuses a peer on another host, and also periodically.
    drop(other);
    to_rtr(&qp, ELSEWHERE).unwrap();
    assert_eq!(daemon.status().wired_port_problem, "");
}

#[test]
fn a_port_that_becomes_free_is_bound() {
    let port = ports::unused_port();
    let others = (TcpListener::bind((HERE, port)).unwrap(), UdpSocket::bind((HERE, port)).unwrap());
    let daemon = Daemon::start(&config(port));
    assert!(!daemon.status().wired_port_problem.is_empty());
    drop(others);
    daemon.wait_status("in possession of the port", |status| status.wired_port_problem.is_empty());
    assert!(UdpSocket::bind((HERE, port)).is_err());
}

/// Creates a socket to serve clients on.
fn control_socket(path: &Path) -> OwnedFd {
    let control = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&control, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&control, 16).unwrap();
    control
}

/// Returns a command that starts a daemon with these sockets, as a service manager would. Their
/// order does not matter, because the daemon recognizes each by its type and address.
fn with_sockets(config: &Path, [first, second]: [OwnedFd; 2]) -> Command {
    let script = "exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_FDS=2 LISTEN_PID=$$ \
                  exec \"$0\" run --config \"$1\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, &built::program("rnicd")]).arg(config);
    command.stdin(Stdio::from(first)).stdout(Stdio::from(second));
    command
}

#[test]
fn passed_socket_leaves_no_other_gid_open() {
    let port = ports::unused_port();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rnicd.sock");
    let file = dir.path().join("rnicd.toml");
    let text = config(port).replace(&format!("\"{HERE}\""), &format!("\"{HERE}\", \"{ALSO}\""));
    std::fs::write(&file, text).unwrap();
    let listener = TcpListener::bind((HERE, port)).unwrap();
    let passed = [listener.into(), control_socket(&path)];
    let mut child = with_sockets(&file, passed).stderr(Stdio::null()).spawn().unwrap();
    let status = Context::open_at(&path).unwrap().status().unwrap();
    assert_eq!(status.wired_port_problem, "");
    // Otherwise another program with the port could confirm requests for QPs at that GID.
    assert!(TcpListener::bind((ALSO, port)).is_err());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn passed_sockets_replace_binding() {
    let port = ports::unused_port();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rnicd.sock");
    std::fs::write(dir.path().join("rnicd.toml"), config(port)).unwrap();
    let control = control_socket(&path);
    // The test keeps these sockets open, so that the daemon cannot bind the port itself.
    let listener = TcpListener::bind((HERE, port)).unwrap();
    let datagrams = UdpSocket::bind((HERE, port)).unwrap();
    let start = |passed| with_sockets(&dir.path().join("rnicd.toml"), passed);
    let passed = [listener.try_clone().unwrap().into(), control.try_clone().unwrap()];
    let mut child = start(passed).stderr(Stdio::null()).spawn().unwrap();
    let status = Context::open_at(&path).unwrap().status().unwrap();
    // No UDP socket was passed, and this test holds that port.
    assert!(status.wired_port_problem.contains("bind UDP"), "{status:?}");
    drop(datagrams);
    child.kill().unwrap();
    child.wait().unwrap();
    // A socket bound to another port is a configuration error.
    let wrong = TcpListener::bind((HERE, 0)).unwrap();
    let output = start([wrong.into(), control]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let expected = format!("but wired.port = {port}");
    assert!(!output.status.success() && said.contains(&expected), "{said}");
}

#[test]
fn private_daemons_leave_the_port() {
    let port = ports::unused_port();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rnicd.toml");
    std::fs::write(&file, config(port)).unwrap();
    let _other = TcpListener::bind((HERE, port)).unwrap();
    let mut command = Command::new(built::program("rnicd"));
    command.args(["exec", "--config"]).arg(&file).arg("--");
    command.args([&built::program("rnicctl"), "status"]);
    let lines = Process::start(command).succeed();
    let of_port = lines.iter().find(|line| line.contains("wired port")).expect("the port's line");
    assert!(of_port.trim().ends_with(&port.to_string()), "{of_port}");
}
