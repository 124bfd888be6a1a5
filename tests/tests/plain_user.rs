//! `rnic-run` for a user with nothing but a home folder: the time to start a first program, and the
//! view of programs that look for devices themselves.

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_tests::{DEADLINE, Process, built, copy_files, omit, output_text, ports, timing};
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;

/// An installation as described in README.md, readable by all users.
struct Installed {
    folder: TempDir,
}

impl Installed {
    fn new() -> Self {
        let installed = Installed { folder: TempDir::with_prefix("rnic-plain-").unwrap() };
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(installed.folder.path(), open).unwrap();
        std::fs::create_dir_all(installed.at("lib/rnicd")).unwrap();
        std::fs::create_dir(installed.at("bin")).unwrap();
        copy_files(built::program("rnic-run"), &installed.at("bin/rnic-run"));
        copy_files(built::program("rnicd"), &installed.at("bin/rnicd"));
        for name in ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"] {
            let library = built::libraries().join(name);
            std::fs::copy(library, installed.at("lib/rnicd").join(name)).unwrap();
        }
        installed
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Compiles a C program of the tests. Returns the error output of the compiler on failure.
    fn compile(&self, source: &str, options: &[&str]) -> Result<PathBuf, String> {
        let program = self.at("bin").join(Path::new(source).file_stem().unwrap());
        let mut compiler = Command::new("cc");
        compiler.args(["-Wall", "-Werror", "-o"]).arg(&program).args(options);
        compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source));
        let output = compiler.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then_some(program).ok_or(said)
    }
}

/// Home folder of a user without other writable folders. Only a log remains in it.
struct Home<'a> {
    installed: &'a Installed,
    name: &'static str,
}

impl<'a> Home<'a> {
    fn new(installed: &'a Installed, name: &'static str) -> Self {
        let home = Home { installed, name };
        std::fs::create_dir(home.path()).unwrap();
        if geteuid().is_root() {
            chown(home.path(), Some(PLAIN), Some(PLAIN)).unwrap();
        }
        home
    }

    fn path(&self) -> PathBuf {
        self.installed.at(self.name)
    }

    /// Returns a command that runs a program as this user with an empty environment.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = if geteuid().is_root() {
            let mut command = Command::new("setpriv");
            let id = PLAIN.to_string();
            command.args(["--reuid", &*id, "--regid", &*id, "--clear-groups", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.env_clear().current_dir("/").env("PATH", std::env::var_os("PATH").unwrap());
        command.env("HOME", self.path()).env("TMPDIR", self.path());
        // Avoids the system's daemon, which would refuse this user.
        if Path::new("/run/rnicd/rnicd.sock").exists() {
            command.env("RNIC_SOCKET", self.path().join("rnicd.sock"));
        }
        command
    }

    fn rnic_run(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(self.installed.at("bin/rnic-run"));
        // Programs that only read files have no session. The daemon must outlast them.
        command.args(["--idle", "1h"]).args(arguments);
        command
    }

    /// Returns the log of the daemon, if one was started.
    fn log(&self) -> Option<String> {
        let uid = if geteuid().is_root() { PLAIN } else { geteuid().as_raw() };
        let logs = [format!("rnicd-{uid}/rnicd.log"), "rnicd.log".to_owned()];
        logs.iter().find_map(|name| std::fs::read_to_string(self.path().join(name)).ok())
    }

    /// Sends `SIGTERM` to the daemon. Returns `None` if no daemon runs.
    fn stop(&self) -> Option<()> {
        let log = self.log()?;
        let (_, pid) = log.split_once(" pid=")?;
        let pid = pid.split_whitespace().next()?.parse().ok()?;
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        // Another process may have the number by now.
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
        (program == self.installed.at("bin/rnicd")).then_some(())?;
        pidfd_send_signal(process, Signal::TERM).ok()
    }

    /// Stops the daemon and waits for its end.
    fn await_stop(&self) {
        // A thread of the daemon writes the log, so the line with its pid can come late.
        self.wait_until("no daemon was started", || self.stop().is_some());
        self.wait_until("a daemon still runs", || {
            self.log().is_some_and(|log| log.lines().last().is_some_and(|l| l.contains("stopped")))
        });
    }

    fn wait_until(&self, otherwise: &str, is_done: impl Fn() -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !is_done() {
            assert!(Instant::now() < deadline, "{otherwise}: {:?}", self.log());
            std::thread::yield_now();
        }
    }
}

impl Drop for Home<'_> {
    /// Stops the daemon of a test that has failed. It would otherwise run for an hour.
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns true if this user can mount in new namespaces. Otherwise reports an omission.
fn may_mount(home: &Home<'_>) -> bool {
    let mut probe = home.command("unshare");
    let output = probe.args(["--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs"]);
    let output = output.args(["none", "/sys/class"]).output().unwrap();
    if !output.status.success() {
        omit(&format!("no user and mount namespaces here: {}", output_text(&output)));
    }
    output.status.success()
}

/// Measures the delay of the first program of a CI job.
#[test]
fn a_first_program_starts_a_daemon_quickly() {
    let is_measured = timing("the time until a first program has its daemon");
    let installed = Installed::new();
    let mut programs = vec![("true", vec!["true"])];
    match Command::new("ibv_devinfo").arg("--help").output() {
        Ok(_) => programs.push(("ibv_devinfo", vec!["ibv_devinfo", "-d", "rnicd1"])),
        Err(_) => omit("ibv_devinfo is not installed (Debian package ibverbs-utils)"),
    }
    let mut homes = ["a", "b", "c", "d", "e", "f"].into_iter();
    for (name, arguments) in programs {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            let home = Home::new(&installed, homes.next().unwrap());
            let began = Instant::now();
            let output = home.rnic_run(&arguments).output().unwrap();
            best = best.min(began.elapsed());
            let text = output_text(&output);
            assert!(output.status.success() && text.contains("started daemon"), "{text}");
            assert!(name == "true" || text.contains("rnicd1"), "{text}");
            home.await_stop();
        }
        println!("{name}: {best:?} from the start of rnic-run, without a daemon, to its end");
        assert!(!is_measured || best < Duration::from_secs(2), "{name}: {best:?}");
    }
}

