//! Memory order: programs that rely on more than the standards guarantee break, the violated rule
//! is named, and correct programs pass.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use rnic_tests::apart::{Apart, Side};
use rnic_tests::mpi::Collectives;
use rnic_tests::{
    DEADLINE, Daemon, PATHS, Process, built, engine, in_path, omit, on_path, ports, verbs,
};

/// Hold time of rules that break a program, in milliseconds: the maximum, because a busy machine
/// may run the program that late.
const HOLD: &str = "1000";

/// A daemon, and a program that runs over it.
struct Stage {
    daemon: Daemon,
    program: PathBuf,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// Returns a stage, or `None` without headers for the program.
    fn new(loopback: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let program = verbs::program("tests/order.c", folder.path())?;
        // The program relies on one worker, which executes requests of several QPs in turns.
        let daemon = Daemon::start(&engine(1, loopback));
        Some(Stage { daemon, program, _folder: folder })
    }

    /// Runs a part of the program with a fault rule. Returns its output.
    fn run(&self, part: &str, rule: &str) -> String {
        let mut command = verbs::command(&self.program, &self.daemon);
        run(command.arg(part).env("RNIC_FAULTS", rule))
    }

    /// Runs a part of the program with a rule that holds data for [`HOLD`].
    fn run_held(&self, part: &str, model: &str) -> String {
        in_time(|| {
            let mut command = verbs::command(&self.program, &self.daemon);
            run(command.args([part, HOLD]).env("RNIC_FAULTS", held(model)))
        })
    }

    /// Searches the first 16 messages for the inversion that breaks a part of the program.
    fn bisect(&self, part: &str, model: &str) -> String {
        in_time(|| {
            let mut command = Command::new(built::program("rnic-run"));
            command.args(["--no-start", "--lib-dir"]).arg(built::libraries());
            command.args(["--order-bisect", "16"]).arg(&self.program).args([part, HOLD]);
            command.env("RNIC_SOCKET", self.daemon.socket());
            command.env("RNIC_DEVICES", verbs::BOTH_DEVICES).env("RNIC_FAULTS", held(model));
            command.env_remove("LD_PRELOAD").env_remove("RNIC_LOG");
            let output = command.output().unwrap();
            let said =
                String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
            assert!(output.status.code() == Some(1) || is_late(&said), "{said}");
            said.into_owned()
        })
    }
}

/// Returns a rule that holds data for [`HOLD`].
fn held(model: &str) -> String {
    format!("do=order order=worst model={model} hold={HOLD}ms")
}

/// Runs a program that reports no errors. Returns its output.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{command:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn is_late(said: &str) -> bool {
    said.lines().any(|line| line == "late")
}

/// Repeats runs of the program until it accesses memory within the hold time.
fn in_time(mut run: impl FnMut() -> String) -> String {
    let begun = Instant::now();
    loop {
        let said = run();
        if !is_late(&said) {
            return said;
        }
        assert!(begun.elapsed() < DEADLINE, "{said}");
    }
}

/// Runs a part of the program on either path: it passes in strict order and under the models of
/// `passing`, and breaks under those of `breaking`.
fn breaks(part: &str, breaking: &[&str], passing: &[&str]) {
    for loopback in ["direct", "tcp"] {
        let Some(stage) = Stage::new(loopback) else { return };
        assert_eq!(stage.run(part, ""), "done", "{part}, {loopback}");
        for model in breaking {
            assert_eq!(stage.run_held(part, model), "broken", "{part}, {loopback}, {model}");
        }
        for model in passing {
            for order in ["worst", "random seed=1", "random seed=2"] {
                let rule = format!("do=order order={order} model={model} hold=1ms");
                assert_eq!(stage.run(part, &rule), "done", "{part}, {loopback}, {model}");
            }
        }
        stage.daemon.is_empty();
    }
}

#[test]
fn polling_on_the_last_word_breaks() {
    breaks("last-word", &["iwarp", "rc-relaxed"], &["rc"]);
}

#[test]
fn a_flag_in_a_second_write_breaks() {
    breaks("flag", &["iwarp", "rc-relaxed"], &["rc"]);
}

#[test]
fn a_version_check_without_checksum_breaks() {
    breaks("version", &["iwarp", "rc", "rc-relaxed"], &[]);
}

#[test]
fn an_atomic_beside_a_store_breaks() {
    breaks("counter", &["iwarp", "rc", "rc-relaxed"], &[]);
}

