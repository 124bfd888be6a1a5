//! The daemon as a service: what a service manager does to it and is told by it, what it gives up,
//! and what is left of its privileges.
//!
//! There is no systemd here (`systemd.rs` has one). `config/rnicd.service` and
//! `config/rnicd.socket` are read for what they claim, and the same is done with `unshare`,
//! `setpriv` and filters of system calls (`unit`). What takes root is left out without it, and
//! said.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{Context, ListKind, Rows};
use rnic_tests::unit::{self, How, Sandbox};
use rnic_tests::{DEADLINE, Process, binaries, copy_files};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Resource, Signal, WaitOptions, getrlimit, kill_process, waitpid};

/// Users and groups that have no entry anywhere.
const DAEMON: u32 = 65_533;
const CLIENT: u32 = 65_532;
const STRANGER: u32 = 65_531;
const GROUP: u32 = 65_530;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Says why a test does nothing.
fn needs_root(what: &str) -> bool {
    if !is_root() {
        rnic_tests::omit(&format!("{what} takes root"));
    }
    is_root()
}

/// A folder that everybody may enter, with the binaries in it: a checkout may be out of reach of
/// other users.
struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        copy_files(binaries!().rnicd, &dir.path().join("rnicd"));
        copy_files(binaries!().actor, &dir.path().join("actor"));
        std::fs::create_dir(dir.path().join("run")).unwrap();
        Stage { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn socket(&self) -> PathBuf {
        self.path("run/rnicd.sock")
    }

    fn config(&self, text: &str) -> PathBuf {
        let path = self.path("rnicd.toml");
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Two processes of this user that exchange every operation; whether they could.
    fn duet(&self, user: u32, groups: &str) -> bool {
        let mut command = match is_root() {
            true => as_user(user, groups, &self.path("actor")),
            false => Command::new(self.path("actor")),
        };
        command.arg("duet").env("RNIC_SOCKET", self.socket());
        Process::start(command).finish().0.success()
    }
}

fn as_user(user: u32, groups: &str, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={user}")).arg(format!("--regid={user}"));
    command.arg(match groups {
        "" => "--clear-groups".to_owned(),
        groups => format!("--groups={groups}"),
    });
    command.arg(program);
    command
}

/// A daemon without the harness's pipes. Killed if the test fails.
struct Service(Child);

impl Service {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn status(&self) -> HashMap<String, String> {
        status(&PathBuf::from(format!("/proc/{}/status", self.0.id())))
    }

    /// Waits for the end; its exit code.
    fn ends(&mut self) -> Option<i32> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some((_, status)) = waitpid(Some(self.pid()), WaitOptions::NOHANG).unwrap() {
                return status.exit_status();
            }
            assert!(Instant::now() < deadline, "still running at the deadline");
            std::thread::yield_now();
        }
    }

    fn terminate(&mut self) -> Option<i32> {
        kill_process(self.pid(), Signal::TERM).unwrap();
        self.ends()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Fails if it has ended, as it should have.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The fields of a `status` file of `/proc`.
fn status(file: &Path) -> HashMap<String, String> {
    let text = std::fs::read_to_string(file).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields
        .map(|(k, v)| (k.to_owned(), v.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect()
}

/// Insists that every thread is confined and none has a capability or a way to one; their names.
fn threads_are_confined(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut names = Vec::new();
    for task in tasks {
        let fields = status(&task.unwrap().path().join("status"));
        for (field, expected) in [
            ("Seccomp", "2"),
            ("NoNewPrivs", "1"),
            ("CapInh", NONE),
            ("CapPrm", NONE),
            ("CapEff", NONE),
            ("CapAmb", NONE),
        ] {
            assert_eq!(fields[field], expected, "{field} of {}", fields["Name"]);
        }
        names.push(fields["Name"].clone());
    }
    names.sort();
    names
}

/// Real, effective, saved and file system id.
fn four_times(id: u32) -> String {
    format!("{id} {id} {id} {id}")
}

const NONE: &str = "0000000000000000";

/// A service manager's end of the notifications.
struct Manager {
    socket: UnixDatagram,
    name: String,
}

impl Manager {
    fn new(stage: &Stage) -> Manager {
        let name = format!("rnicd-test-{}", stage.dir.path().display());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Manager { socket, name: format!("@{name}") }
    }

    /// The next message, which must begin like this.
    fn hears(&self, expected: &str) {
        let mut buffer = [0; 512];
        let len = self.socket.recv(&mut buffer).expect("a notification");
        let said = String::from_utf8_lossy(&buffer[..len]);
        assert!(said.starts_with(expected), "{said:?} instead of {expected:?}");
    }

    /// Insists that nothing more was said.
    fn hears_nothing(&self) {
        self.socket.set_nonblocking(true).unwrap();
        assert!(self.socket.recv(&mut [0; 512]).is_err());
    }
}

/// A listening socket as `rnicd.socket` would have it.
fn activated(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 128).unwrap();
    socket
}

/// Whether this root may mount something in a name space of its own; some containers forbid it.
fn may_mount(folder: &Path) -> bool {
    let mut command = Command::new("unshare");
    command.args(["--mount", "mount", "--bind"]).args([folder, folder]);
    command.output().is_ok_and(|output| output.status.success())
}

const SERVICE: &str = include_str!("../../config/rnicd.service");
const SOCKET: &str = include_str!("../../config/rnicd.socket");
const PORT_SOCKET: &str = include_str!("../../config/rnicd-port.socket");

/// Whether a unit says this, and nothing else about it.
fn says(key: &str, value: &str) {
    let all = unit::directives(SERVICE, "Service");
    let values: Vec<&str> = all.iter().filter(|(k, _)| *k == key).map(|(_, v)| *v).collect();
    assert_eq!(values, [value], "{key}");
}

#[test]
fn it_serves_under_the_restrictions_of_its_unit() {
    says("Type", "notify");
    says("User", "rnicd");
    let passed: HashMap<&str, &str> = unit::directives(SOCKET, "Socket").into_iter().collect();
    let sandbox = Sandbox::of(SERVICE);
    let stage = Stage::new();
    copy_files(env!("CARGO_BIN_EXE_confine"), &stage.path("confine"));
    let manager = Manager::new(&stage);
    let socket = activated(&stage.socket(), SocketType::SEQPACKET);
    let mode = u32::from_str_radix(passed["SocketMode"], 8).unwrap();
    std::fs::set_permissions(stage.socket(), Permissions::from_mode(mode)).unwrap();
    let figures = stage.path("run/rnicd.prom");
    let metrics = format!("[metrics]\nfile = {:?}\n", figures.to_str().unwrap());
    let config = stage.config(&format!("[engine]\nworkers = 2\n{metrics}"));

    let mounts = is_root() && may_mount(&stage.path("run"));
    if !mounts {
        rnic_tests::omit("private and read-only folders take root, and a container that mounts");
    }
    if is_root() {
        chown(stage.socket(), None, Some(GROUP)).unwrap();
        chown(stage.path("run"), Some(DAEMON), None).unwrap();
    } else {
        rnic_tests::omit("another user and an empty bounding set take root");
    }
    if unit::call_groups().is_empty() {
        rnic_tests::omit("what @system-service allows, systemd-analyze must say");
    }
    let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let user = is_root().then_some(DAEMON);
    let confine = stage.path("confine");
    let how = How { folder: stage.dir.path(), confine: &confine, mounts, user, descriptors };
    let mut command = sandbox.command(&how);
    command.arg(stage.path("rnicd")).args(["run", "--config"]).arg(&config);
    command.env("NOTIFY_SOCKET", &manager.name).stdin(Stdio::from(socket));
    let mut daemon = Service(command.spawn().unwrap());
    manager.hears("READY=1\nSTATUS=serving\n");

    let names = threads_are_confined(daemon.0.id());
    assert!(names.iter().filter(|n| n.starts_with("rnicd-worker")).count() == 2, "{names:?}");
    let fields = daemon.status();
    // The unit's and the thread's own.
    assert_eq!(fields["Seccomp_filters"], (sandbox.filters() + 1).to_string());
    assert_eq!(fields["Umask"], "0077");
    if is_root() {
        assert_eq!(fields["CapBnd"], NONE);
        assert_eq!(fields["Uid"], four_times(DAEMON));
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.0.id())).unwrap();
        let core = limits.lines().find(|l| l.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
        assert!(!stage.duet(STRANGER, ""), "somebody outside the group was served");
    }
    if mounts {
        let mounts = std::fs::read_to_string(format!("/proc/{}/mounts", daemon.0.id())).unwrap();
        let last = |at: &str| mounts.lines().rfind(|l| l.split(' ').nth(1) == Some(at)).unwrap();
        for (at, how) in [("/", "ro"), ("/dev", "ro"), ("/root", "ro"), ("/tmp", "rw")] {
            let found = last(at);
            assert!(found.split(' ').nth(3).unwrap().starts_with(how), "{found}");
        }
        assert!(last("/proc").contains("subset=pid"));
    }
    assert!(stage.duet(CLIENT, &GROUP.to_string()));
    // Interfaces are read by netlink.
    let status = Context::open_at(stage.socket()).unwrap().status().unwrap();
    assert!(status.gids > 0, "{}", status.gids_problem);
    assert_eq!(status.gids_problem, "");
    // Whatever the umask: a collector is another user.
    let readable = || std::fs::metadata(&figures).is_ok_and(|m| m.mode() & 0o7777 == 0o644);
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    manager.hears("RELOADING=1\nMONOTONIC_USEC=");
    manager.hears("READY=1\nSTATUS=serving\n");
    until("a page of figures that all may read", readable);

    // As its commands do: what is wrong does not get as far as the signal.
    let commands: Vec<&str> = unit::directives(SERVICE, "Service")
        .into_iter()
        .filter_map(|(key, value)| (key == "ExecReload").then_some(value))
        .collect();
    let [check, "/bin/kill -HUP $MAINPID"] = commands[..] else { panic!("{commands:?}") };
    let check = check.strip_prefix("/usr/bin/rnicd ").unwrap();
    let check = check.replace("/etc/rnicd/rnicd.toml", config.to_str().unwrap());
    let reload_check = || {
        let mut command = Command::new(stage.path("rnicd"));
        command.args(check.split(' ')).output().unwrap()
    };
    let right = reload_check();
    assert_eq!((right.status.code(), right.stdout), (Some(0), vec![]));
    stage.config("[engine]\nworkers = \"many\"\n");
    let wrong = reload_check();
    let said = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(78), "{said}");
    assert!(said.contains("engine.workers"), "{said}");
    // Who sends the signal all the same is told what came of it.
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    manager.hears("RELOADING=1\nMONOTONIC_USEC=");
    manager.hears("READY=1\nSTATUS=serving; configuration not reloaded, the old one stays: ");

    assert_eq!(daemon.terminate(), Some(0));
    manager.hears("STOPPING=1\n");
    manager.hears_nothing();
    assert!(stage.socket().exists(), "the socket is the service manager's");
    std::fs::remove_file(figures).unwrap();
    assert_eq!(std::fs::read_dir(stage.path("run")).unwrap().count(), 1, "nothing else was left");
}

