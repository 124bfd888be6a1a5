//! Fault rules as programs see them: a verbs program under `RNIC_FAULTS` and `rnicctl fault`, and
//! `rnicd exec --faults`.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use rnic_tests::apart::{Apart, Side};
use rnic_tests::mpi::Collectives;
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, on_path, ports, verbs};
use tempfile::TempDir;

/// Names of the devices.
const IWARP: &str = "rnicd0";
const ROCE: &str = "rnicd1";

struct Rig {
    daemon: Daemon,
    program: PathBuf,
    _scratch: TempDir,
}

impl Rig {
    /// Starts a daemon and compiles the program. Returns `None` without a C compiler.
    fn start(path: &str) -> Option<Rig> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program("tests/fault_rules.c", scratch.path())?;
        let daemon = Daemon::start(&on_path(path));
        Some(Rig { daemon, program, _scratch: scratch })
    }

    /// Returns a command that runs the program under rules of its own on a device.
    fn command_on(&self, device: &str, rules: &str, steps: &[&str]) -> Command {
        let mut command = verbs::command(&self.program, &self.daemon);
        command.args(steps).env("RNIC_FAULTS", rules).env("RNIC_DEVICES", device);
        command
    }

    /// Like [`Rig::command_on`], on the RoCE device.
    fn command(&self, rules: &str, steps: &[&str]) -> Command {
        self.command_on(ROCE, rules, steps)
    }

    /// Runs the program with rules for its own session on the RoCE device. Returns its output.
    fn run(&self, rules: &str, steps: &[&str]) -> Vec<String> {
        Process::start(self.command(rules, steps)).succeed()
    }

    /// Returns the number of diagnoses that name this fault.
    fn log_of(&self, fault: &str) -> usize {
        let log = self.daemon.json(&["fault", "log"]);
        let rule = format!("injected by fault {fault}");
        log.as_array().unwrap().iter().filter(|record| record["rule"] == rule.as_str()).count()
    }
}

/// Runs the program with rules for its own session on these devices and both paths, and compares
/// its output.
fn check_on(devices: &[&str], rules: &str, steps: &[&str], printed: &[&str]) {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        for device in devices {
            let found = Process::start(rig.command_on(device, rules, steps)).succeed();
            assert_eq!(found, printed, "{rules} on {device} and path {path}");
            // The rules have ended with the program.
            assert_eq!(rig.daemon.json(&["fault", "list"]).as_array().unwrap().len(), 0, "{rules}");
        }
        rig.daemon.is_empty();
    }
}

/// Like [`check_on`], on both devices.
fn check(rules: &str, steps: &[&str], printed: &[&str]) {
    check_on(&[IWARP, ROCE], rules, steps, printed);
}

/// Like [`check`], for rules after which the first QP is in ERR. A RoCE QP outlives its peer.
fn check_end(rules: &str, steps: &[&str], printed: &[&str]) {
    let state = [steps, &["state"]].concat();
    check_on(&[ROCE], rules, &state, &[printed, &["state 6 3"]].concat());
    check_on(&[IWARP], rules, &[steps, &["both_fail"]].concat(), printed);
}

#[test]
fn a_request_completes_with_any_status() {
    check_end(
        "do=complete status=IBV_WC_RETRY_EXC_ERR opcode=write nth=2",
        &["write", "wc", "read", "wc", "write", "wc"],
        &["wc 0", "wc 0", "wc 12"],
    );
}

/// Steps of a request of each kind. Of an iWARP request, Send and Write have completed before the
/// peer refuses them.
const MESSAGES: [(&str, &[&str], bool); 4] = [
    ("write", &["write", "wc"], true),
    ("send", &["send", "wc"], true),
    ("read", &["read", "wc"], false),
    ("atomic", &["atomic", "wc"], false),
];

/// Checks the second message of each kind under a rule with this effect: the status of its request
/// on each device, and the event of the QP that refuses it.
fn check_messages(effect: &str, [iwarp, roce]: [u8; 2], event: Option<&str>) {
    for (opcode, request, completes_early) in MESSAGES {
        let rules = format!("{effect} opcode={opcode} nth=2");
        let wait: &[&str] = if event.is_some() { &["event"] } else { &[] };
        let steps = [request, request, wait, &["both_fail"]].concat();
        for (device, status) in [(IWARP, if completes_early { 0 } else { iwarp }), (ROCE, roce)] {
            let status = format!("wc {status}");
            let printed = ["wc 0", &status].into_iter().chain(event).collect::<Vec<_>>();
            check_on(&[device], &rules, &steps, &printed);
        }
    }
}

