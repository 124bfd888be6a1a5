//! Reloads do not delay clients, whatever the file is: large, unreadable or not a file.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_client::Context;
use rnic_tests::{DEADLINE, Daemon, Process, built};
use rustix::fs::{CWD, Mode, mkfifoat};
use rustix::process::Signal;

fn write(daemon: &Daemon, config: &str) {
    // The rename is atomic: a reload reads either the old or the new file.
    let new = daemon.dir().join("new.toml");
    std::fs::write(&new, config).unwrap();
    std::fs::rename(new, daemon.dir().join("rnicd.toml")).unwrap();
}

/// Waits until this limit is in force. Returns the number of queries answered until then.
fn answered_before(context: &Context, sges: u8) -> u64 {
    let deadline = Instant::now() + DEADLINE;
    let mut answered = 0;
    while context.device().unwrap().max_sge != sges {
        answered += 1;
        assert!(Instant::now() < deadline, "the reload has no effect");
    }
    answered
}

/// Returns a configuration just below the maximum size, with as many rules as fit.
fn many_rules(sges: u8) -> String {
    let mut text = format!("[limits]\nsge = {sges}\n");
    let mut uid = 100_000;
    while text.len() < (1 << 20) - 100 {
        text.push_str(&format!("[[user]]\nwho={uid}\n"));
        uid += 1;
    }
    text
}

#[test]
fn commands_are_answered_while_a_file_is_read() {
    let daemon = Daemon::start("");
    let context = Context::open_at(daemon.socket()).unwrap();
    write(&daemon, &many_rules(5));
    daemon.signal(Signal::HUP);
    // If the control thread read the file, it would answer at most one query first.
    let answered = answered_before(&context, 5);
    assert!(answered > 10, "only {answered} commands were answered during the reload");
    // The daemon compares the old configuration with the new one. This time both are long.
    write(&daemon, &many_rules(6));
    daemon.signal(Signal::HUP);
    let answered = answered_before(&context, 6);
    assert!(answered > 10, "only {answered} commands were answered during the reload");
}

#[test]
fn a_signal_during_a_reload_is_not_lost() {
    let daemon = Daemon::start("");
    let context = Context::open_at(daemon.socket()).unwrap();
    for sges in [3, 4] {
        write(&daemon, &many_rules(sges + 5));
        daemon.signal(Signal::HUP);
        // Far more signals than reloads. The file is read once more after the last signal.
        for _ in 0..100 {
            daemon.signal(Signal::HUP);
            context.status().unwrap();
        }
        write(&daemon, &format!("[limits]\nsge = {sges}\n"));
        daemon.signal(Signal::HUP);
        answered_before(&context, sges);
    }
    let lines = daemon.stop();
    let reloads = lines.iter().filter(|line| line.contains("configuration reloaded")).count();
    assert!(reloads < 200, "{reloads} reloads were queued");
}

/// Returns files that the daemon refuses to read, and the reasons.
fn not_to_be_read(folder: &Path) -> Vec<(std::path::PathBuf, &'static str)> {
    let fifo = folder.join("fifo");
    mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
    let zero = folder.join("zero");
    std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
    let large = folder.join("large");
    std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    let directory = folder.join("directory");
    std::fs::create_dir(&directory).unwrap();
    vec![
        (fifo, "it is a FIFO, not a regular file"),
        (zero, "it is a character device, not a regular file"),
        (large, "it has more than 1048576 bytes (1 MiB)"),
        (directory, "it is a directory, not a regular file"),
    ]
}

#[test]
fn reload_refuses_unbounded_files() {
    let mut daemon = Daemon::start("[limits]\nsge = 7\n");
    let context = Context::open_at(daemon.socket()).unwrap();
    let place = daemon.dir().join("rnicd.toml");
    for (path, why) in not_to_be_read(daemon.dir()) {
        std::fs::rename(path, &place).unwrap_or_else(|_| {
            // A rename cannot replace a file with a folder.
            std::fs::remove_file(&place).unwrap();
            std::fs::create_dir(&place).unwrap();
        });
        daemon.signal(Signal::HUP);
        let said = daemon.line_after("configuration not reloaded, the previous one remains: ");
        assert!(said.contains("rnicd.toml: ") && said.contains(why), "{said}");
        assert_eq!(context.device().unwrap().max_sge, 7);
    }
    std::fs::remove_dir(&place).unwrap();
    write(&daemon, "[limits]\nsge = 8\n");
    daemon.signal(Signal::HUP);
    answered_before(&context, 8);
}

#[test]
fn start_refuses_unbounded_files() {
    let folder = tempfile::tempdir().unwrap();
    for (path, why) in not_to_be_read(folder.path()) {
        for command in ["check-config", "run"] {
            let mut rnicd = Command::new(built::program("rnicd"));
            rnicd.arg(command).arg("--config").arg(&path);
            rnicd.env("XDG_RUNTIME_DIR", folder.path());
            let (status, lines) = Process::start(rnicd).finish();
            assert_eq!(status.code(), Some(78), "{command}: {lines:?}");
            let said = lines.join("\n");
            assert!(said.contains(&path.display().to_string()) && said.contains(why), "{said}");
        }
    }
}
