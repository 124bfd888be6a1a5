//! `rnic-run` from a shell: the libraries and the daemon that a program gets, and the diagnostics
//! for programs that cannot work. The test builds small libraries of its own.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rnic_client::{AdmissionError, Context, Error};
use rnic_tests::{DEADLINE, Daemon, Process, built, copy_files, omit, output_text};
use rustix::process::{Pid, Signal, geteuid, getsid, kill_process};
use tempfile::TempDir;

/// A folder with `rnic-run`, `rnicd` and libraries in their installed layout, and a folder for the
/// socket.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::with_prefix("rnic-run-").unwrap();
        let place = Place { folder };
        for name in ["bin", "bin/verbs", "run", "programs"] {
            std::fs::create_dir(place.at(name)).unwrap();
        }
        copy_files(built::program("rnic-run"), &place.at("bin/rnic-run"));
        std::os::unix::fs::symlink(built::program("rnicd"), place.at("bin/rnicd")).unwrap();
        let verbs = "int ibv_old(void) { return 1; } int ibv_new(void) { return 7; }";
        let versions = "IBVERBS_1.0 { global: ibv_old; local: *; };\n\
                        IBVERBS_1.1 { global: ibv_new; } IBVERBS_1.0;";
        place.library("bin/verbs/libibverbs.so.1", verbs, versions);
        let cm = "RDMACM_1.0 { global: rdma_do; local: *; };";
        place.library("bin/verbs/librdmacm.so.1", "int rdma_do(void) { return 0; }", cm);
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the C compiler on `text`.
    fn compile(&self, text: &str, to: &str, options: &[&OsStr]) -> PathBuf {
        let source = self.at("source.c");
        let to = self.at(to);
        std::fs::write(&source, text).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-w", "-o"]).arg(&to).arg(&source).args(options);
        let output = compiler.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        to
    }

    fn library(&self, to: &str, text: &str, versions: &str) {
        let map = self.at("versions.map");
        std::fs::write(&map, versions).unwrap();
        let script = format!("-Wl,--version-script={}", map.display());
        let soname = format!("-Wl,-soname,{}", to.rsplit('/').next().unwrap());
        let options = ["-shared", "-fPIC", &script, &soname].map(OsStr::new);
        self.compile(text, to, &options);
    }

    /// Builds a program that is linked against both libraries and exits with their results.
    fn program(&self, name: &str, options: &[&str]) -> PathBuf {
        let text = "int main(void) { return ibv_new() + rdma_do(); }";
        let verbs = self.at("bin/verbs/libibverbs.so.1").into_os_string();
        let cm = self.at("bin/verbs/librdmacm.so.1").into_os_string();
        let options = options.iter().map(OsStr::new);
        let all: Vec<&OsStr> = [&*verbs, &*cm].into_iter().chain(options).collect();
        self.compile(text, &format!("programs/{name}"), &all)
    }

    /// Builds a command for `rnic-run` that uses only the socket of this place.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.at("bin/rnic-run"));
        command.args(arguments).env("RNIC_SOCKET", self.socket());
        for variable in ["RUST_LOG", "RNIC_VERBS_DIR", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR"] {
            command.env_remove(variable);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.at("run/rnicd.sock")
    }

    /// Waits until the daemon has ended and only its log remains.
    fn await_stop(&self) {
        let deadline = Instant::now() + DEADLINE;
        let left = || {
            let entries = std::fs::read_dir(self.at("run")).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name());
            names.filter(|name| name != "rnicd.log").count()
        };
        let log = || std::fs::read_to_string(self.at("run/rnicd.log")).unwrap();
        while left() != 0 || !log().lines().last().is_some_and(|line| line.contains("stopped")) {
            assert!(Instant::now() < deadline, "a daemon still runs: {}", log());
            std::thread::yield_now();
        }
    }
}

/// Returns the process ID of the daemon, if the text reports that one was started.
fn started(text: &str) -> Option<i32> {
    let (_, rest) = text.split_once("started daemon (pid ")?;
    rest.split(')').next()?.parse().ok()
}

