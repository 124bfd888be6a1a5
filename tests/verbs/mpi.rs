//! Open MPI over UCX over our device. UCX 1.13 wires its RC queue pairs up by datagrams.
//!
//! A run counts only if UCX itself has said that messages went by the transport that was meant, of
//! our device.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;

use rnic_tests::apart::{Apart, Side};
use rnic_tests::{Daemon, Process, binaries, omit, on_path, verbs};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::ALONE;

/// What UCX may use, and what it must have said that it uses for messages.
pub const TRANSPORTS: [(&str, &str); 2] = [
    ("rc_verbs,ud_verbs,self", "tag(rc_verbs/rnicd1:1)"),
    ("ud_verbs,self", "tag(ud_verbs/rnicd1:1)"),
];

/// What is run, and with how many ranks.
pub const PROGRAMS: [(&str, usize); 3] = [
    ("`NPopenmpi -u 16384`, of Debian's netpipe-openmpi", 2),
    ("collectives whose results are compared (`tests/verbs/collectives.c`)", 4),
    ("the same without end, one rank killed: the others end with an error, nothing is left", 4),
];

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/collectives.c");

/// A host with a daemon.
struct Host {
    scratch: TempDir,
    daemon: Daemon,
    /// Ends after the daemon on it.
    apart: Apart,
}

impl Host {
    fn new() -> Option<Self> {
        for (program, package) in [
            ("mpirun", "openmpi-bin"),
            ("mpicc", "libopenmpi-dev"),
            ("NPopenmpi", "netpipe-openmpi"),
        ] {
            let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
            if !found.is_ok_and(|found| found.status.success()) {
                omit(&format!("no {program} here: Debian package {package}"));
                return None;
            }
        }
        let apart = match Apart::new() {
            Ok(apart) => apart,
            Err(e) => {
                omit(&format!("no network namespaces here: {e}"));
                return None;
            }
        };
        let daemon = apart.daemon(Side::A, binaries!(), &on_path("direct"));
        let scratch = tempfile::tempdir().expect("a temporary directory");
        Some(Host { scratch, daemon, apart })
    }

    /// Starts a program with so many ranks.
    fn run(&self, transports: &str, ranks: usize, program: &[&str]) -> Process {
        let mut command = self.apart.on(Side::A);
        command.args(["mpirun", "--oversubscribe", "-np", &ranks.to_string()]);
        // All ranks are here: no remote shell is needed, or there.
        command.args(["--mca", "plm", "isolated"]);
        command.args(["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any"]);
        command.args(["--mca", "opal_common_ucx_devices", "any"]);
        command.args(["-x", &format!("UCX_TLS={transports}"), "-x", "UCX_LOG_LEVEL=info"]);
        command.args(["-x", "LD_LIBRARY_PATH", "-x", "LD_PRELOAD", "-x", "RNIC_SOCKET"]);
        command.args(["-x", "RNIC_TREE"]).args(program);
        let (libraries, socket) = (verbs::directory(), self.daemon.socket());
        command.env("LD_LIBRARY_PATH", libraries).env("RNIC_SOCKET", socket);
        command.env("LD_PRELOAD", libraries.join("librnic_preload.so"));
        command.env("RNIC_TREE", socket.with_file_name("rnicd.sock.tree"));
        // It is root of its namespace only.
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.env("TMPDIR", self.scratch.path()).current_dir(self.scratch.path());
        command.process_group(0);
        Process::start(command)
    }

    fn collectives(&self) -> PathBuf {
        let program = self.scratch.path().join("collectives");
        let mut cc = Command::new("mpicc");
        cc.args(["-Wall", "-Werror", "-O1", "-o"]).args([&program, Path::new(SOURCE)]);
        Process::start(cc).succeed();
        program
    }
}

fn says(lines: &[String], text: &str) {
    assert!(lines.iter().any(|line| line.contains(text)), "no {text:?} in\n{}", lines.join("\n"));
}

/// NetPIPE, which sends messages of many sizes to and fro.
#[test]
fn messages_of_every_size_go_to_and_fro() {
    let Some(host) = Host::new() else { return };
    for (transports, tag) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (status, lines) =
            host.run(transports, 2, &["NPopenmpi", "-u", "16384", "-n", "20"]).finish_within(120);
        drop(alone);
        assert!(status.success(), "{transports}: {status}\n{}", lines.join("\n"));
        says(&lines, tag);
        says(&lines, " 16384 bytes");
        host.daemon.is_empty();
    }
}

#[test]
fn four_ranks_agree_on_what_their_collectives_come_to() {
    let Some(host) = Host::new() else { return };
    let program = host.collectives();
    for (transports, tag) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = program.to_str().expect("a path in letters");
        let (status, lines) = host.run(transports, 4, &[program]).finish_within(120);
        drop(alone);
        assert!(status.success(), "{transports}: {status}\n{}", lines.join("\n"));
        says(&lines, "4 ranks agree");
        says(&lines, tag);
        host.daemon.is_empty();
    }
}

/// The others end with an error, and the daemon has nothing left of any.
#[test]
fn when_a_rank_is_killed_the_others_end_and_nothing_is_left() {
    let Some(host) = Host::new() else { return };
    let program = host.collectives();
    for (transports, _) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = program.to_str().expect("a path in letters");
        let mut run = host.run(transports, 4, &[program, "forever"]);
        run.line_after("4 ranks");
        kill_process(rank_of(&run, program), Signal::KILL).expect("it is there");
        let (status, lines) = run.finish_within(120);
        drop(alone);
        assert!(!status.success(), "{transports}: {}", lines.join("\n"));
        host.daemon.is_empty();
    }
}

/// One of the processes of this run that execute the program.
fn rank_of(run: &Process, program: &str) -> Pid {
    let all = std::fs::read_dir("/proc").expect("processes").flatten();
    let ours = all.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let exe = std::fs::read_link(entry.path().join("exe")).ok()?;
        (exe == Path::new(program)).then(|| Pid::from_raw(pid)).flatten()
    });
    // The name of the program is this test's own: nobody else executes it.
    ours.last().unwrap_or_else(|| panic!("no rank of process {} runs", run.id()))
}
