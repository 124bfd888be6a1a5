//! Open MPI over UCX over the RoCE device. UCX 1.13 connects its RC QPs over UD.
//!
//! A run counts only if UCX itself reports that messages used the intended transport of our device,
//! and if the daemons have counted its bytes.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::PoisonError;
use std::time::Instant;

use rnic_tests::apart::Side;
use rnic_tests::{DEADLINE, Process, installed};
use rustix::process::{Pid, Signal, kill_process};

use crate::ALONE;
use crate::case::{Group, Setting};
use crate::stage::Stage;

/// Values of `UCX_TLS`, and the transport that UCX must report for its messages.
pub const TRANSPORTS: [(&str, &str); 2] = [
    ("rc_verbs,ud_verbs,self", "tag(rc_verbs/rnicd1:1)"),
    ("ud_verbs,self", "tag(ud_verbs/rnicd1:1)"),
];

/// Programs and their numbers of ranks.
pub const PROGRAMS: [(&str, usize); 3] = [
    ("`NPopenmpi -u 16384` from Debian's netpipe-openmpi", 2),
    ("collectives with checked results (`tests/verbs/collectives.c`)", 4),
    ("the same in a loop, one rank killed: the others exit with an error, no objects remain", 4),
];

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/collectives.c");

/// The group for [`Stage::new`]. Its cases are below.
const GROUP: Group = Group {
    program: "mpirun",
    package: "openmpi-bin",
    manner: "",
    devices: "",
    config: "",
    cases: &[],
};

/// Ranks of a run, half of them at each end if there are two.
struct Ranks {
    setting: Setting,
    stage: Stage,
}

impl Ranks {
    fn new(setting: Setting) -> Option<Self> {
        if !installed("mpicc", "libopenmpi-dev") || !installed("NPopenmpi", "netpipe-openmpi") {
            return None;
        }
        Some(Ranks { setting, stage: Stage::new(setting, &GROUP)? })
    }

    /// Runs a program with `ranks` ranks, and returns its output. Bytes must have been placed, and
    /// no object may remain.
    fn succeed(&self, transports: &str, ranks: usize, program: &[&str]) -> Vec<String> {
        let before = self.stage.read_figures();
        let (status, lines) = self.start(transports, ranks, program).finish_within(300);
        assert!(status.success(), "{transports}: {status}\n{}", lines.join("\n"));
        self.are_gone();
        let after = self.stage.read_figures();
        // The programs send far more.
        if let Err(why) = self.stage.went_over(1 << 16, &before, &after) {
            panic!("{transports}: {why}\n{}", lines.join("\n"));
        }
        lines
    }

    /// Starts a program with `ranks` ranks, half at each end if there are two.
    fn start(&self, transports: &str, ranks: usize, program: &[&str]) -> Process {
        let mut command = self.stage.apart.on(Side::A);
        command.args(["mpirun", "--oversubscribe", "-np", &ranks.to_string()]);
        match self.setting {
            // All ranks run here, without a remote shell.
            Setting::Direct => command.args(["--mca", "plm", "isolated"]),
            Setting::Tcp | Setting::Users => {
                let hosts = ENDS.map(|end| format!("{}:{}", name(end), ranks / 2));
                command.args(["-H", &hosts.join(",")]);
                command.args(["--mca", "plm", "rsh", "--mca", "plm_rsh_no_tree_spawn", "1"]);
                command.args(["--mca", "plm_rsh_agent", &self.agent()])
            }
        };
        command.args(["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any"]);
        command.args(["--mca", "opal_common_ucx_devices", "any"]);
        command.args(["-x", &format!("UCX_TLS={transports}"), "-x", "UCX_LOG_LEVEL=info"]);
        // The launcher at each end sets the rest of the ranks' environment.
        command.args(program).envs(self.environment(0));
        command.current_dir(self.stage.scratch()).process_group(0);
        Process::start(command)
    }

    /// Writes the substitute for ssh, and returns its command line.
    fn agent(&self) -> String {
        let mut script = String::from("# Arguments: a host name, then words for its shell.\n");
        script.push_str("name=$1; shift\ncase $name in\n");
        for end in ENDS {
            let set = |(name, value): (&str, PathBuf)| format!("{name}='{}' ", value.display());
            let environment: String = self.environment(end).into_iter().map(set).collect();
            let enter = self.stage.apart.from_within(self.stage.side(end));
            let enter: Vec<_> = [enter.get_program()].into_iter().chain(enter.get_args()).collect();
            let enter = enter.join(OsStr::new(" "));
            // Open MPI tells hosts apart by their own host names.
            let rename = "unshare --uts sh -c 'hostname \"$0\" && exec \"$@\"' \"$name\"";
            let name = name(end);
            let user = self.stage.as_user(end).join(" ");
            let enter = enter.display();
            writeln!(script, "{name}) {environment}exec {enter} {rename} {user} sh -c \"$*\" ;;")
                .expect("writing to a String succeeds");
        }
        script.push_str("esac\n");
        let file = self.stage.scratch().join("agent");
        std::fs::write(&file, script).expect("a writable directory");
        format!("sh {}", file.display())
    }