#[test]
fn program_runs_with_a_temporary_daemon() {
    let place = Place::new();
    let program = place.program("seven", &[]);
    let first = place.run(&["--idle", "5s", program.to_str().unwrap()]);
    assert_eq!(first.status.code(), Some(7), "{}", output_text(&first));
    let text = output_text(&first);
    let log = place.at("run/rnicd.log");
    assert!(started(&text).is_some() && text.contains(&*log.to_string_lossy()), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    place.await_stop();
    // A running daemon is used without a message.
    let daemon = Daemon::start("");
    let mut command = place.command(&[program.to_str().unwrap()]);
    let second = command.env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    assert_eq!((second.status.code(), &*output_text(&second)), (Some(7), ""));
}

#[test]
fn program_replaces_rnic_run() {
    let place = Place::new();
    let script = "read children < /proc/$$/task/$$/children; echo \"$$ <$children> $1 $2\"; \
                  kill -TERM $$";
    let mut command = place.command(&["--idle", "5s", "sh", "-c", script, "sh", "--idle", "a b"]);
    command.env("LD_LIBRARY_PATH", "/elsewhere");
    let process = Process::start(command);
    let pid = process.id();
    let (status, lines) = process.finish();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15), "{lines:?}");
    assert!(lines.contains(&format!("{pid} <> --idle a b")), "{lines:?}");
    place.await_stop();
}

#[test]
fn daemon_inherits_nothing_from_its_starter() {
    let place = Place::new();
    let script = "exec 9>&1 8</dev/zero; exec \"$0\" --idle 10min true";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(place.at("bin/rnic-run"));
    // GitHub's runner finds the processes of a job by this variable and kills them.
    command.env("RUNNER_TRACKING_ID", "github_1");
    command.env("RNIC_SOCKET", place.socket()).env_remove("LD_LIBRARY_PATH");
    command.env("RNIC_VERBS_DIR", place.at("bin/verbs")).env_remove("RUST_LOG");
    // The output ends only if the daemon has not inherited it.
    let text = Process::start(command).succeed().join("\n");
    let pid = started(&text).unwrap_or_else(|| panic!("{text}"));
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let fds: Vec<(String, PathBuf)> = fds
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            Some((name, std::fs::read_link(entry.path()).ok()?))
        })
        .collect();
    let log = place.at("run/rnicd.log");
    for (fd, target) in [("0", "/dev/null"), ("1", "/dev/null"), ("2", log.to_str().unwrap())] {
        let found = fds.iter().find(|(name, _)| name == fd).map(|(_, target)| target.as_path());
        assert_eq!(found, Some(Path::new(target)), "{fds:?}");
    }
    assert!(!fds.iter().any(|(_, target)| target.ends_with("zero")), "{fds:?}");
    let process = Pid::from_raw(pid).unwrap();
    // The daemon has its own session.
    assert_eq!(getsid(Some(process)), Ok(process));
    assert_eq!(std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    let known = ["PATH=", "HOME=", "TMPDIR=", "XDG_RUNTIME_DIR=", "DBUS_SESSION_BUS_ADDRESS="];
    for variable in environment.split_terminator('\0') {
        let is_known = known.iter().any(|name| variable.starts_with(name));
        assert!(is_known || variable.starts_with("RUST_"), "{variable}");
    }
    assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    kill_process(process, Signal::TERM).unwrap();
    place.await_stop();
}