#[test]
#[should_panic(expected = "PrivateUsers=yes of rnicd.service is neither applied nor argued")]
fn a_directive_that_is_not_known_fails_the_test() {
    Sandbox::of(&SERVICE.replace("RemoveIPC=yes", "PrivateUsers=yes"));
}

/// systemd's own opinion, where there is one.
#[test]
fn the_units_are_what_systemd_takes() {
    let stage = Stage::new();
    let rnicd = stage.path("rnicd");
    let service = SERVICE.replace("/usr/bin/rnicd", rnicd.to_str().unwrap());
    std::fs::write(stage.path("rnicd.service"), service).unwrap();
    std::fs::write(stage.path("rnicd.socket"), SOCKET).unwrap();
    std::fs::write(stage.path("rnicd-port.socket"), PORT_SOCKET).unwrap();
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]).arg(stage.path("rnicd.service"));
    let Ok(output) = command.output() else {
        rnic_tests::omit("what systemd says of the units, systemd-analyze must say");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    // It may know less than the unit's systemd, and more of this machine than matters here.
    let about: Vec<&str> = said.lines().filter(|line| line.contains("rnicd.")).collect();
    assert!(output.status.success() && about.is_empty(), "{said}");
}

/// A service manager does not start again what would fail again.
#[test]
fn a_wrong_configuration_has_an_exit_code_of_its_own() {
    says("RestartPreventExitStatus", "78");
    let stage = Stage::new();
    let run = |config: &Path| {
        let mut command = Command::new(stage.path("rnicd"));
        command.args(["run", "--config"]).arg(config).arg("--socket").arg(stage.socket());
        command.output().unwrap()
    };
    for (text, expected) in [
        ("[engine]\nworkers = \"many\"\n", "engine.workers"),
        ("[control]\ngroup = \"no-such-group\"\n", "no-such-group"),
    ] {
        let output = run(&stage.config(text));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    // What may pass is worth another try.
    std::fs::write(stage.socket(), "in the way").unwrap();
    assert_eq!(run(&stage.config("")).status.code(), Some(1));
}

#[test]
fn a_watchdog_hears_that_it_is_alive() {
    let seconds: u64 = unit::directives(SERVICE, "Service")
        .iter()
        .find_map(|(key, value)| (*key == "WatchdogSec").then(|| value.strip_suffix('s')))
        .flatten()
        .and_then(|n| n.parse().ok())
        .unwrap();
    assert!((10..=120).contains(&seconds));
    let stage = Stage::new();
    let manager = Manager::new(&stage);
    let mut command = Command::new(stage.path("rnicd"));
    command.args(["run", "--socket"]).arg(stage.socket());
    command.env("NOTIFY_SOCKET", &manager.name).env("WATCHDOG_USEC", "200000");
    // Before the start: this process may read the first messages late.
    let from = Instant::now();
    let mut daemon = Service(command.spawn().unwrap());
    manager.hears("READY=1\n");
    for _ in 0..4 {
        manager.hears("WATCHDOG=1\n");
    }
    // One at once, and then one each half of the time.
    assert!(from.elapsed() >= Duration::from_millis(300), "{:?}", from.elapsed());
    assert_eq!(daemon.terminate(), Some(0));
}

/// Of such a client the kernel tells no process number.
#[test]
fn clients_outside_of_its_pid_namespace_are_served() {
    if !needs_root("a pid namespace") {
        return;
    }
    let stage = Stage::new();
    let manager = Manager::new(&stage);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child=TERM", "--mount-proc"]);
    command.arg(stage.path("rnicd")).args(["run", "--socket"]).arg(stage.socket());
    command.env("NOTIFY_SOCKET", &manager.name);
    let daemon = Service(command.spawn().unwrap());
    manager.hears("READY=1\n");
    let context = Context::open_at(stage.socket()).unwrap();
    assert!(context.status().unwrap().sessions >= 1);
    let Rows::Clients(rows) = context.list(ListKind::Clients, 0).unwrap().rows else {
        panic!("no clients")
    };
    assert_eq!((rows[0].pid, rows[0].uid), (0, 0));
    drop(context);
    // Its death is noticed all the same, whoever holds its socket.
    assert!(stage.duet(0, ""));
    drop(daemon);
}

/// Waits for something that is about to be so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} at the deadline");
        std::thread::yield_now();
    }
}