#[test]
fn bisection_names_both_requests_and_the_rule() {
    let Some(stage) = Stage::new("direct") else { return };
    let cases = [
        ("flag", "iwarp", "RDMA Write 1", "before RDMA Write 0", "RFC 5040 section 5.5"),
        ("last-word", "iwarp", "RDMA Write 0", "before RDMA Write 0", "RFC 5041 section 5.3"),
        ("version", "rc", "RDMA Read 0", "last 64 bytes of its source first", "PCI Express"),
        ("counter", "rc", "atomic operation 0", "store of a processor", "IBV_ATOMIC_HCA"),
    ];
    for (part, model, first, second, rule) in cases {
        let said = stage.bisect(part, model);
        for text in [first, second, rule, "fails if message 0 of a QP is inverted"] {
            assert!(said.contains(text), "{part}: {text} is missing in {said}");
        }
    }
}

/// Programs with a server and a client: the device, and command lines of both without port and
/// address.
const PAIRS: [(&str, &str, &str); 9] = [
    ("rnicd1", "ib_write_bw -F -n 200 -s 4096", "ib_write_bw -F -n 200 -s 4096"),
    ("rnicd1", "ib_write_lat -F -n 100", "ib_write_lat -F -n 100"),
    ("rnicd1", "ib_read_lat -F -n 50", "ib_read_lat -F -n 50"),
    ("rnicd1", "ib_send_lat -F -n 100", "ib_send_lat -F -n 100"),
    ("rnicd1", "ib_atomic_lat -F -n 50", "ib_atomic_lat -F -n 50"),
    ("rnicd1", "rping -s -C 20 -V", "rping -c -C 20 -V"),
    ("rnicd0", "ib_write_lat -R -F -n 100", "ib_write_lat -R -F -n 100"),
    ("rnicd0", "ib_read_lat -R -F -n 50", "ib_read_lat -R -F -n 50"),
    ("rnicd0", "rping -s -C 20 -V", "rping -c -C 20 -V"),
];

/// Returns rules for each model and order, with a hold time of 200 us.
fn rules() -> Vec<String> {
    let orders = ["worst", "random seed=3"];
    let rule = |model, order| format!("do=order order={order} model={model} hold=200us");
    let models = ["iwarp", "rc", "rc-relaxed"];
    models.iter().flat_map(|model| orders.map(|order| rule(model, order))).collect()
}

/// Runs a server and its client. The client is started again until it finds the server.
fn run_pair(daemon: &Daemon, rule: &str, (device, server, client): (&str, &str, &str)) {
    let port = ports::unused_port().to_string();
    let command = |line: &str, address: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = verbs::command(Path::new(words[0]), daemon);
        command.args(&words[1..]).args(["-p", &port]).env("RNIC_FAULTS", rule);
        command.env("RNIC_DEVICES", device);
        command.env("LD_PRELOAD", built::libraries().join("librnic_preload.so"));
        match words[0] {
            "rping" => command.args(["-a", "127.0.0.1"]),
            _ if address.is_empty() => &mut command,
            _ => command.arg(address),
        };
        command
    };
    let running = Process::start(command(server, ""));
    let begun = Instant::now();
    while !command(client, "127.0.0.1").output().unwrap().status.success() {
        assert!(begun.elapsed() < DEADLINE, "{client} with {rule}");
    }
    running.succeed();
}

#[test]
fn correct_programs_pass_under_every_model() {
    for loopback in ["direct", "tcp"] {
        let daemon = Daemon::start(&on_path(loopback));
        for pair in PAIRS {
            let program = pair.2.split(' ').next().unwrap_or_default();
            if !in_path(program) {
                omit(&format!("no {program} here: Debian packages perftest, rdmacm-utils"));
                continue;
            }
            for rule in rules() {
                run_pair(&daemon, &rule, pair);
            }
        }
        daemon.is_empty();
    }
}

#[test]
fn collectives_agree_under_every_model() {
    let Some(collectives) = Collectives::build() else { return };
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        for rule in rules() {
            let said = Process::start(collectives.command(&daemon, 4, &rule)).finish().1;
            let agree = said.iter().any(|line| line.contains("4 ranks agree"));
            assert!(agree, "{path}, {rule}: {said:?}");
        }
    }
}

#[test]
fn collectives_on_iwarp_agree_under_every_model() {
    let Some(collectives) = Collectives::build() else { return };
    let Some(host) = Apart::available() else { return };
    for path in PATHS {
        let daemon = host.daemon(Side::A, &on_path(path));
        for rule in rules() {
            let job = collectives.over_iwarp(&host, &daemon, 4, &rule);
            let said = Process::start(job).finish().1;
            let agree = said.iter().any(|line| line.contains("4 ranks agree"));
            assert!(agree, "{path}, {rule}: {said:?}");
        }
    }
}

#[test]
fn the_demo_passes_under_every_model() {
    for model in ["iwarp", "rc", "rc-relaxed"] {
        let rule = format!("do=order order=worst model={model} hold=100us");
        let mut command = Command::new(built::program("rnicd"));
        command.args(["demo", "--size", "1MiB"]).env("RNIC_FAULTS", &rule);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{rule}: {output:?}");
    }
}
