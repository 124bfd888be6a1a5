//! The daemon as a service: signals and notifications of a service manager, and the privileges that
//! the daemon gives up and keeps.
//!
//! No systemd is needed (`systemd.rs` runs one). The tests read the settings from
//! `config/rnicd.service` and `config/rnicd.socket`, and apply them with `unshare`, `setpriv` and
//! system call filters (`unit`). Parts that require root are skipped without it, with a message.

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
use rnic_tests::{DEADLINE, Process, built, copy_files};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Pid, Resource, Signal, WaitOptions, getrlimit, kill_process, waitpid};

/// Users and groups without an entry in any database.
const DAEMON: u32 = 65_533;
const CLIENT: u32 = 65_532;
const STRANGER: u32 = 65_531;
const GROUP: u32 = 65_530;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns true if this is root. Otherwise prints that `what` is skipped.
fn needs_root(what: &str) -> bool {
    if !is_root() {
        rnic_tests::omit(&format!("{what} requires root"));
    }
    is_root()
}

/// A folder that every user may enter, with the binaries in it, because other users may have no
/// access to a checkout.
struct Stage {
    dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        copy_files(built::program("rnicd"), &dir.path().join("rnicd"));
        copy_files(built::program("actor"), &dir.path().join("actor"));
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

    /// Runs two processes of this user that exchange every operation. Returns true on success.
    fn duet(&self, user: u32, groups: &str) -> bool {
        let mut command = if is_root() {
            as_user(user, groups, &self.path("actor"))
        } else {
            Command::new(self.path("actor"))
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

/// A daemon without the harness's pipes. Killed when dropped.
struct Service(Child);

impl Service {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn status(&self) -> HashMap<String, String> {
        status(&PathBuf::from(format!("/proc/{}/status", self.0.id())))
    }

    /// Waits for the end, and returns the exit code.
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
        // Fails if the daemon has already ended, which is the normal case.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads the fields of a `status` file in `/proc`.
fn status(file: &Path) -> HashMap<String, String> {
    let text = std::fs::read_to_string(file).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields
        .map(|(k, v)| (k.to_owned(), v.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect()
}

/// Asserts that every thread is confined and has no capabilities or means to gain them. Returns the
/// names of the threads.
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

/// The real, effective, saved and file system ID in a `status` file.
fn four_times(id: u32) -> String {
    format!("{id} {id} {id} {id}")
}

const NONE: &str = "0000000000000000";

/// The service manager's end of the notification socket.
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

    /// Receives the next message, which must start with `expected`.
    fn expect_message(&self, expected: &str) {
        let mut buffer = [0; 512];
        let len = self.socket.recv(&mut buffer).expect("a notification");
        let said = String::from_utf8_lossy(&buffer[..len]);
        assert!(said.starts_with(expected), "{said:?} instead of {expected:?}");
    }

    /// Asserts that there are no more messages.
    fn expect_no_message(&self) {
        self.socket.set_nonblocking(true).unwrap();
        assert!(self.socket.recv(&mut [0; 512]).is_err());
    }
}

/// Creates a listening socket like that of `rnicd.socket`.
fn activated(path: &Path, kind: SocketType) -> OwnedFd {
    let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 128).unwrap();
    socket
}

/// Returns true if root may mount in its own mount namespace. Some containers forbid it.
fn may_mount(folder: &Path) -> bool {
    let mut command = Command::new("unshare");
    command.args(["--mount", "mount", "--bind"]).args([folder, folder]);
    command.output().is_ok_and(|output| output.status.success())
}

const SERVICE: &str = include_str!("../../config/rnicd.service");
const SOCKET: &str = include_str!("../../config/rnicd.socket");
const PORT_SOCKET: &str = include_str!("../../config/rnicd-port.socket");

/// Asserts that the service unit sets `key` to `value`, exactly once.
fn says(key: &str, value: &str) {
    let all = unit::directives(SERVICE, "Service");
    let values: Vec<&str> = all.iter().filter(|(k, _)| *k == key).map(|(_, v)| *v).collect();
    assert_eq!(values, [value], "{key}");
}

#[test]
fn daemon_serves_under_its_units_restrictions() {
    says("Type", "notify");
    says("User", "rnicd");
    let passed: HashMap<&str, &str> = unit::directives(SOCKET, "Socket").into_iter().collect();
    let sandbox = Sandbox::of(SERVICE);
    let stage = Stage::new();
    copy_files(built::program("confine"), &stage.path("confine"));
    let manager = Manager::new(&stage);
    let socket = activated(&stage.socket(), SocketType::SEQPACKET);
    let mode = u32::from_str_radix(passed["SocketMode"], 8).unwrap();
    std::fs::set_permissions(stage.socket(), Permissions::from_mode(mode)).unwrap();
    let figures = stage.path("run/rnicd.prom");
    let metrics = format!("[metrics]\nfile = {:?}\n", figures.to_str().unwrap());
    let config = stage.config(&format!("[engine]\nworkers = 2\n{metrics}"));

    let mounts = is_root() && may_mount(&stage.path("run"));
    if !mounts {
        rnic_tests::omit("private and read-only folders require root and mounts");
    }
    if is_root() {
        chown(stage.socket(), None, Some(GROUP)).unwrap();
        chown(stage.path("run"), Some(DAEMON), None).unwrap();
    } else {
        rnic_tests::omit("another user and an empty bounding set require root");
    }
    if unit::call_groups().is_empty() {
        rnic_tests::omit("no systemd-analyze here to list @system-service");
    }
    let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let user = is_root().then_some(DAEMON);
    let confine = stage.path("confine");
    let how = How { folder: stage.dir.path(), confine: &confine, mounts, user, descriptors };
    let mut command = sandbox.command(&how);
    command.arg(stage.path("rnicd")).args(["run", "--config"]).arg(&config);
    command.env("NOTIFY_SOCKET", &manager.name).stdin(Stdio::from(socket));
    let mut daemon = Service(command.spawn().unwrap());
    manager.expect_message("READY=1\nSTATUS=serving\n");

    let names = threads_are_confined(daemon.0.id());
    assert!(names.iter().filter(|n| n.starts_with("rnicd-worker")).count() == 2, "{names:?}");
    let fields = daemon.status();
    // The filters of the unit, and those of the thread.
    assert_eq!(fields["Seccomp_filters"], (sandbox.filters() + 1).to_string());
    assert_eq!(fields["Umask"], "0077");
    if is_root() {
        assert_eq!(fields["CapBnd"], NONE);
        assert_eq!(fields["Uid"], four_times(DAEMON));
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.0.id())).unwrap();
        let core = limits.lines().find(|l| l.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
        assert!(!stage.duet(STRANGER, ""), "a user outside the group was served");
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
    // The daemon reads interfaces over netlink.
    let status = Context::open_at(stage.socket()).unwrap().status().unwrap();
    assert!(status.gids > 0, "{}", status.gids_problem);
    assert_eq!(status.gids_problem, "");
    // The metrics must be readable regardless of the umask, since the collector is another user.
    let readable = || std::fs::metadata(&figures).is_ok_and(|m| m.mode() & 0o7777 == 0o644);
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    manager.expect_message("RELOADING=1\nMONOTONIC_USEC=");
    manager.expect_message("READY=1\nSTATUS=serving\n");
    until("metrics that every user can read", readable);

    // The unit checks the configuration before it sends the signal.
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
    // Without the check, the daemon reports the outcome in its status.
    kill_process(daemon.pid(), Signal::HUP).unwrap();
    manager.expect_message("RELOADING=1\nMONOTONIC_USEC=");
    manager.expect_message(
        "READY=1\nSTATUS=serving; configuration not reloaded, the previous one remains: ",
    );

    assert_eq!(daemon.terminate(), Some(0));
    manager.expect_message("STOPPING=1\n");
    manager.expect_no_message();
    assert!(stage.socket().exists(), "the socket is the service manager's");
    std::fs::remove_file(figures).unwrap();
    assert_eq!(std::fs::read_dir(stage.path("run")).unwrap().count(), 1, "other files remain");
}

#[test]
#[should_panic(expected = "PrivateUsers=yes of rnicd.service is neither applied nor listed")]
fn a_directive_that_is_not_known_fails_the_test() {
    Sandbox::of(&SERVICE.replace("RemoveIPC=yes", "PrivateUsers=yes"));
}

/// Makes systemd verify the units, if it is installed.
#[test]
fn systemd_verifies_the_units() {
    let stage = Stage::new();
    let rnicd = stage.path("rnicd");
    let service = SERVICE.replace("/usr/bin/rnicd", rnicd.to_str().unwrap());
    std::fs::write(stage.path("rnicd.service"), service).unwrap();
    std::fs::write(stage.path("rnicd.socket"), SOCKET).unwrap();
    std::fs::write(stage.path("rnicd-port.socket"), PORT_SOCKET).unwrap();
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]).arg(stage.path("rnicd.service"));
    let Ok(output) = command.output() else {
        rnic_tests::omit("no systemd-analyze here to verify the units");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    // The installed systemd may not know all settings of the unit, and reports unrelated units,
    // too.
    let about: Vec<&str> = said.lines().filter(|line| line.contains("rnicd.")).collect();
    assert!(output.status.success() && about.is_empty(), "{said}");
}

/// A service manager does not restart a daemon that would fail again.
#[test]
fn wrong_configuration_has_its_own_exit_code() {
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
    // A failure that may be temporary allows a restart.
    std::fs::write(stage.socket(), "in the way").unwrap();
    assert_eq!(run(&stage.config("")).status.code(), Some(1));
}

#[test]
fn the_watchdog_gets_periodic_notifications() {
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
    // Taken before the start, because this process may read the first messages late.
    let from = Instant::now();
    let mut daemon = Service(command.spawn().unwrap());
    manager.expect_message("READY=1\n");
    for _ in 0..4 {
        manager.expect_message("WATCHDOG=1\n");
    }
    // One message at once, then one per half period.
    assert!(from.elapsed() >= Duration::from_millis(300), "{:?}", from.elapsed());
    assert_eq!(daemon.terminate(), Some(0));
}

/// The kernel reports no process ID for such a client.
#[test]
fn clients_in_another_pid_namespace_are_served() {
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
    manager.expect_message("READY=1\n");
    let context = Context::open_at(stage.socket()).unwrap();
    assert!(context.status().unwrap().sessions >= 1);
    let Rows::Clients(rows) = context.list(ListKind::Clients, 0).unwrap().rows else {
        panic!("no clients")
    };
    assert_eq!((rows[0].pid, rows[0].uid), (0, 0));
    drop(context);
    // The daemon notices the client's death even if another process holds its socket.
    assert!(stage.duet(0, ""));
    drop(daemon);
}

/// Waits until a condition holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "no {what} at the deadline");
        std::thread::yield_now();
    }
}

#[test]
fn unusable_passed_sockets_are_refused_by_name() {
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

/// Whatever its variables, the daemon must not serve or close a descriptor that was not passed
/// to it.
#[test]
fn own_descriptor_is_not_a_passed_socket() {
    let stage = Stage::new();
    // The first descriptor that the daemon opens gets this number.
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
fn root_daemon_switches_to_the_configured_user() {
    if !needs_root("becoming another user") {
        return;
    }
    let stage = Stage::new();
    // Only root may read the configuration, which the daemon reads before it switches users.
    let config = stage
        .config(&format!("[control]\nuser = \"{DAEMON}\"\ngroup = \"{GROUP}\"\nmode = \"0660\"\n"));
    std::fs::set_permissions(&config, Permissions::from_mode(0o600)).unwrap();
    for folder_owner in [0, DAEMON, DAEMON] {
        chown(stage.path("run"), Some(folder_owner), None).unwrap();
        // The daemon starts with supplementary groups of root, to which its user does not belong.
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
        // Only root may read the file. The daemon, no longer root, logs the failure and continues.
        daemon.signal(Signal::HUP);
        daemon.line_after("configuration not reloaded");
        daemon.signal(Signal::TERM);
        let lines = daemon.succeed();
        assert!(!lines.iter().any(|l| l.contains("running as root")), "{lines:?}");
        // The daemon leaves its socket if the folder is not writable. The next daemon replaces it.
        assert_eq!(stage.socket().exists(), folder_owner == 0);
    }
}

#[test]
fn root_without_a_user_is_warned_once() {
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
fn plain_user_cannot_switch_users() {
    let stage = Stage::new();
    let rnicd = || {
        if is_root() {
            as_user(DAEMON, "", &stage.path("rnicd"))
        } else {
            Command::new(stage.path("rnicd"))
        }
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
fn unread_log_blocks_no_client() {
    let stage = Stage::new();
    let (unread, log) = std::io::pipe().unwrap();
    rustix::pipe::fcntl_setpipe_size(&unread, 4096).unwrap();
    let mut command = Command::new(stage.path("rnicd"));
    command.args(["run", "--socket"]).arg(stage.socket()).env("RUST_LOG", "trace");
    let mut daemon = Service(command.stderr(log).spawn().unwrap());
    drop(command);
    let deadline = Instant::now() + DEADLINE;
    let mut sessions = 0;
    // More lines than the pipe and the queue hold.
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
    // The daemon has waited for the reader, but not for long.
    assert!(asked.elapsed() > Duration::from_millis(900));
}
