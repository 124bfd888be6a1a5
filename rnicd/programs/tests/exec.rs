//! Tests of `rnicd exec` and `rnicd demo` in a shell: exit codes, signals and output, and that
//! nothing is left behind, whichever process is killed.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const RNICCTL: &str = env!("CARGO_BIN_EXE_rnicctl");

fn rnicd() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rnicd"));
    command.env_remove("RUST_LOG").env_remove("RNIC_SOCKET").stdin(Stdio::null());
    command
}

fn exec(options: &[&str], program: &[&str]) -> Output {
    rnicd().arg("exec").args(options).arg("--").args(program).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits until `condition` returns true.
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout: {what}");
        std::thread::yield_now();
    }
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().count() == 0
}

/// Returns the state of a process, or `None` if it has been waited for.
fn state(pid: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim().chars().next()
}

/// Returns true if a process has ended, waited for or not.
fn has_ended(pid: &str) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// Stops a process. Returns false if it has already ended.
fn stop(pid: &str) -> bool {
    signal("STOP", pid);
    wait_for("a stop or an end", || state(pid) == Some('T') || has_ended(pid));
    !has_ended(pid)
}

/// Returns the child of a process that has this word in its command line.
fn child_with(parent: &Child, word: &str) -> Option<String> {
    let parent = parent.id().to_string();
    std::fs::read_dir("/proc").unwrap().map_while(Result::ok).find_map(|entry| {
        let pid = entry.file_name().into_string().ok().filter(|pid| pid.parse::<u32>().is_ok())?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let of = stat.rsplit(')').next()?.split_whitespace().nth(1)? == parent;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        (of && line.split(|b| *b == 0).any(|w| w == word.as_bytes())).then_some(pid)
    })
}

/// Sends a signal. Ignores errors, because the process may have ended.
fn signal(name: &str, pid: &str) {
    Command::new("kill").args(["-s", name, pid]).stderr(Stdio::null()).status().unwrap();
}

#[test]
fn profile_decides_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = dir.path().join("tiny.toml");
    std::fs::write(&tiny, "device = \"tiny0\"\n").unwrap();
    let config = dir.path().join("rnicd.toml");
    std::fs::write(&config, "[wired]\nprofile = \"mlx5\"\n").unwrap();
    let config = ["--config", config.to_str().unwrap()];
    for (profile, device) in [("rxe", "rxe0"), ("./tiny.toml", "tiny0")] {
        let mut command = rnicd();
        command.arg("exec").args(config).args(["--profile", profile, "--", RNICCTL]);
        let output = command.args(["device", "list"]).current_dir(dir.path()).output().unwrap();
        let list = text(&output.stdout);
        assert!(list.contains(device), "{list}{}", text(&output.stderr));
    }
    let output = exec(&["--profile", "rxf"], &["true"]);
    let words = text(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{words}");
    assert!(words.starts_with("rnicd: --profile rxf: no profile \"rxf\"; known are "), "{words}");
}