#[test]
fn refused_messages_fail_both_ends() {
    check_messages("do=refuse as=access-error", [10, 10], Some("event 3 qp 1"));
    check_messages("do=refuse as=invalid-request", [11, 9], Some("event 2 qp 1"));
    check_messages("do=refuse as=operation-error", [11, 11], None);
}

#[test]
fn a_terminate_ends_both_qps() {
    check_messages("do=terminate code=1/2/01", [11, 9], None);
    check_messages("do=terminate code=0/1/02", [10, 10], None);
}

#[test]
fn rnr_naks_end_in_time_or_in_an_error() {
    check("do=rnr times=2 limit=1", &["send", "wc", "receive"], &["wc 0", "receive 0"]);
    let Some(rig) = Rig::start("direct") else { return };
    let mut command = rig.command("do=rnr times=5 limit=1", &["send", "wc"]);
    let printed = Process::start({
        command.env("RNR_RETRY", "3");
        command
    });
    assert_eq!(printed.succeed(), ["wc 13"]);
}

#[test]
fn a_held_completion_arrives_last() {
    check(
        "do=hold-completion by=50ms opcode=write nth=1",
        &["write", "read", "wc", "wc", "state"],
        &["wc 0", "wc 0", "state 3 3"],
    );
}

#[test]
fn held_completions_come_in_batches() {
    check(
        "do=hold-completion by=1h batch=3 opcode=write",
        &["write", "write", "write", "wc", "wc", "wc", "read", "wc"],
        &["wc 0", "wc 0", "wc 0", "wc 0"],
    );
}

#[test]
fn a_flush_completion_is_held_or_lost() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        let steps = ["write", "wc", "error", "write", "no_wc", "input", "wc"];
        let add = ["fault", "add", "do=hold-completion", "by=1h", "flushed=true"];
        for (device, last) in [(IWARP, "both_fail"), (ROCE, "state")] {
            rig.daemon.control(&add);
            let steps = [&steps[..], &[last]].concat();
            let mut program = Process::start(rig.command_on(device, "", &steps));
            program.line_after("wc 0");
            program.line_after("ready");
            rig.daemon.control(&["fault", "clear"]);
            program.ask("", "wc 5");
            if device == ROCE {
                program.line_after("state 6 3");
            }
            program.succeed();
        }
    }
    check_end(
        "do=lose-completion flushed=true limit=1",
        &["write", "wc", "error", "write", "write", "wc"],
        &["wc 0", "wc 5"],
    );
}

#[test]
fn completion_events_are_held_lost_and_added() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        for device in [IWARP, ROCE] {
            rig.daemon.control(&["fault", "add", "do=hold-event", "by=1h"]);
            let steps = ["arm", "write", "wc", "no_cq_event", "input", "cq_event", "no_cq_event"];
            let mut program = Process::start(rig.command_on(device, "", &steps));
            program.line_after("wc 0");
            program.line_after("ready");
            rig.daemon.control(&["fault", "clear"]);
            program.ask("", "cq_event");
            program.succeed();
        }
    }
    check(
        "do=lose-event nth=1",
        &["arm", "write", "wc", "no_cq_event", "arm", "write", "cq_event", "wc"],
        &["wc 0", "cq_event", "wc 0"],
    );
    check(
        "do=extra-event nth=1",
        &["write", "cq_event", "wc", "write", "wc", "no_cq_event"],
        &["cq_event", "wc 0", "wc 0"],
    );
}

/// A failed call does not lose the event.
#[test]
fn ibv_get_cq_event_fails() {
    check(
        "do=fail errno=EIO verb=get_cq_event nth=1",
        &["arm", "write", "wc", "get_cq_event", "cq_event"],
        &["wc 0", "get_cq_event 5", "cq_event"],
    );
}

#[test]
fn the_cq_of_a_request_fails() {
    check(
        "do=cq-fatal opcode=write nth=2",
        &["write", "wc", "write", "event"],
        &["wc 0", "event 0 cq 0"],
    );
}