#[test]
fn the_daemon_gets_its_own_scope() {
    let place = Place::new();
    let fake = place.at("programs/systemd-run");
    let text = "#!/bin/sh\necho \"$@\" >> \"${0%/*}/asked\"\n\
                while [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n";
    std::fs::write(&fake, text).unwrap();
    std::fs::set_permissions(&fake, std::fs::Permissions::from_mode(0o755)).unwrap();
    if !geteuid().is_root() && in_login_session() {
        return omit("a user's daemon stays in a login session");
    }
    let path = format!("{}:{}", place.at("programs").display(), std::env::var("PATH").unwrap());
    let output = place.command(&["--idle", "1s", "true"]).env("PATH", path).output().unwrap();
    assert!(
        output.status.success() && started(&output_text(&output)).is_some(),
        "{}",
        output_text(&output)
    );
    let asked = std::fs::read_to_string(place.at("programs/asked")).unwrap();
    let asked: Vec<&str> = asked.lines().collect();
    assert!(asked.iter().all(|line| line.contains("--scope")), "{asked:?}");
    assert!(
        asked[0].ends_with("-- true") && asked[1].contains("rnicd run --detached"),
        "{asked:?}"
    );
    place.await_stop();
}

fn in_login_session() -> bool {
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    cgroups.split('/').any(|part| part.starts_with("session-"))
}

/// Creates a cgroup below the root of the hierarchy. Returns `None` if this user may not.
fn cgroup(name: &str) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    let path = Path::new(mount.split(' ').nth(4)?).join(name);
    std::fs::create_dir(&path).ok()?;
    path.join("cgroup.kill").exists().then_some(path)
}

#[test]
fn daemon_outlives_its_first_cgroup() {
    if Path::new("/run/systemd/system").exists() {
        return omit("systemd owns the cgroups here");
    }
    let Some(job) = cgroup(&format!("rnic-run-{}", std::process::id())) else {
        return omit("this user cannot create a cgroup with cgroup.kill");
    };
    let place = Place::new();
    let script = "echo 0 > \"$0/cgroup.procs\" && exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(&job).arg(place.at("bin/rnic-run"));
    command.args(["--idle", "10min", "true"]).env("RNIC_SOCKET", place.socket());
    let text = Process::start(command).succeed().join("\n");
    let pid = started(&text).unwrap_or_else(|| panic!("{text}"));
    let left = std::fs::read_to_string(job.join("cgroup.procs")).unwrap();
    std::fs::write(job.join("cgroup.kill"), "1").unwrap();
    let removed = std::fs::remove_dir(&job);
    let context = Context::open_at(place.socket()).expect("the daemon serves");
    assert_eq!(i32::try_from(context.status().unwrap().pid), Ok(pid));
    assert!(left.is_empty() && removed.is_ok(), "{left} {removed:?}");
    drop(context);
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    place.await_stop();
}

#[test]
fn concurrent_runs_start_one_daemon() {
    let place = Place::new();
    let arguments = ["--idle", "5s", "sh", "-c", "test -S \"$RNIC_SOCKET\""];
    let all: Vec<Process> = (0..4).map(|_| Process::start(place.command(&arguments))).collect();
    let text = all.into_iter().flat_map(Process::succeed).collect::<Vec<_>>().join("\n");
    assert_eq!(text.matches("started daemon").count(), 1, "{text}");
    let pid = Context::open_at(place.socket()).unwrap().status().unwrap().pid;
    assert_eq!(started(&text), i32::try_from(pid).ok(), "{text}");
    place.await_stop();
}