#[test]
fn sockets_that_it_cannot_serve_are_refused_by_name() {
    let stage = Stage::new();
    let tries = [
        (SocketType::STREAM, None, "SOCK_SEQPACKET"),
        (SocketType::SEQPACKET, Some("/elsewhere"), "--socket = /elsewhere"),
    ];
    for (kind, path, expected) in tries {
        let socket = activated(&stage.socket(), kind);
        let script = "exec 3<&0; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" run \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(stage.path("rnicd")).stdin(Stdio::from(socket));
        command.args(path.map(|p| ["--socket", p]).into_iter().flatten());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("socket activation:") && said.contains(expected), "{said}");
        std::fs::remove_file(stage.socket()).unwrap();
    }
}

/// Whatever its variables say: it must not serve, nor close, what is not meant for it.
#[test]
fn a_descriptor_of_its_own_is_not_taken_for_a_passed_socket() {
    let stage = Stage::new();
    // The first that it opens itself has the number.
    let script = "exec 3<&-; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" run \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(stage.path("rnicd")).arg("--socket").arg(stage.socket());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let why = "socket activation: descriptor 3 was opened by this process";
    assert!(said.contains(why), "{said}");
}

#[test]
fn started_as_root_it_becomes_the_user_it_is_told() {
    if !needs_root("becoming another user") {
        return;
    }
    let stage = Stage::new();
    // The configuration is root's alone: it is read before.
    let config = stage
        .config(&format!("[control]\nuser = \"{DAEMON}\"\ngroup = \"{GROUP}\"\nmode = \"0660\"\n"));
    std::fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
    for folder_owner in [0, DAEMON, DAEMON] {
        chown(stage.path("run"), Some(folder_owner), None).unwrap();
        // With groups of root's, which the user is no member of.
        let mut command = Command::new("setpriv");
        command.arg(format!("--groups={GROUP},{STRANGER}")).arg(stage.path("rnicd"));
        command.args(["run", "--config"]).arg(&config).arg("--socket").arg(stage.socket());
        let mut daemon = Process::start(command);
        daemon.line_after("dropped privileges");
        if folder_owner == 0 {
            daemon.line_after("the socket will be left behind");
        }
        daemon.line_after("listening");
        assert!(stage.duet(CLIENT, &GROUP.to_string()));
        assert!(!stage.duet(STRANGER, ""));
        threads_are_confined(daemon.id());
        for task in std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap() {
            let fields = status(&task.unwrap().path().join("status"));
            let ids = four_times(DAEMON);
            assert_eq!((&fields["Uid"], &fields["Gid"]), (&ids, &ids));
            assert_eq!(fields["Groups"], "");
            assert_eq!(fields["CapBnd"], NONE);
        }
        // Only root may read the file; the daemon is root no more, says so and goes on.
        daemon.signal(Signal::HUP);
        daemon.line_after("configuration not reloaded");
        daemon.signal(Signal::TERM);
        let lines = daemon.succeed();
        assert!(!lines.iter().any(|l| l.contains("running as root")), "{lines:?}");
        // Left behind where it must be; the next daemon takes the place all the same.
        assert_eq!(stage.socket().exists(), folder_owner == 0);
    }
}