#[test]
fn the_srq_of_a_request_fails() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        for device in [IWARP, ROCE] {
            let steps = ["send", "wc", "receive", "send", "wc", "event", "event", "event"];
            let rules = "do=srq-fatal opcode=send nth=2";
            let mut command = rig.command_on(device, rules, &[&steps[..], &["both_fail"]].concat());
            let mut printed = Process::start({
                command.env("SRQ", "1");
                command
            })
            .succeed();
            assert_eq!(printed[..3], ["wc 0", "receive 0", "wc 5"], "{device} on path {path}");
            // The QPs, which fail on workers of their own, have no more receives.
            printed[3..].sort();
            let events = ["event 14 srq", "event 16 qp 0", "event 16 qp 1"];
            assert_eq!(printed[3..], events, "{device} on path {path}");
        }
        rig.daemon.is_empty();
    }
}

#[test]
fn verbs_fail_with_the_error_number() {
    // The first registration is the program's own.
    check(
        "do=fail verb=reg_mr errno=ENOMEM nth=2",
        &["reg_mr", "reg_mr"],
        &["reg_mr 12", "reg_mr 0"],
    );
}

#[test]
fn a_failed_qp_raises_its_event() {
    check(
        "do=qp-fatal opcode=write nth=1; do=event event=path-mig opcode=read",
        &["read", "event", "wc", "write", "event"],
        &["event 6 qp 0", "wc 0", "event 1 qp 0"],
    );
}

#[test]
fn a_rule_takes_effect_before_its_request() {
    check(
        "do=qp-fatal opcode=write nth=2",
        &["write", "wc", "write", "wc", "event"],
        &["wc 0", "wc 5", "event 1 qp 0"],
    );
}

#[test]
fn a_port_goes_down_and_comes_back() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        let steps = ["write", "wc", "input", "event", "port", "write", "input"];
        let after = ["event", "wc", "port"];
        for device in [IWARP, ROCE] {
            let steps = [&steps[..], &after].concat();
            let mut program = Process::start(rig.command_on(device, "", &steps));
            program.line_after("ready");
            let add = rig.daemon.rnicctl(&["fault", "add", "name=flap", "do=port-down", "port=1"]);
            assert!(add.status.success(), "{add:?}");
            assert_eq!(rig.daemon.json(&["fault", "list"])[0]["in_effect"], true);
            assert_eq!(rig.daemon.json(&["status"])["faults"], 1);
            let state = || {
                let tree = format!("{}.tree", rig.daemon.socket().display());
                std::fs::read_to_string(format!("{tree}/class/infiniband/{device}/ports/1/state"))
            };
            program.ask("", "event 10 port 1");
            program.line_after("port 1");
            program.line_after("ready");
            let until = Instant::now() + DEADLINE;
            while state().unwrap().trim() != "1: DOWN" {
                assert!(Instant::now() < until, "the device files show the state within a second");
                std::thread::yield_now();
            }
            rig.daemon.control(&["fault", "clear", "flap"]);
            program.ask("", "event 9 port 1");
            // The request either waited, or exhausted its retries of half a second.
            let status = program.line_after("wc ");
            let permitted: &[_] = if device == ROCE { &["0", "12"] } else { &["0"] };
            assert!(permitted.contains(&status.as_str()), "{status}");
            program.line_after("port 4");
            program.succeed();
            assert_eq!(rig.daemon.json(&["status"])["faults"], 0);
        }
    }
}

#[test]
fn a_port_that_stays_down_exhausts_retries() {
    check_on(
        &[ROCE],
        "do=port-down verb=reg_mr nth=2",
        &["write", "wc", "reg_mr", "event", "port", "write", "wc", "state"],
        &["wc 0", "reg_mr 0", "event 10 port 1", "port 1", "wc 12", "state 6 3"],
    );
}

/// UCX gives up when the retries of its RC QPs are exhausted (`UCX_RC_TIMEOUT`,
/// `UCX_RC_RETRY_COUNT`). The rules select Reads, because the UD QPs of UCX send before it creates
/// RC QPs.
#[test]
fn an_mpi_job_outlasts_a_flap_within_its_retries() {
    let Some(collectives) = Collectives::build() else { return };
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let run = |rule: &str, timeout: &str| {
            let mut command = collectives.command(&daemon, 2, rule);
            command.env("UCX_RC_TIMEOUT", timeout);
            let (status, lines) = Process::start(command).finish();
            (status.success(), lines.join("\n"))
        };
        let (_, said) = run("do=port-down for=3s opcode=read nth=1", "8s");
        assert!(said.contains("2 ranks agree"), "{path}: {said}");
        let (succeeds, said) = run("do=port-down opcode=read nth=1", "50ms");
        assert!(!succeeds && said.contains("retry counter exceeded"), "{path}: {said}");
    }
}

