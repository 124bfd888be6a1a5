//! The daemons that a program trusts with its memory. As root, the tests act as several users.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use rnic_tests::{Process, built, copy_files, omit, output_text, verbs};
use tempfile::TempDir;

/// Users without an entry in the user database.
const OWNER: u32 = 65_520;
const OTHER: u32 = 65_521;

/// A daemon of [`OWNER`] that serves every user.
struct Stage {
    dir: TempDir,
    daemon: Process,
}

impl Stage {
    fn new() -> Option<Stage> {
        if !rustix::process::geteuid().is_root() {
            omit("only root can act as several users");
            return None;
        }
        let dir = TempDir::with_prefix("rnic-trust-").unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let at = |name: &str| dir.path().join(name);
        copy_files(built::program("rnicd"), &at("rnicd"));
        copy_files(built::program("rnicctl"), &at("rnicctl"));
        std::fs::create_dir(at("run")).unwrap();
        chown(at("run"), Some(OWNER), Some(OWNER)).unwrap();
        std::fs::write(at("rnicd.toml"), "[control]\nmode = \"0666\"\n").unwrap();
        let mut command = as_user(OWNER, &at("rnicd"));
        command.args(["run", "--config"]).arg(at("rnicd.toml"));
        command.arg("--socket").arg(at("run/rnicd.sock"));
        let mut daemon = Process::start(command);
        daemon.line_after("listening");
        Some(Stage { dir, daemon })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Builds a command that queries the status of the daemon selected by its environment.
    fn asks(&self, user: u32) -> Command {
        let mut command = as_user(user, &self.at("rnicctl"));
        command.arg("status").env("RNIC_SOCKET", self.at("run/rnicd.sock"));
        command
    }

    /// Wraps `inner` in a mount namespace whose `/run/rnicd` belongs to `owner` and leads to the
    /// daemon's socket.
    fn with_service_folder(&self, owner: u32, inner: &Command) -> Command {
        let script = "mount -t tmpfs none /run && mkdir /run/rnicd && chown \"$1\" /run/rnicd && \
                      ln -s \"$2\" /run/rnicd/rnicd.sock && shift 2 && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        command.arg(owner.to_string()).arg(self.at("run/rnicd.sock"));
        command.arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn ends(self) {
        self.daemon.signal(rustix::process::Signal::TERM);
        self.daemon.succeed();
    }
}

fn as_user(user: u32, program: &std::path::Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={user}"), format!("--regid={user}")]);
    command.arg("--clear-groups").arg(program);
    command.env_remove("XDG_RUNTIME_DIR").env_remove("TMPDIR");
    command
}

fn has_mount_namespaces() -> bool {
    Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|s| s.success())
}

fn is_served(mut command: Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
}

/// Returns the reason why no daemon was reached.
fn is_refused(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", output_text(&output));
    output_text(&output)
}

#[test]
fn daemons_of_other_users_are_refused_by_uid() {
    let Some(stage) = Stage::new() else { return };
    is_served(stage.asks(OWNER));
    for user in [OTHER, 0] {
        let said = is_refused(stage.asks(user));
        let parts = [format!("runs as user {OWNER}"), format!("of its own user {user}")];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    }
    // A socket named by an option is trusted, whichever user runs the daemon.
    let mut named = stage.asks(OTHER);
    named.env_remove("RNIC_SOCKET").arg("--socket").arg(stage.at("run/rnicd.sock"));
    is_served(named);
    stage.ends();
}

/// In another PID namespace, such as a container's, the kernel reports no PID for the daemon.
#[test]
fn daemon_outside_the_pid_namespace_is_checked() {
    let Some(stage) = Stage::new() else { return };
    let asks = |user| {
        let inner = stage.asks(user);
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child"]).arg(inner.get_program());
        command.args(inner.get_args()).env("RNIC_SOCKET", stage.at("run/rnicd.sock"));
        command
    };
    is_served(asks(OWNER));
    let said = is_refused(asks(OTHER));
    assert!(said.contains(&format!("runs as user {OWNER}")), "{said}");
    stage.ends();
}

#[test]
fn runtime_dir_of_the_previous_user_is_skipped() {
    let Some(stage) = Stage::new() else { return };
    let asks = |user| {
        let mut command = stage.asks(user);
        command.env_remove("RNIC_SOCKET").env("XDG_RUNTIME_DIR", stage.at("run"));
        command
    };
    is_served(asks(OWNER));
    // `su` keeps the variable of the previous user.
    let mut other = asks(OTHER);
    let output = other.output().unwrap();
    assert!(
        !output_text(&output).contains(stage.at("run").to_str().unwrap()),
        "{}",
        output_text(&output)
    );
    stage.ends();
}

#[test]
fn owner_of_the_service_folder_is_accepted() {
    let Some(stage) = Stage::new() else { return };
    if !has_mount_namespaces() {
        return omit("mount namespaces are refused here");
    }
    let asks = |owner| stage.with_service_folder(owner, &stage.asks(OTHER));
    is_served(asks(OWNER));
    let said = is_refused(asks(OTHER));
    assert!(said.contains(&format!("the owner of /run/rnicd (user {OTHER})")), "{said}");
    stage.ends();
}

#[test]
fn secure_execution_ignores_the_environment() {
    let Some(stage) = Stage::new() else { return };
    let program = stage.at("setuid");
    copy_files(built::program("rnicctl"), &program);
    chown(&program, Some(OWNER), Some(OWNER)).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let asks = |user| {
        let mut command = as_user(user, &program);
        command.arg("status").env("RNIC_SOCKET", stage.at("run/rnicd.sock"));
        command
    };
    // The program gains no rights when its owner runs it.
    is_served(asks(OWNER));
    let said = output_text(&asks(OTHER).output().unwrap());
    assert!(!said.contains(stage.at("run").to_str().unwrap()), "{said}");
    // The program found the system's daemon or none.
    let pid = stage.daemon.id().to_string();
    assert!(!said.split_whitespace().any(|word| word == pid), "{said}");
    assert!(said.contains("/run/rnicd/rnicd.sock") || said.contains("pid"), "{said}");
    stage.ends();
}

#[test]
fn secure_execution_of_verbs_ignores_variables() {
    let Some(stage) = Stage::new() else { return };
    if !has_mount_namespaces() {
        return omit("mount namespaces are refused here");
    }
    let lib = stage.at("lib");
    std::fs::create_dir(&lib).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::copy(built::libraries().join(name), lib.join(name)).unwrap();
    }
    // The loader also ignores LD_LIBRARY_PATH.
    let path = format!("-Wl,-rpath,{}", lib.display());
    let built = verbs::program_with("tests/devices.c", stage.dir.path(), &[&path]);
    let Some(program) = built else { return };
    chown(&program, Some(OWNER), Some(OWNER)).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    let prints = |user| {
        let mut command = as_user(user, &program);
        command.env_remove("RNIC_SOCKET");
        command.env("RNIC_LOG", "debug").env("RNIC_DEVICES", "rnicd0,nonsense");
        let output = stage.with_service_folder(OWNER, &command).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        let out = String::from_utf8(output.stdout).unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        (out, err)
    };
    // The program gains no rights when its owner runs it.
    let (out, err) = prints(OWNER);
    assert_eq!(out, "rnicd0\n", "{err}");
    assert!(err.contains("RNIC_DEVICES: no device \"nonsense\""), "{err}");
    assert_eq!(prints(OTHER), ("rnicd1\n".to_owned(), String::new()));
    stage.ends();
}