#[test]
fn static_program_sees_devices_by_mounts() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    if !may_mount(&home) {
        return;
    }
    let program = match installed.compile("mounted.c", &["-static"]) {
        Ok(program) => program,
        Err(why) => return omit(&format!("nothing can be linked statically here: {why}")),
    };
    let program = program.to_str().unwrap();
    let devices = "rnicd0,rnicd1";
    let output = home.rnic_run(&["--mount", "--devices", devices, program]).output().unwrap();
    let text = output_text(&output);
    assert!(output.status.success() && text.ends_with("done\n"), "{text}");
    assert!(text.contains("cannot use rnicd's libraries"), "{text}");
    // The folders already exist, as on a machine with RDMA. The mounts cover them.
    let own = installed.at("bin/rnic-run");
    let twice = ["--mount", "--devices", devices, own.to_str().unwrap(), "--mount", program];
    let text = output_text(&home.rnic_run(&twice).output().unwrap());
    assert!(text.ends_with("done\n"), "{text}");
    // Other processes do not see the mounts.
    assert!(!std::fs::read_to_string("/proc/mounts").unwrap().contains("rnic-run"));
    home.await_stop();
}

#[test]
fn mounted_devices_are_found_by_every_call() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    if !may_mount(&home) {
        return;
    }
    let looks = installed.compile("looks.c", &[]).unwrap();
    let both = ["--mount", "--devices", "rnicd0,rnicd1", looks.to_str().unwrap()];
    let output = home.rnic_run(&both).output().unwrap();
    assert!(output.status.success() && output.stdout == b"done\n", "{}", output_text(&output));
    let list = ["--mount", "--devices", "rnicd0", "ls", "/sys/class/infiniband", "/dev/infiniband"];
    let text = output_text(&home.rnic_run(&list).output().unwrap());
    assert!(text.contains("rnicd0") && text.contains("uverbs1"), "{text}");
    assert!(!text.contains("rnicd1") && !text.contains("uverbs0"), "{text}");
    let script = "echo ${RNIC_TREE:-none} $(id -u) $(readlink -f /dev/fd/0)";
    let output = home.rnic_run(&["--mount", "sh", "-c", script]).output().unwrap();
    let uid = if geteuid().is_root() { PLAIN } else { geteuid().as_raw() };
    assert!(
        output_text(&output).ends_with(&format!("none {uid} /dev/null\n")),
        "{}",
        output_text(&output)
    );
    if Command::new("ibv_rc_pingpong").arg("--help").output().is_err() {
        return omit("ibv_rc_pingpong is not installed (Debian package ibverbs-utils)");
    }
    let port = ports::unused_port().to_string();
    let common = ["--mount", "ibv_rc_pingpong", "-g", "0", "-p", &port];
    let mut server = Process::start(home.rnic_run(&common));
    let deadline = Instant::now() + DEADLINE;
    // Its output is buffered until it ends, so only a client can determine whether it listens.
    while !home.rnic_run(&[&common[..], &["127.0.0.1"]].concat()).output().unwrap().status.success()
    {
        assert!(Instant::now() < deadline && !server.has_ended(), "no ping-pong");
    }
    server.succeed();
    home.await_stop();
}