/// iWARP has no retries, so the job waits for the port.
#[test]
fn an_mpi_job_on_iwarp_outlasts_a_flap() {
    let Some(collectives) = Collectives::build() else { return };
    let Some(host) = Apart::available() else { return };
    for path in PATHS {
        let daemon = host.daemon(Side::A, &on_path(path));
        let flap = "do=port-down for=3s opcode=send nth=5";
        let said = Process::start(collectives.over_iwarp(&host, &daemon, 2, flap)).finish().1;
        assert!(said.iter().any(|line| line.contains("2 ranks agree")), "{path}: {said:?}");
        let log = daemon.json(&["fault", "log"]);
        assert!(log.to_string().contains("injected by fault port-down"), "{path}: {log}");
    }
}

#[test]
fn a_device_fails() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        let steps = ["write", "event", "event", "event", "state"];
        let mut printed = rig.run("do=device-fatal opcode=write nth=1", &steps);
        // The QPs fail on different workers, so the order of the events varies.
        printed.sort();
        assert_eq!(printed, ["event 1 qp 0", "event 1 qp 1", "event 8", "state 6 6"], "{path}");
    }
}

#[test]
fn rules_are_listed_logged_and_cleared() {
    let Some(rig) = Rig::start("direct") else { return };
    let add = |words: &[&str]| rig.daemon.rnicctl(&[&["fault", "add"], words].concat());
    let rule = ["do=complete", "status=rem-access-err", "opcode=write", "every=2"];
    assert!(add(&rule).status.success());
    assert_eq!(rig.run("", &["write", "wc", "write", "wc"]), ["wc 0", "wc 10"]);
    let list = rig.daemon.json(&["fault", "list"]);
    let row = &list[0];
    assert_eq!((&row["name"], &row["seen"]), (&"complete".into(), &2.into()));
    assert_eq!((&row["injected"], &row["rule"]), (&1.into(), &rule.join(" ").into()));
    assert_eq!(rig.log_of("complete"), 1);
    // The same name is refused, and a second rule of the action gets another.
    let again = add(&["name=complete", "do=stop"]);
    let text = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(text.contains("there is already a fault complete"), "{text}");
    assert!(add(&rule).status.success());
    assert_eq!(rig.daemon.json(&["fault", "list"])[1]["name"], "complete-2");
    rig.daemon.control(&["fault", "clear", "complete"]);
    assert_eq!(rig.daemon.json(&["fault", "list"])[0]["name"], "complete-2");
    rig.daemon.control(&["fault", "clear"]);
    assert_eq!(rig.daemon.json(&["fault", "list"]).as_array().unwrap().len(), 0);
    let none = rig.daemon.rnicctl(&["fault", "clear", "complete"]);
    assert_eq!(none.status.code(), Some(1), "{none:?}");
}

#[test]
fn a_cleared_rule_leaves_existing_qps() {
    let Some(rig) = Rig::start("direct") else { return };
    let rule = ["fault", "add", "do=complete", "status=rem-op-err", "opcode=write"];
    rig.daemon.control(&rule);
    // Its session begins after the rule was set.
    let mut program = Process::start(rig.command("", &["read", "wc", "input", "write", "wc"]));
    program.line_after("wc 0");
    program.line_after("ready");
    rig.daemon.control(&["fault", "clear"]);
    program.ask("", "wc 0");
    program.succeed();
}