    /// Returns the environment of the processes that start ranks at an end.
    fn environment(&self, end: usize) -> Vec<(&'static str, PathBuf)> {
        let of_root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
        let mut all = self.stage.environment(end).to_vec();
        all.extend(of_root.map(|name| (name, "1".into())));
        all.push(("TMPDIR", self.stage.folder(end)));
        all
    }

    fn collectives(&self) -> PathBuf {
        let program = self.stage.scratch().join("collectives");
        let mut cc = Command::new("mpicc");
        cc.args(["-Wall", "-Werror", "-O1", "-o"]).args([&program, Path::new(SOURCE)]);
        Process::start(cc).succeed();
        program
    }

    /// Waits until the daemons hold no objects of a run and its processes have ended.
    fn are_gone(&self) {
        self.stage.is_empty();
        // Processes that start remote ranks end by themselves when they lose mpirun.
        let deadline = Instant::now() + DEADLINE;
        while let Some(pid) = processes().find(|pid| self.is_ours(*pid)) {
            let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
            assert!(Instant::now() < deadline, "{pid} remains: {command:?}");
            std::thread::yield_now();
        }
    }

    /// Returns true if a process belongs to a run: only those have a `TMPDIR` here.
    fn is_ours(&self, pid: i32) -> bool {
        let scratch = self.stage.scratch().as_os_str().as_bytes();
        variable(pid, "TMPDIR").is_some_and(|files| files.starts_with(scratch))
    }
}

/// The ends of a stage.
const ENDS: [usize; 2] = [0, 1];

/// Returns the host name of an end for Open MPI. It need not be resolvable.
fn name(end: usize) -> String {
    format!("rnicd-end-{end}")
}

fn says(lines: &[String], text: &str) {
    assert!(lines.iter().any(|line| line.contains(text)), "no {text:?} in\n{}", lines.join("\n"));
}

/// NetPIPE, which sends messages of many sizes back and forth.
fn messages_of_every_size(setting: Setting) {
    let Some(ranks) = Ranks::new(setting) else { return };
    for (transports, tag) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = ["NPopenmpi", "-u", "16384", "-n", "20", "-o", "/dev/null"];
        let lines = ranks.succeed(transports, 2, &program);
        drop(alone);
        says(&lines, tag);
        says(&lines, " 16384 bytes");
    }
}

fn collectives(setting: Setting) {
    let Some(ranks) = Ranks::new(setting) else { return };
    let program = ranks.collectives();
    for (transports, tag) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = program.to_str().expect("a UTF-8 path");
        let lines = ranks.succeed(transports, 4, &[program]);
        drop(alone);
        says(&lines, "4 ranks agree");
        says(&lines, tag);
    }
}

/// The other ranks exit with an error, and the daemons hold no objects of any rank.
fn a_rank_is_killed(setting: Setting) {
    let Some(ranks) = Ranks::new(setting) else { return };
    let program = ranks.collectives();
    for (transports, _) in TRANSPORTS {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let program = program.to_str().expect("a UTF-8 path");
        let mut run = ranks.start(transports, 4, &[program, "forever"]);
        run.line_after("4 ranks");
        // With two ends, the last rank runs at the second end.
        let is_last = |pid: &i32| {
            ranks.is_ours(*pid) && variable(*pid, "OMPI_COMM_WORLD_RANK").as_deref() == Some(b"3")
        };
        let last = processes().find(is_last).and_then(Pid::from_raw).expect("the last rank runs");
        kill_process(last, Signal::KILL).expect("the last rank runs");
        let (status, lines) = run.finish_within(300);
        drop(alone);
        assert!(!status.success(), "{transports}: {}", lines.join("\n"));
        ranks.are_gone();
    }
}

/// Returns all processes.
fn processes() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").expect("a mounted /proc").flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns a variable of a process's environment.
fn variable(pid: i32, name: &str) -> Option<Vec<u8>> {
    let all = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let of = |one: &[u8]| Some(one.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_vec());
    all.split(|byte| *byte == 0).find_map(of)
}

/// Tests of each setting.
macro_rules! settings {
    ($($name:ident: $setting:ident,)*) => {
        $(mod $name {
            use super::*;

            #[test]
            fn messages_of_every_size_go_to_and_fro() {
                messages_of_every_size(Setting::$setting);
            }

            #[test]
            fn four_ranks_agree_on_collectives() {
                collectives(Setting::$setting);
            }

            #[test]
            fn killed_rank_ends_the_others() {
                a_rank_is_killed(Setting::$setting);
            }
        })*
    };
}

settings! {
    between_processes_of_one_daemon: Direct,
    between_hosts: Tcp,
    between_users: Users,
}