/// A program that starts while an idle daemon ends is either served or finds no daemon.
#[test]
fn idle_exit_loses_no_client() {
    let place = Place::new();
    for _ in 0..10 {
        let mut command = Command::new(built::program("rnicd"));
        command.args(["run", "--exit-when-idle", "1ms", "--socket"]).arg(place.socket());
        let mut daemon = Process::start(command);
        while !daemon.has_ended() {
            match Context::open_at(place.socket()) {
                Ok(context) => {
                    drop(context.status().expect("the daemon serves an admitted session"))
                }
                Err(Error::NoDaemon { tried }) => {
                    let (_, why) = &tried[0];
                    let kinds =
                        [std::io::ErrorKind::NotFound, std::io::ErrorKind::ConnectionRefused];
                    assert!(kinds.contains(&why.kind()), "{why}");
                }
                // On a busy machine sessions can start faster than the daemon frees ended sessions.
                Err(Error::NotAdmitted { why: AdmissionError::UserSessions, .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        daemon.succeed();
        assert_eq!(std::fs::read_dir(place.at("run")).unwrap().count(), 0);
    }
}

#[test]
fn no_start_without_a_daemon_fails_with_advice() {
    let place = Place::new();
    let output = place.run(&["--no-start", "true"]);
    assert_eq!(output.status.code(), Some(125));
    let text = output_text(&output);
    for word in ["rnic-run: no RNIC daemon", "rnicd.sock", "--no-start", "rnicd run"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(std::fs::read_dir(place.at("run")).unwrap().count(), 0);
    // If the daemon refuses a session, no other daemon is started.
    let daemon = Daemon::start("[limits]\nsessions = 1\n");
    let _only = Context::open_at(daemon.socket()).unwrap();
    let mut command = place.command(&["true"]);
    let output = command.env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(125), "{text}");
    assert!(
        text.contains("refused this session: its limit on sessions (limits.sessions)"),
        "{text}"
    );
}

#[test]
fn failures_have_the_exit_codes_of_env() {
    let place = Place::new();
    let plain = place.at("programs/plain");
    let script = place.at("programs/script");
    std::fs::write(&plain, "nothing").unwrap();
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let daemon = Daemon::start("");
    for (arguments, code, word) in [
        (&["no-such-program"][..], 127, "no-such-program: not found in PATH"),
        (&["/no/such/program"], 127, "/no/such/program: not found"),
        (&[plain.to_str().unwrap()], 126, "cannot be run"),
        (&[script.to_str().unwrap()], 127, "its interpreter is missing"),
        (&["--lib-dir", "/usr", "true"], 125, "/usr has no libibverbs.so.1; set --lib-dir"),
        (&["--idle", "5", "true"], 2, "not a duration"),
        (&["--device", "rnicd1", "true"], 2, "'--devices'"),
        (&["-d", "rnicd1", "true"], 2, "'--devices'"),
        (&["--no-starts", "true"], 2, "'--no-start'"),
        (
            &["--devices", "rnicd9", "true"],
            125,
            "no device \"rnicd9\"; this daemon has rnicd1, rnicd0",
        ),
        (&["--devices", "rnicd1, rnicd0", "true"], 0, ""),
        (&["--as", "mlx5", "true"], 125, "the daemon in RNIC_SOCKET has the profile rnicd; give"),
        (&["--as", "rnicd", "true"], 0, ""),
        (&["--as", "siw", "--devices", "rnicd0", "true"], 2, "cannot be used with"),
        (&["sh", "-c", "exit 99"], 99, ""),
        (&[], 2, "<PROGRAM>"),
    ] {
        let output = place.command(arguments).env("RNIC_SOCKET", daemon.socket()).output().unwrap();
        let text = output_text(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        assert!(text.contains(word), "{arguments:?}: {text}");
    }
    std::fs::remove_file(place.at("bin/verbs/librdmacm.so.1")).unwrap();
    std::fs::remove_file(place.at("bin/rnicd")).unwrap();
    let nowhere = output_text(&place.run(&["true"]));
    assert!(nowhere.contains("RNIC_VERBS_DIR") && nowhere.contains("bin/verbs"), "{nowhere}");
}

#[test]
fn failed_daemon_start_reports_its_output() {
    let place = Place::new();
    let broken = place.at("broken");
    std::fs::write(&broken, "#!/bin/sh\necho nothing works today >&2\nexit 3\n").unwrap();
    std::fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = place.run(&["--daemon", broken.to_str().unwrap(), "true"]);
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(125), "{text}");
    assert!(
        text.contains("(exit status: 3) before it accepted clients: nothing works today"),
        "{text}"
    );
    std::fs::remove_file(place.at("bin/rnicd")).unwrap();
    let mut command = place.command(&["true"]);
    command.env("PATH", place.at("programs"));
    let text = output_text(&command.arg("x").output().unwrap());
    assert!(text.contains("true: not found"), "{text}");
    place.compile("int main(void) { return 0; }", "programs/true", &[]);
    let mut command = place.command(&["true"]);
    let output = command.env("PATH", place.at("programs")).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(
        output_text(&output).contains("there is no rnicd to start"),
        "{}",
        output_text(&output)
    );
}

#[test]
fn the_environment_is_printed_for_any_shell() {
    let place = Place::new();
    let odd = place.at("it's $HOME  here");
    std::fs::rename(place.at("bin/verbs"), &odd).unwrap();
    let folder = odd.to_str().unwrap();
    let script = "eval \"$(\"$0\" --idle 5s --lib-dir \"$1\" --print-env)\" || exit 1\n\
                  printf '%s\\n' \"$LD_LIBRARY_PATH\" \"$RNIC_DEVICES\" \"$RNIC_SOCKET\"";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(place.at("bin/rnic-run")).arg(folder);
    command.env("RNIC_SOCKET", place.socket()).env("LD_LIBRARY_PATH", "/a b:/c");
    let output = command.env_remove("RUST_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = format!("{folder}:/a b:/c\n\n{}\n", place.socket().display());
    assert_eq!(text, expected, "{}", output_text(&output));
    place.await_stop();
    let devices = ["--idle", "5s", "--lib-dir", folder, "--devices", "rnicd1"];
    let output = place.run(&[&devices[..], &["--print-env"]].concat());
    assert!(
        output_text(&output).contains("export RNIC_DEVICES=rnicd1;"),
        "{}",
        output_text(&output)
    );
    let output = place.run(&[&devices[..], &["sh", "-c", "echo $RNIC_DEVICES"]].concat());
    assert_eq!(output.stdout, b"rnicd1\n", "{}", output_text(&output));
    place.await_stop();
    let options = ["--idle", "5s", "--lib-dir", folder, "--as", "siw"];
    let output = place.run(&[&options[..], &["sh", "-c", "echo $RNIC_DEVICES"]].concat());
    assert_eq!(output.stdout, b"rnicd0\n", "{}", output_text(&output));
    place.await_stop();
    let output = place.run(&["--lib-dir", folder, "--no-start", "--print-env"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(125), 0));
}

#[test]
fn as_rxe_starts_a_daemon_with_its_profile() {
    let place = Place::new();
    // The view of the RoCE devices.
    let shows = "ls $RNIC_TREE/views/.roce/class/infiniband; echo \"<$RNIC_DEVICES>\"";
    let output = place.run(&["--idle", "1s", "--as", "rxe", "sh", "-c", shows]);
    assert_eq!(output.stdout, b"rxe0\n<>\n", "{}", output_text(&output));
    assert!(!output_text(&output).contains("profile"), "{}", output_text(&output));
    place.await_stop();
    // The inner `rnic-run` gets the daemon of the outer one, which has another profile.
    let inner = "RNIC_DEVICES=rnicd0 exec \"$0\" --as rxe sh -c \"$1\"";
    let run = place.at("bin/rnic-run");
    let output = place.run(&["--idle", "20s", "sh", "-c", inner, run.to_str().unwrap(), shows]);
    assert_eq!(output.status.code(), Some(125), "{}", output_text(&output));
    let why = "--as rxe: the daemon in RNIC_SOCKET has the profile rnicd; give that daemon the \
               profile (rnicd exec --profile rxe, ";
    assert!(output_text(&output).contains(why), "{}", output_text(&output));
    place.await_stop();
}

#[test]
fn as_file_starts_a_daemon_with_it() {
    let place = Place::new();
    let file = place.at("tiny.toml");
    std::fs::write(&file, "device = \"tiny0\"\n").unwrap();
    let shows = "ls $RNIC_TREE/views/.roce/class/infiniband";
    let mut command = place.command(&["--idle", "1s", "--as", "./tiny.toml", "sh", "-c", shows]);
    let output = command.current_dir(place.folder.path()).output().unwrap();
    assert_eq!(output.stdout, b"tiny0\n", "{}", output_text(&output));
    place.await_stop();
    std::fs::write(&file, "max_sge = 0\n").unwrap();
    for (name, why) in [
        (file.to_str().unwrap(), "tiny.toml:1:11: max_sge = 0: must be from 1 to 4294967295"),
        ("/nonexistent/p.toml", "/nonexistent/p.toml: No such file"),
        ("mlx9", "no profile \"mlx9\"; known are rnicd, rxe, siw"),
    ] {
        let output = place.run(&["--as", name, "true"]);
        assert_eq!(output.status.code(), Some(125), "{}", output_text(&output));
        assert!(output_text(&output).contains(why), "{}", output_text(&output));
    }
}

/// Returns the result of `--check` for a program.
fn check(place: &Place, program: &Path) -> (bool, String) {
    let output = place.run(&["--check", program.to_str().unwrap()]);
    let text = output_text(&output);
    let problems = text.contains("PROBLEM");
    assert_eq!(output.status.code(), Some(i32::from(problems)), "{text}");
    (!problems, text)
}

#[test]
fn check_accepts_working_programs() {
    let place = Place::new();
    let program = place.program("seven", &[]);
    let (works, text) = check(&place, &program);
    assert!(works, "{text}");
    for fact in ["ok       libraries", "will be started", "have 2 symbols that it needs"] {
        assert!(text.contains(fact), "{fact}: {text}");
    }
    assert!(!place.socket().exists(), "nothing was started");
    // The program is the interpreter of a script.
    let script = place.at("programs/script");
    std::fs::write(&script, format!("#!/usr/bin/env {}\n", program.display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (works, text) = check(&place, &script);
    assert!(works && text.contains("is a script of") && text.contains("2 symbols"), "{text}");
    let daemon = Daemon::start("");
    let mut command = place.command(&["--check", "sh"]);
    let output = command.env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("one serves this user (pid ") && text.contains("dlopen"), "{text}");
    let output = place.run(&["--check", "--no-start"]);
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
}

#[test]
fn check_finds_the_devices_of_the_options() {
    let place = Place::new();
    let [own, rxe] = ["rnicd", "rxe"]
        .map(|profile| Daemon::start(&format!("[wired]\nprofile = \"{profile}\"\n")));
    let (own, rxe) = (Some(&own), Some(&rxe));
    let starts = "\"nosuch\"; a daemon that rnic-run starts has rnicd1, rnicd0";
    for (daemon, options, works, words) in [
        (None, ["--devices", "rnicd0,nosuch"], false, starts),
        (None, ["--devices", "rnicd0, rnicd1"], true, "rnicd will be started"),
        (None, ["--as", "rxe"], true, "none with the profile rxe serves this user"),
        (own, ["--devices", "nosuch"], false, "\"nosuch\"; this daemon has rnicd1, rnicd0"),
        (own, ["--as", "rxe"], false, "RNIC_SOCKET has the profile rnicd; give that daemon"),
        (rxe, ["--as", "rxe"], true, "one with the profile rxe serves this user"),
        (rxe, ["--devices", "rxe0"], true, "one serves this user"),
    ] {
        let mut command = place.command(&[&options[..], &["--check"]].concat());
        command.envs(daemon.map(|daemon| ("RNIC_SOCKET", daemon.socket())));
        let output = command.output().unwrap();
        let text = output_text(&output);
        assert_eq!(output.status.success(), works, "{options:?}: {text}");
        assert!(text.contains(words), "{options:?}: {text}");
    }
}

#[test]
fn check_names_system_mode_for_scripts() {
    let place = Place::new();
    let script = place.at("programs/script");
    for (line, command) in [("sudo ./test", "sudo"), ("env -i ./test", "env -i")] {
        std::fs::write(&script, format!("#!/bin/sh\n{line}\n")).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (works, text) = check(&place, &script);
        let words = format!("unknown  script     it contains `{command}`, which removes ");
        assert!(works && text.contains(&words), "{text}");
        assert!(text.contains("`rnicctl system install`"), "{text}");
    }
}

#[test]
fn check_gives_the_reason_for_missing_gids() {
    let place = Place::new();
    let mut daemon = Command::new("unshare");
    daemon.args(["--user", "--map-root-user", "--net", "--"]).arg(built::program("rnicd"));
    daemon.args(["exec", "--"]).arg(place.at("bin/rnic-run")).arg("--check");
    let output = daemon.env_remove("RNIC_SOCKET").output().unwrap();
    let text = output_text(&output);
    if text.starts_with("unshare: ") {
        return omit(&format!("no user and network namespaces here: {text}"));
    }
    let words = "the RoCE device has no GIDs: no network interface that is up has an address";
    assert!(text.contains(words), "{text}");
}

#[test]
fn check_reports_why_a_program_cannot_work() {
    let place = Place::new();
    let says = |program: &Path, word: &str| {
        let (works, text) = check(&place, program);
        assert!(!works && text.contains(word), "{word}: {text}");
    };
    let alone = "void _start(void) { for (;;); }";
    let alone_options = ["-static", "-nostdlib"].map(OsStr::new);
    says(&place.compile(alone, "programs/static", &alone_options), "linked statically");
    let musl = ["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"];
    says(&place.program("musl", &musl), "libraries are for glibc");
    let none = ["-Wl,--dynamic-linker=/lib/ld-none.so.1"];
    says(&place.program("none", &none), "/lib/ld-none.so.1, which is missing");
    // Byte 18 of an ELF header is `e_machine`, the architecture.
    let foreign = place.program("foreign", &[]);
    let mut bytes = std::fs::read(&foreign).unwrap();
    bytes[18] ^= 0x55;
    std::fs::write(&foreign, bytes).unwrap();
    says(&foreign, "for a different machine");
    // The program names other libraries, which the loader does not search, because rnicd's are
    // preloaded.
    std::fs::create_dir(place.at("others")).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::copy(place.at("bin/verbs").join(name), place.at("others").join(name)).unwrap();
    }
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", place.at("others").display());
    assert!(check(&place, &place.program("rpath", &[&rpath])).0);
    let runpath = format!("-Wl,--enable-new-dtags,-rpath,{}", place.at("others").display());
    assert!(check(&place, &place.program("runpath", &[&runpath])).0);
    // A symbol that rnicd's libraries lack, and an empty library.
    let program = place.program("wants", &[]);
    let older = "IBVERBS_1.0 { global: ibv_old; local: *; };";
    place.library("bin/verbs/libibverbs.so.1", "int ibv_old(void) { return 1; }", older);
    says(&program, "do not have: ibv_new@IBVERBS_1.1; it will not start");
    std::fs::write(place.at("bin/verbs/libibverbs.so.1"), "").unwrap();
    says(&program, "libibverbs.so.1 is not an ELF file");
    says(Path::new("no-such-program"), "not found; a name without a slash must be in PATH");
    std::fs::write(place.at("programs/script"), "#!/no/such/interpreter\n").unwrap();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.at("programs/script"), open).unwrap();
    says(&place.at("programs/script"), "/no/such/interpreter, which is missing");
    says(&place.at("source.c"), "is not a file that this user may run");
}

#[test]
fn setuid_program_is_refused() {
    if !geteuid().is_root() {
        return omit("only root can give programs away");
    }
    let place = Place::new();
    for (name, mode) in [("setuid", 0o4755), ("setgid", 0o2755)] {
        let program = place.program(name, &[]);
        std::os::unix::fs::chown(&program, Some(65_534), Some(65_534)).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        let (works, text) = check(&place, &program);
        let word = format!("is {name}, and the loader ignores LD_LIBRARY_PATH");
        assert!(!works && text.contains(&word), "{text}");
        assert!(is_refused(&place, &program).contains(&word));
        // The file's owner gains no rights, so the loader does not ignore the variable.
        std::os::unix::fs::chown(&program, Some(0), Some(0)).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
        let output = place.run(&["--idle", "5s", program.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(7), "{}", output_text(&output));
        place.await_stop();
        std::fs::remove_file(place.at("run/rnicd.log")).unwrap();
    }
}

#[test]
fn program_with_file_capabilities_is_refused() {
    if !geteuid().is_root() {
        return omit("only root can give capabilities to files");
    }
    let place = Place::new();
    let program = place.program("capable", &[]);
    // CAP_NET_RAW, effective (struct vfs_cap_data, linux/capability.h).
    let words = [0x0200_0001u32, 1 << 13, 0, 0, 0].map(u32::to_le_bytes);
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(&program, "security.capability", &words.concat(), flags).is_err() {
        return omit("the file system of the temp dir has no capabilities");
    }
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(place.folder.path(), open).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(place.at("bin/rnic-run")).arg(&program).env("RNIC_SOCKET", place.socket());
    let output = command.output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(126), "{text}");
    assert!(text.contains("capable has file capabilities, and the loader ignores"), "{text}");
    // With no_new_privs no user gains rights, and the program is loaded normally.
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
    command.arg(place.at("bin/rnic-run")).args(["--no-start", "--check"]).arg(&program);
    let text = output_text(&command.env("RNIC_SOCKET", place.socket()).output().unwrap());
    assert!(text.contains("it gains none at exec"), "{text}");
}

#[test]
fn unsupported_programs_are_not_run() {
    let place = Place::new();
    let alone = "void _start(void) { for (;;); }";
    let options = ["-static", "-nostdlib"].map(OsStr::new);
    let alone = place.compile(alone, "programs/static", &options);
    for word in ["is linked statically", "link it dynamically", "--mount", "no verbs", "sh -c"] {
        let text = is_refused(&place, &alone);
        assert!(text.contains(word), "{word}: {text}");
    }
    // Of a script, the interpreter is checked.
    let script = place.at("programs/script");
    std::fs::write(&script, format!("#!{} -x\n", alone.display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(is_refused(&place, &script).contains("programs/static is linked statically"));
    let musl = place.program("musl", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"]);
    assert!(is_refused(&place, &musl).contains("rnicd's libraries are for glibc"));
    // The loader is statically linked, but the program that it loads gets rnicd's libraries.
    let program = place.program("seven", &[]);
    let found = std::fs::read_link("/proc/self/exe").unwrap();
    let loader = rnic_run::elf::Elf::read(&found).unwrap().interpreter.unwrap();
    let arguments = ["--idle", "5s", loader.to_str().unwrap(), program.to_str().unwrap()];
    let output = place.run(&arguments);
    assert_eq!(output.status.code(), Some(7), "{}", output_text(&output));
    place.await_stop();
}

/// Asserts that a program is refused in one line and that no daemon is started. Returns the line.
fn is_refused(place: &Place, program: &Path) -> String {
    let output = place.run(&[program.to_str().unwrap()]);
    let text = output_text(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(126), 1), "{text}");
    assert_eq!(std::fs::read_dir(place.at("run")).unwrap().count(), 0, "{text}");
    text
}

#[test]
fn a_daemon_stays_while_it_is_used() {
    let place = Place::new();
    let deadline = Instant::now() + DEADLINE;
    // On a busy machine a daemon may have ended before its first client connects.
    let (daemon, context) = loop {
        assert!(Instant::now() < deadline, "no client connects in time");
        let mut command = Command::new(built::program("rnicd"));
        command.args(["run", "--exit-when-idle", "200ms", "--socket"]).arg(place.socket());
        let mut daemon = Process::start(command);
        daemon.line_after("listening");
        if let Ok(context) = Context::open_at(place.socket()) {
            break (daemon, context);
        }
        daemon.succeed();
    };
    let since = Instant::now();
    // Longer than the daemon's idle timeout.
    while since.elapsed() < Duration::from_millis(800) {
        context.status().expect("the daemon serves");
        std::thread::yield_now();
    }
    drop(context);
    let lines = daemon.succeed().join("\n");
    assert!(lines.contains("no client for 200ms: ending") && lines.contains("stopped"), "{lines}");
    assert!(since.elapsed() >= Duration::from_secs(1));
}