#[test]
fn wrong_rules_name_the_word() {
    let Some(rig) = Rig::start("direct") else { return };
    for (rule, text) in [
        ("do=fly", "do=fly: needs one of complete, delay-request"),
        ("do=complete", "do=complete needs status"),
        ("do=complete status=ok", "status=ok: needs one of loc-len-err"),
        ("do=complete status=fatal-err verb=reg_mr", "verb has no effect with do=complete"),
        ("do=fail errno=EIO verb=reg_mr device=rnicd1", "requests of reg_mr have no device"),
        ("do=complete status=fatal-err opcode=recv", "opcode=recv: with do=complete,"),
        ("do=stop nth=0", "nth=0: needs a whole number of at least 1"),
        ("stop", "\"stop\" is not of the form KEY=VALUE"),
        ("do=link rate=1", "rate=1: needs bits per second"),
        ("do=stop user=1", "not allowed by control.admins"),
    ] {
        if text.starts_with("not allowed") && rustix::process::getuid().is_root() {
            continue;
        }
        let failed = rig.daemon.rnicctl(&["fault", "add", rule]);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(failed.status.code() == Some(1) && said.contains(text), "{rule}: {said}");
        let mut command = rig.command(rule, &[]);
        let output = command.stderr(Stdio::piped()).output().unwrap();
        assert!(!output.status.success() || rule.contains("user"), "{rule}: the program ran");
    }
}

/// The rules of a profile are not listed as faults, and last as long as the daemon.
#[test]
fn rules_of_a_profile_concern_its_devices() {
    for path in PATHS {
        let scratch = tempfile::tempdir().unwrap();
        let Some(program) = verbs::program("tests/fault_rules.c", scratch.path()) else { return };
        let profile = scratch.path().join("eager.toml");
        for transport in ["roce", "iwarp"] {
            let text = format!("transport = {transport:?}\nrules = [\"do=extra-event\"]\n");
            std::fs::write(&profile, text).unwrap();
            let port = ports::unused_port();
            let wired = format!("[wired]\nport = {port}\nprofile = {profile:?}\n");
            let daemon = Daemon::start(&format!("{}{wired}", on_path(path)));
            daemon.control(&["fault", "clear"]);
            assert_eq!(daemon.json(&["status"])["faults"], 0);
            assert_eq!(daemon.json(&["fault", "list"]).as_array().unwrap().len(), 0);
            let mut command = verbs::command(&program, &daemon);
            // The CQ is not armed.
            let (steps, seen) = if transport == "roce" {
                (&["write", "cq_event", "wc"], &["cq_event", "wc 0"][..])
            } else {
                (&["write", "wc", "no_cq_event"], &["wc 0"][..])
            };
            command.args(steps).env("RNIC_FAULTS", "do=stop name=extra-event after=1h");
            let printed = Process::start(command).succeed();
            assert_eq!(printed, seen, "{transport} on path {path}");
            assert_eq!(daemon.json(&["fault", "log"]).as_array().unwrap().len(), 0);
        }
    }
}

#[test]
fn rules_of_users_precede_those_of_a_profile() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/fault_rules.c", scratch.path()) else { return };
    let profile = scratch.path().join("slow.toml");
    let rules = "transport = \"roce\"\nrules = [\"do=hold-completion by=1us\"]\n";
    std::fs::write(&profile, rules).unwrap();
    let port = ports::unused_port();
    let daemon = Daemon::start(&format!("[wired]\nport = {port}\nprofile = {profile:?}\n"));
    let mut command = verbs::command(&program, &daemon);
    command.args(["write", "wc"]).env("RNIC_FAULTS", "do=hold-completion by=1us name=mine");
    assert_eq!(Process::start(command).succeed(), ["wc 0"]);
    assert_ne!(daemon.json(&["fault", "log"]).as_array().unwrap().len(), 0);
}

#[test]
fn exec_sets_the_rules_of_a_file() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/fault_rules.c", scratch.path()) else { return };
    let file = scratch.path().join("faults.toml");
    let exec = |rules: &str| {
        std::fs::File::create(&file).unwrap().write_all(rules.as_bytes()).unwrap();
        let mut command = Command::new(built::program("rnicd"));
        command.args(["exec", "--faults"]).arg(&file).arg("--").arg(&program);
        command.args(["write", "wc"]).env("LD_LIBRARY_PATH", built::libraries());
        command.output().unwrap()
    };
    let output = exec("[[fault]]\ndo = \"complete\"\nstatus = \"loc-prot-err\"\nnth = 1\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "wc 4\n", "{output:?}");
    for (rules, text) in [
        ("[[fault]]\nstatus = \"x\"\n", "faults.toml: fault 1: do is missing"),
        ("[[faults]]\n", "unknown field `faults`"),
        ("x", "faults.toml: TOML parse error"),
    ] {
        let output = exec(rules);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(125) && said.contains(text), "{said}");
    }
}
