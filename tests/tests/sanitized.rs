//! A verbs program under AddressSanitizer, ThreadSanitizer and valgrind, with `rnic-run`: the tools
//! accept correct use and find faults of the program.

use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_tests::{Daemon, Process, built, omit, verbs};
use tempfile::TempDir;

/// The program, built with one set of options, and its own daemon.
struct Built {
    daemon: Daemon,
    program: PathBuf,
    _scratch: TempDir,
}

impl Built {
    /// Returns `None` if the headers are missing.
    fn new(options: &[&str]) -> Option<Built> {
        let scratch = tempfile::tempdir().unwrap();
        let options = [&["-g", "-O1"], options].concat();
        let program = verbs::program_with("tests/sanitized.c", scratch.path(), &options)?;
        let daemon = Daemon::start("");
        Some(Built { daemon, program, _scratch: scratch })
    }

    /// Runs the program with this fault under `rnic-run` and the tool `words`. Returns the exit
    /// code and output.
    fn run(&self, words: &[&str], fault: &[&str], variables: &[(&str, &str)]) -> (i32, String) {
        let mut command = Command::new(built::program("rnic-run"));
        command.arg("--no-start").arg("--lib-dir").arg(built::libraries());
        command.args(words).arg(&self.program).args(fault);
        command.env("RNIC_SOCKET", self.daemon.socket()).env_remove("RNIC_LOG");
        command.env("RNIC_DEVICES", rnic_tests::verbs::BOTH_DEVICES);
        for name in ["ASAN_OPTIONS", "TSAN_OPTIONS", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied());
        let (status, lines) = Process::start(command).finish();
        (status.code().unwrap_or(-1), lines.join("\n"))
    }
}

#[test]
fn address_sanitizer_finds_faults_of_a_program() {
    let Some(built) = Built::new(&["-fsanitize=address"]) else { return };
    let (code, text) = built.run(&[], &[], &[]);
    assert_eq!((code, &*text), (0, "done"));
    // The same from a shell, and with the user's own options.
    let options = [("ASAN_OPTIONS", "detect_leaks=0")];
    let (code, text) = built.run(&["sh", "-c", "\"$0\""], &[], &options);
    assert_eq!((code, &*text), (0, "done"));
    let (code, text) = built.run(&[], &["overflow"], &[]);
    assert!(code != 0 && text.contains("heap-buffer-overflow"), "{code}: {text}");
    built.daemon.is_empty();
}

#[test]
fn thread_sanitizer_finds_faults_of_a_program() {
    let Some(built) = Built::new(&["-fsanitize=thread"]) else { return };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/tsan.supp");
    let options = format!("suppressions={}", file.display());
    let options = [("TSAN_OPTIONS", &*options)];
    // Older runtimes need addresses with at most 28 random bits.
    let bits = std::fs::read_to_string("/proc/sys/vm/mmap_rnd_bits").unwrap_or_default();
    let fixed: &[&str] = match bits.trim().parse() {
        Ok(0..=28) | Err(_) => &[],
        Ok(29_u32..) => &["setarch", "-R"],
    };
    let (code, text) = built.run(fixed, &[], &options);
    assert_eq!((code, &*text), (0, "done"));
    let (code, text) = built.run(fixed, &["race"], &options);
    assert!(code != 0 && text.contains("data race"), "{code}: {text}");
    built.daemon.is_empty();
}

#[test]
fn valgrind_finds_faults_of_a_program() {
    let valgrind = ["valgrind", "--quiet", "--error-exitcode=9"];
    if Command::new(valgrind[0]).arg("--version").output().is_err() {
        return omit("no valgrind here: Debian package valgrind");
    }
    let Some(built) = Built::new(&[]) else { return };
    let (code, text) = built.run(&valgrind, &[], &[]);
    assert_eq!((code, &*text), (0, "done"));
    let (code, text) = built.run(&valgrind, &["overflow"], &[]);
    assert!(code == 9 && text.contains("Invalid write"), "{code}: {text}");
    built.daemon.is_empty();
}