#[test]
fn exec_passes_exit_codes_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for code in [0, 1, 42] {
        let script = format!("test -S \"$RNIC_SOCKET\" || exit 99; exit {code}");
        let status = rnicd()
            .args(["exec", "--", "sh", "-c", &script])
            .env("TMPDIR", dir.path())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(code));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn exec_dies_by_the_signal_of_its_program() {
    let dir = tempfile::tempdir().unwrap();
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11)] {
        let script = format!("kill -s {name} $$");
        let status = rnicd()
            .args(["exec", "--", "sh", "-c", &script])
            .env("TMPDIR", dir.path())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(number), "{name}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn exec_passes_signals_on() {
    // Not SIGINT: if it is ignored from the start, as in a background job, no shell traps it.
    for signal in ["TERM", "USR1", "USR2"] {
        let script = format!("sleep 600 & trap 'kill $!; exit 7' {signal}; echo ready; wait");
        let mut child = rnicd()
            .args(["exec", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(7), "{signal}");
    }
}

#[test]
fn exec_passes_the_loopback_option() {
    for way in ["tcp", "direct"] {
        let output = rnicd()
            .args(["exec", "--loopback", way, "--", env!("CARGO_BIN_EXE_rnicctl"), "status"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let line = text(&output.stdout);
        let line = line.lines().find(|l| l.starts_with("loopback")).unwrap();
        assert!(line.ends_with(way), "{line}");
    }
}

#[test]
fn exec_has_the_exit_codes_of_env() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "exit 0\n").unwrap();
    let wrong = dir.path().join("wrong.toml");
    std::fs::write(&wrong, "[limits]\nqqs = 4\n").unwrap();
    let script = script.to_str().unwrap();
    let wrong = wrong.to_str().unwrap();
    for (options, program, code, said) in [
        (&[][..], "/no/such/program", 127, "cannot run \"/no/such/program\": No such file"),
        (&[], "no-such-program", 127, "cannot run \"no-such-program\": No such file"),
        (&[], "", 127, "cannot run \"\": No such file"),
        (&[], script, 126, "Permission denied"),
        (&["--config", wrong], "true", 125, "limits.qqs = 4"),
        (&["--config", "/no/such.toml"], "true", 125, "/no/such.toml"),
        (&["--log", "/no/such/log"], "true", 125, "cannot write the log /no/such/log"),
        (&["--loopback", "sideways"], "true", 2, "sideways"),
    ] {
        let output = exec(options, &[program]);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{options:?} {program}: {stderr}");
        assert!(stderr.contains(said), "{options:?} {program}: {stderr}");
    }
}

#[test]
fn failed_daemon_start_has_a_reason() {
    let output = rnicd().args(["exec", "--", "true"]).env("TMPDIR", "/no/such/dir").output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert!(said.contains("/no/such/dir") && said.contains("No such file"), "{said}");
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("x".repeat(100));
    std::fs::create_dir(&deep).unwrap();
    let output = rnicd().args(["exec", "--", "true"]).env("TMPDIR", &deep).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = text(&output.stderr);
    assert!(said.contains("the daemon did not start: ") && said.contains("rnicd.sock"), "{said}");
    assert!(is_empty(&deep));
}

/// By SIGKILL, which it cannot catch.
#[test]
fn killed_exec_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let script = "pid=$(\"$0\" status | sed -n 's/^pid *//p'); echo $$ $pid; exec sleep 600";
    let mut child = rnicd()
        .args(["exec", "--", "sh", "-c", script, RNICCTL])
        .env("TMPDIR", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let (program, daemon) = line.trim().split_once(' ').unwrap();
    assert!(!is_empty(dir.path()) && !has_ended(program) && !has_ended(daemon), "{line}");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the program's end", || has_ended(program));
    wait_for("the daemon's end", || has_ended(daemon));
    wait_for("the folder's end", || is_empty(dir.path()));
}

#[test]
fn exec_fails_if_the_daemon_died() {
    let dir = tempfile::tempdir().unwrap();
    let script = "kill -9 $(\"$0\" status | sed -n 's/^pid *//p'); exit $1";
    // The program's own failure is returned unchanged.
    for (code, passed) in [("0", 125), ("7", 7)] {
        let output = rnicd()
            .args(["exec", "--", "sh", "-c", script, RNICCTL, code])
            .env("TMPDIR", dir.path())
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(passed), "{said}");
        assert!(passed == 7 || said.contains("the daemon died (signal: 9"), "{said}");
        assert!(is_empty(dir.path()));
    }
}

#[test]
fn exec_daemon_logs_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("loud.toml");
    // The daemon warns about this.
    std::fs::write(&config, "[mpa]\ncrc = false\n[log]\nlevel = \"debug\"\n").unwrap();
    let config = config.to_str().unwrap();
    let log = dir.path().join("log");
    let program = [RNICCTL, "status"];
    let output = exec(&["--config", config], &program);
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
    let output = exec(&["--config", config, "--log", log.to_str().unwrap()], &program);
    assert_eq!(text(&output.stderr), "");
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(said.contains("listening") && said.contains("session opened"), "{said}");
    let output = exec(&["--config", config, "--log", "-"], &program);
    assert!(text(&output.stderr).contains("session opened"), "{}", text(&output.stderr));
}

/// `config/rnicd.toml` and the errors of `log.level` name modules of `rnicd`.
#[test]
fn log_filters_select_modules_of_rnicd() {
    let logged = |filter: &str| {
        let mut command = rnicd();
        command.args(["exec", "--log", "-", "--", "true"]).env("RUST_LOG", filter);
        text(&command.output().unwrap().stderr)
    };
    assert!(logged("rnicd=info").contains("listening"));
    assert!(logged("off,rnicd::control=info").contains("listening"));
    assert!(!logged("off,rnicd::worker=info").contains("listening"));
}