#[test]
fn without_a_user_root_is_told_once_what_that_means() {
    if !needs_root("running as root") {
        return;
    }
    let stage = Stage::new();
    let mut command = Command::new(stage.path("rnicd"));
    command.arg("run").arg("--socket").arg(stage.socket());
    let mut daemon = Process::start(command);
    daemon.line_after("listening");
    daemon.signal(Signal::TERM);
    let lines = daemon.succeed();
    assert_eq!(lines.iter().filter(|l| l.contains("running as root")).count(), 1, "{lines:?}");
    let mut command = Command::new(stage.path("rnicd"));
    command.args(["exec", "--", "true"]);
    let lines = Process::start(command).succeed();
    assert!(!lines.iter().any(|l| l.contains("root")), "{lines:?}");
}

#[test]
fn a_plain_user_cannot_become_another_and_has_nothing_left() {
    let stage = Stage::new();
    let rnicd = || match is_root() {
        true => as_user(DAEMON, "", &stage.path("rnicd")),
        false => Command::new(stage.path("rnicd")),
    };
    if is_root() {
        chown(stage.path("run"), Some(DAEMON), None).unwrap();
    }
    let run = |config: &Path| {
        let mut command = rnicd();
        command.args(["run", "--config"]).arg(config).arg("--socket").arg(stage.socket());
        Process::start(command)
    };
    let (status, lines) = run(&stage.config("[control]\nuser = \"root\"\n")).finish();
    assert_eq!(status.code(), Some(78));
    assert!(lines.iter().any(|l| l.contains("control.user = \"root\": only root")), "{lines:?}");
    let mut daemon = run(&stage.config(""));
    daemon.line_after("listening");
    let names = threads_are_confined(daemon.id());
    assert!(names.len() >= 5, "{names:?}");
    assert!(stage.duet(DAEMON, ""));
    daemon.signal(Signal::TERM);
    daemon.succeed();
    assert!(!stage.socket().exists());
}

#[test]
fn a_log_that_nobody_reads_stops_nobody() {
    let stage = Stage::new();
    let (unread, log) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&unread, 4096).unwrap();
    let mut command = Command::new(stage.path("rnicd"));
    command.args(["run", "--socket"]).arg(stage.socket()).env("RUST_LOG", "trace");
    let mut daemon = Service(command.stderr(log).spawn().unwrap());
    drop(command);
    let deadline = Instant::now() + DEADLINE;
    let mut sessions = 0;
    // More lines than pipe and queue hold.
    while sessions < 2_500 {
        match Context::open_at(stage.socket()) {
            Ok(_) => sessions += 1,
            Err(e) => assert!(Instant::now() < deadline, "{sessions} sessions, then {e}"),
        }
    }
    assert!(rustix::io::ioctl_fionread(&unread).unwrap() > 3_000, "the pipe is full");
    assert!(stage.duet(rustix::process::geteuid().as_raw(), ""));
    let asked = Instant::now();
    assert_eq!(daemon.terminate(), Some(0));
    // It has waited for the reader, but not for long.
    assert!(asked.elapsed() > Duration::from_millis(900));
}