#[test]
fn tools_show_the_device_of_a_plain_user() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    let lines = |arguments: &[&str]| {
        let output = home.rnic_run(arguments).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let list = lines(&["ls", "-l", "/sys/class/infiniband"]);
    let link = "rnicd1 -> ../../devices/rnicd/rnicd1/infiniband/rnicd1";
    assert!(list.contains(link) && list.lines().count() == 2, "{list}");
    for program in ["ibv_devices", "ibstatus"] {
        if Command::new(program).arg("-h").output().is_err() {
            omit(&format!("{program} is not installed (ibverbs-utils, infiniband-diags)"));
            continue;
        }
        let text = lines(&[program]);
        assert!(text.contains("rnicd1") && !text.contains("rnicd0"), "{text}");
    }
    home.await_stop();
}

#[test]
fn refused_namespaces_are_explained() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    if !may_mount(&home) {
        return;
    }
    // In their own user namespace, users can lower their limits.
    let script = "echo 0 > /proc/sys/user/max_mnt_namespaces && exec \"$0\" --idle 5s --mount true";
    let mut command = home.command("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", script]);
    command.arg(installed.at("bin/rnic-run")).env("RNIC_SOCKET", home.path().join("rnicd.sock"));
    let output = command.output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(126), "{text}");
    let words = ["sysctl user.max_mnt_namespaces is 0", "without --mount", "CLONE_NEWNS"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("started daemon")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    home.await_stop();
}

#[test]
fn without_device_files_nothing_is_mounted() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    let config = home.path().join("rnicd.toml");
    std::fs::write(&config, "[device]\ntree = \"off\"\n").unwrap();
    let socket = home.path().join("socket");
    let mut command = home.command(installed.at("bin/rnicd"));
    command.args(["run", "--config"]).arg(&config).arg("--socket").arg(&socket);
    let mut daemon = Process::start(command);
    daemon.line_after("listening");
    let mut command = home.rnic_run(&["--mount", "true"]);
    let output = command.env("RNIC_SOCKET", &socket).output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(126), "{text}");
    assert!(text.contains("device.tree") && text.lines().count() == 1, "{text}");
}

/// A daemon of root or of another user has the system's socket.
#[test]
fn foreign_system_daemon_is_bypassed() {
    if !geteuid().is_root() {
        return omit("only root can mount a /run with a socket of its own");
    }
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    let script = "mount -t tmpfs none /run && mkdir -m 755 /run/rnicd && \
                  (umask 077 && touch /run/rnicd/rnicd.sock) && exec \"$@\"";
    let in_place = |arguments: &[&str]| {
        let inner = home.rnic_run(arguments);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        command.arg(inner.get_program()).args(inner.get_args());
        command.env_clear().current_dir("/").env("PATH", std::env::var_os("PATH").unwrap());
        command.env("TMPDIR", home.path());
        command.output().unwrap()
    };
    let refused = in_place(&["--no-start", "true"]);
    let text = output_text(&refused);
    assert!(refused.status.code() == Some(125) && text.contains("permission denied"), "{text}");
    let output = in_place(&["true"]);
    let text = output_text(&output);
    assert!(output.status.success() && text.contains("started daemon"), "{text}");
    for words in ["/run/rnicd/rnicd.sock", "starting one for this user"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    home.await_stop();
}

/// A user and group without any files or processes.
const PLAIN: u32 = 1001;

#[test]
fn as_rxe_starts_a_daemon_of_its_own() {
    let installed = Installed::new();
    let home = Home::new(&installed, "home");
    if Path::new("/run/rnicd/rnicd.sock").exists() {
        return omit("the system's daemon may serve this user");
    }
    let check = || {
        let check = ["--as", "rxe", "--check"];
        output_text(&home.command(installed.at("bin/rnic-run")).args(check).output().unwrap())
    };
    assert!(check().contains("none with the profile rxe serves this user"), "{}", check());
    // No other daemon runs yet. The next program without `--as` gets one of its own.
    let shows = "ls /sys/class/infiniband; echo $RNIC_SOCKET";
    let mut command = home.command(installed.at("bin/rnic-run"));
    command.args(["--idle", "5s", "--as", "rxe", "sh", "-c", shows]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (devices, socket) = text.trim_end().split_once('\n').unwrap_or_default();
    assert_eq!(devices, "rxe0", "{}", output_text(&output));
    assert!(socket.contains("/rnicd-rxe-"), "{socket}");
    assert!(check().contains("one with the profile rxe serves this user"), "{}", check());
    let output = home.rnic_run(&["ls", "/sys/class/infiniband"]).output().unwrap();
    assert_eq!(output.stdout, b"rnicd1\n", "{}", output_text(&output));
    let deadline = Instant::now() + DEADLINE;
    while Path::new(socket).exists() {
        assert!(Instant::now() < deadline, "the daemon of the profile still runs");
        std::thread::yield_now();
    }
    home.await_stop();
}