#[test]
fn signals_of_a_terminal_do_not_end_the_daemon() {
    // To the whole process group, like Ctrl-C. The program queries the daemon after the signal.
    let script = "trap '\"$0\" status >/dev/null; exit $?' TERM; kill -s TERM 0; wait";
    let mut command = rnicd();
    command.args(["exec", "--", "sh", "-c", script, RNICCTL]).process_group(0);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_configuration_may_come_from_a_pipe() {
    let mut child = rnicd()
        .args(["exec", "--config", "/dev/stdin", "--", RNICCTL, "status"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"[device]\nname = \"piped0\"\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(text(&output.stdout).contains("piped0"), "{}", text(&output.stdout));
}

/// The daemon need not check its clients, because no other user can reach the socket.
#[test]
fn exec_socket_folder_is_private() {
    let script = "stat -c %a \"${RNIC_SOCKET%/*}\"";
    let mut command = Command::new("sh");
    // With umask 0.
    command.args(["-c", "umask 0; exec \"$0\" \"$@\""]).arg(env!("CARGO_BIN_EXE_rnicd"));
    let output = command.args(["exec", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(text(&output.stdout), "700\n", "{}", text(&output.stderr));
}

#[test]
fn exec_help_names_the_served_users() {
    let help = rnicd().args(["exec", "--help"]).output().unwrap();
    let said = text(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("Programs of other users cannot reach it"), "{said}");
    assert!(said.contains("127 if the program was not found"), "{said}");
}

/// Returns a demo with a small copy and its own folder for temporary files.
fn demo(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = rnicd();
    command.arg("demo").args(arguments).env("TMPDIR", folder);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn a_demo_whose_daemon_dies_fails() {
    let dir = tempfile::tempdir().unwrap();
    let demo = demo(dir.path(), &["--size", "1MiB"]).spawn().unwrap();
    let mut daemon = None;
    wait_for("the daemon", || {
        daemon = child_with(&demo, "private-daemon");
        daemon.is_some() && !is_empty(dir.path())
    });
    signal("KILL", &daemon.unwrap());
    let output = demo.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.contains("the daemon died (signal: 9"), "{said}");
    assert!(!text(&output.stdout).contains("verified in"), "{}", text(&output.stdout));
    assert!(is_empty(dir.path()));
}

/// A stopped process. It continues when this is dropped, even in a failed test.
struct Stopped(String);

impl Drop for Stopped {
    fn drop(&mut self) {
        signal("CONT", &self.0);
    }
}

/// At this point all steps are complete and verified.
#[test]
fn demo_fails_if_daemon_dies_after_last_step() {
    let dir = tempfile::tempdir().unwrap();
    let demo = demo(dir.path(), &["--size", "1MiB"]).spawn().unwrap();
    let mut last = None;
    wait_for("the last step", || {
        last = child_with(&demo, "measure");
        last.is_some()
    });
    // The step continues, and the demo does not see its end yet.
    let stopped = Stopped(demo.id().to_string());
    assert!(stop(&stopped.0));
    wait_for("the end of the last step", || has_ended(last.as_ref().unwrap()));
    signal("KILL", &child_with(&demo, "private-daemon").unwrap());
    drop(stopped);
    let output = demo.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{}{said}", text(&output.stdout));
    assert!(said.contains("the daemon died (signal: 9"), "{said}");
    assert!(!text(&output.stdout).contains("verified in"), "{}", text(&output.stdout));
    assert!(is_empty(dir.path()));
}

#[test]
fn demo_fails_if_any_part_fails() {
    for part in ["host", "visit", "receive", "send", "measure"] {
        let dir = tempfile::tempdir().unwrap();
        // The part may end before it is found or stopped.
        let hit = (0..20).find_map(|_| {
            let mut demo = demo(dir.path(), &["--size", "32MiB"]).spawn().unwrap();
            while demo.try_wait().unwrap().is_none() {
                if let Some(pid) = child_with(&demo, part)
                    && stop(&pid)
                {
                    signal("KILL", &pid);
                    return Some(demo.wait_with_output().unwrap());
                }
            }
            None
        });
        let output = hit.unwrap_or_else(|| panic!("{part} was never hit"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{part}: {said}");
        // The peer of this part may be reported first.
        assert!(said.contains(" process failed ("), "{part}: {said}");
        assert!(!text(&output.stdout).contains("verified in"), "{part}");
        assert!(is_empty(dir.path()), "{part}");
    }
}

#[test]
fn a_demo_whose_copy_fails_fails() {
    let dir = tempfile::tempdir().unwrap();
    // The file has length 0 according to `stat`, but is not empty.
    let output = demo(dir.path(), &["/proc/version"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.contains("/proc/version became longer"), "{said}");
    assert!(!text(&output.stdout).contains("verified in"), "{}", text(&output.stdout));
    assert!(is_empty(dir.path()));
}

#[test]
fn demo_refuses_an_unreadable_file() {
    let dir = tempfile::tempdir().unwrap();
    for (file, why) in [("/no/such/file", "No such file"), ("/dev", "not a regular file")] {
        let output = demo(dir.path(), &[file]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains(&format!("cannot read {file}: ")) && said.contains(why), "{said}");
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn a_demo_that_is_killed_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = demo(dir.path(), &["--size", "64MiB"]).spawn().unwrap();
    let mut daemon = None;
    wait_for("a copy under way", || {
        daemon = child_with(&demo, "private-daemon");
        daemon.is_some() && child_with(&demo, "receive").is_some()
    });
    demo.kill().unwrap();
    demo.wait().unwrap();
    wait_for("the daemon's end", || has_ended(daemon.as_ref().unwrap()));
    wait_for("the folder's end", || is_empty(dir.path()));
}

#[test]
fn demo_finishes_with_closed_stdout() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = demo(dir.path(), &["--size", "1MiB"]).spawn().unwrap();
    // The reader closes the pipe after the first line.
    let mut line = String::new();
    BufReader::new(demo.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let output = demo.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
}
