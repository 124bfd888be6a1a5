//! A daemon with an attacker on one CPU and a measured bystander on another, and a second daemon
//! without an attacker as the baseline.
//!
//! Measurement windows of the two daemons alternate. While the baseline is measured, the attacked
//! daemon and the attacker are stopped. Rates are judged by the median ratio of adjacent windows,
//! because a temporarily slow machine affects both windows of a pair. Times are judged by the
//! maximum. An unclear verdict extends the measurement.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_client::{Context, FaultRow, ListKind, Rows};
use rustix::process::Signal;

use super::bystander::TIMEOUT;
use super::{Attack, cpu};
use crate::built;
use crate::{DEADLINE, Daemon, Process};

/// An attack and its setup and bounds.
#[derive(Clone, Copy)]
pub struct Case {
    /// The attack.
    pub attack: Attack,
    /// Additional configuration.
    pub config: &'static str,
    /// Fault rules in force for the attacker.
    pub faults: &'static str,
    /// Shell command that limits the daemon.
    pub limit: &'static str,
    /// True if slow peers are measured as well.
    pub peers: bool,
    /// Minimum share of the baseline rate that the pair must keep.
    pub share: f64,
    /// Round trips per second that suffice regardless of the baseline, for attacks where the
    /// kernel's scheduler sets the pace and a faster processor does not help.
    pub enough: f64,
    /// Maximum growth of the kernel's TCP memory, in KiB.
    pub kernel: u64,
    /// QP limit per user.
    pub qps: u32,
    /// Length of a window of commands and sessions next to the attacker, in milliseconds.
    pub window: u32,
    /// Operations of the attack before the first window. The wait takes at most `HEAD_START`.
    pub after: u64,
}

impl Case {
    /// A case with the default bounds.
    pub const fn new(attack: Attack) -> Self {
        Case {
            attack,
            config: "",
            faults: "",
            limit: "true",
            peers: false,
            share: SHARE,
            enough: f64::INFINITY,
            kernel: u64::MAX,
            qps: 2500,
            window: WINDOW,
            after: 0,
        }
    }
}

/// Time limit for the attack to take effect.
const HEAD_START: Duration = Duration::from_secs(5);
/// Default window in milliseconds: long enough for hundreds of commands.
const WINDOW: u32 = 30;
/// Default share of the baseline rate that the pair must keep.
const SHARE: f64 = 1.0 / 3.0;
/// Maximum time of a command or of the end of a session.
const COMMAND: Duration = Duration::from_millis(50);
/// Maximum time to open a session.
const SESSION: Duration = Duration::from_millis(100);
/// Maximum number of log lines during an attack.
pub(super) const LINES: usize = 60;

/// Returns a configuration under which each attack reaches its full strength, with limits low
/// enough to show unbounded growth within seconds.
fn config(case: &Case, workers: u32) -> String {
    let qps = case.qps;
    let more = case.config;
    format!(
        "
[control]
mode = \"0666\"
[engine]
workers = {workers}
[limits]
sessions = 200
partial_bytes = \"16MiB\"
unsent_bytes = \"16MiB\"
qps = {}
events = 64
mrs = 10000
windows = 2000
srqs = 64
[limits.user]
sessions = 150
qps = {qps}
mrs = 5000
windows = 1000
srqs = 32
[limits.session]
qps = {qps}
mrs = 5000
windows = 1000
srqs = 32
{more}
",
        qps + 100
    )
}

/// Measurements of one window, or a summary of many.
#[derive(Clone, Debug, Default)]
struct Measurements {
    /// Round trips per second.
    rate: f64,
    /// Longest registration, deregistration, destruction, opening of a session and end of a
    /// session.
    longest: [Duration; 5],
    /// Share of the peers that were served.
    served: f64,
}

/// Names and limits of [`Measurements::longest`].
const TIMED: [(&str, Duration); 5] = [
    ("register", COMMAND),
    ("deregister", COMMAND),
    ("destroy", COMMAND),
    ("new session", SESSION),
    ("end of a session", COMMAND),
];

/// Results of an attack.
pub struct Outcome {
    name: String,
    workers: u32,
    /// Measurements of the daemon without an attacker.
    alone: Measurements,
    /// Measurements of the attacked daemon.
    attacked: Measurements,
    /// Median of the ratios of adjacent windows.
    ratio: f64,
    windows: usize,
    /// Operations of the attacker per second, during the windows of the attacked daemon.
    done: f64,
    /// CPU share of the control thread during the windows of the attacked daemon.
    control: f64,
    /// Maximum growth of the daemon's own memory in KiB, and its limit.
    grown: (u64, u64),
    /// TCP memory of the kernel in KiB: the maximum, and the value before the attack.
    kernel: (u64, u64),
    lines: usize,
}

/// A daemon and its bystander.
pub(super) struct Stage {
    pub(super) daemon: Daemon,
    bystander: Process,
    peers: bool,
}

/// Runs a case against a daemon with `workers` workers. A single worker shares a CPU with the
/// pair. With several workers, rates are measured but not judged, because any of them may share a
/// CPU with the attacker.
///
/// # Panics
///
/// If the attack exceeds its bounds, or makes no progress.
pub fn play(case: &Case, workers: u32) -> Outcome {
    let cpus = cpu::allowed();
    let here = cpus[0];
    let there = *cpus.last().expect("a CPU to run on");
    // An attack on the worker's CPU leaves the other CPU to the pair.
    let (pair, attacker) = match case.attack {
        Attack::BusyLoop => (there, here),
        _ => (here, there),
    };
    let [mut quiet, mut stage] = [(); 2].map(|()| Stage::new(case, workers, [here, pair]));
    let allowed = allowed(&stage.daemon);
    // The first window allocates everything that is allocated only once.
    stage.all(WINDOW);
    quiet.all(WINDOW);
    let memory = stage.daemon.anonymous_kib();
    let kernel = tcp_memory();
    let part = ["overload", &case.attack.name(), &attacker.to_string()];
    let mut attacker = stage.daemon.actor_as(61_102, &part);
    attacker.line_after("under way");
    let mut outcome = Outcome {
        name: case.attack.name(),
        workers,
        alone: Measurements::default(),
        attacked: Measurements::default(),
        ratio: 0.0,
        windows: 0,
        done: 0.0,
        control: 0.0,
        grown: (0, allowed),
        kernel: (kernel, kernel),
        lines: 0,
    };
    let latest = Instant::now() + HEAD_START;
    while attacker.line_after("done ").parse().unwrap_or(0u64) < case.after
        && Instant::now() < latest
    {}
    let mut alone = Vec::new();
    let mut attacked = Vec::new();
    let mut time = Duration::ZERO;
    let mut done = 0;
    let mut control = 0;
    let began = Instant::now();
    loop {
        attacker.signal(Signal::STOP);
        stage.daemon.signal(Signal::STOP);
        alone.push(quiet.all(WINDOW));
        stage.daemon.signal(Signal::CONT);
        attacker.signal(Signal::CONT);
        let window = Instant::now();
        let ticks = cpu::ticks(stage.daemon.pid());
        let before = attacker.line_after("done ").parse().unwrap_or(0u64);
        attacked.push(stage.all(case.window));
        let after = attacker.latest_after("done ").and_then(|n| n.parse().ok());
        done += after.unwrap_or(before).saturating_sub(before);
        control += cpu::ticks(stage.daemon.pid()) - ticks;
        time += window.elapsed();
        let grown = stage.daemon.anonymous_kib().saturating_sub(memory);
        outcome.grown.0 = outcome.grown.0.max(grown);
        outcome.kernel.0 = outcome.kernel.0.max(tcp_memory());
        outcome.windows = attacked.len();
        outcome.alone = summary(&alone);
        outcome.attacked = summary(&attacked);
        outcome.ratio = median(attacked.iter().zip(&alone).map(|(b, a)| b.rate / a.rate).collect());
        outcome.done = done as f64 / time.as_secs_f64();
        outcome.control = control as f64 / cpu::TICKS / time.as_secs_f64();
        let is_clear = outcome.failures(case).is_empty();
        if outcome.windows >= min_windows() && (is_clear || outcome.windows >= 10 * min_windows())
            || began.elapsed() > TIMEOUT * 6
        {
            break;
        }
    }
    attacker.kill();
    outcome.lines = stage.end().len();
    quiet.end();
    outcome.report();
    let failures = outcome.failures(case);
    assert!(failures.is_empty(), "{}:\n{}", outcome.name, failures.join("\n"));
    outcome
}

impl Outcome {
    /// Returns the violated bounds, one line each.
    fn failures(&self, case: &Case) -> Vec<String> {
        let mut failures = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                failures.push(what);
            }
        };
        check(self.done > 0.0, "the attack makes no progress".to_owned());
        if self.workers == 1 {
            let ratio = self.ratio;
            let share = case.share;
            let enough = self.attacked.rate >= case.enough;
            check(
                ratio >= share || enough,
                format!("the pair keeps {ratio:.4} of its rate, not {share:.2}"),
            );
        }
        for (n, (what, most)) in TIMED.into_iter().enumerate() {
            let took = self.attacked.longest[n];
            // The machine's own delays also occur without an attack.
            let most = most.max(self.alone.longest[n]);
            check(took <= most, format!("{what} takes {took:?}, at most {most:?} is allowed"));
        }
        let served = self.attacked.served;
        check(served >= SERVED, format!("{served:.2} of the peers are served"));
        let (grown, allowed) = self.grown;
        check(grown <= allowed, format!("{grown} KiB more in the daemon, {allowed} are allowed"));
        let kernel = self.kernel.0.saturating_sub(self.kernel.1);
        check(
            kernel <= case.kernel,
            format!("{kernel} KiB in the kernel, {} are allowed", case.kernel),
        );
        check(self.lines <= LINES, format!("{} lines in the log", self.lines));
        failures
    }

    /// Prints the results of this attack and adds them to `target/attacks.txt`.
    fn report(&self) {
        println!("{self}");
        let profile = built::profile();
        let target = profile.parent().unwrap_or(Path::new("."));
        let folder = target.join("attacks");
        let file = format!("{}-{}-workers.txt", self.name, self.workers);
        let written = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(folder.join(file), self.to_string()))
            .and_then(|()| {
                let mut files: Vec<PathBuf> =
                    std::fs::read_dir(&folder)?.map_while(Result::ok).map(|f| f.path()).collect();
                files.sort();
                let all: Vec<String> =
                    files.iter().map(std::fs::read_to_string).collect::<Result<_, _>>()?;
                std::fs::write(target.join("attacks.txt"), all.join("\n"))
            });
        written.expect("a report under target/");
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { name, workers, alone, attacked, .. } = self;
        writeln!(f, "{name}, {workers} workers, {} windows", self.windows)?;
        writeln!(f, "  {:<28}{:>14}{:>14}", "", "alone", "attacked")?;
        let rates = [alone.rate, attacked.rate].map(|rate| format!("{rate:.0}"));
        let what = "round trips per second";
        writeln!(
            f,
            "  {what:<28}{:>14}{:>14}  median of ratios {:.3}",
            rates[0], rates[1], self.ratio
        )?;
        for (n, (what, _)) in TIMED.into_iter().enumerate() {
            let times = [alone.longest[n], attacked.longest[n]].map(|time| format!("{time:.1?}"));
            writeln!(f, "  {:<28}{:>14}{:>14}", format!("longest {what}"), times[0], times[1])?;
        }
        if attacked.served < 1.0 || alone.served < 1.0 {
            let alone = alone.served;
            let attacked = attacked.served;
            writeln!(f, "  {:<28}{alone:>14.2}{attacked:>14.2}", "peers served")?;
        }
        let (grown, allowed) = self.grown;
        writeln!(f, "  {:<28}{grown:>28}  {allowed} allowed", "KiB more in the daemon")?;
        let (most, before) = self.kernel;
        writeln!(f, "  {:<28}{before:>14}{most:>14}", "kernel TCP memory in KiB")?;
        writeln!(f, "  {:<28}{:>28.2}", "CPU of the control thread", self.control)?;
        writeln!(f, "  {:<28}{:>28.0}", "attacks per second", self.done)?;
        writeln!(f, "  {:<28}{:>28}", "lines in the log", self.lines)
    }
}

impl Stage {
    /// Starts a daemon and a bystander. A single worker is confined to CPU `worker`, the bystander
    /// to CPU `pair`.
    pub(super) fn new(case: &Case, workers: u32, [worker, pair]: [usize; 2]) -> Self {
        let daemon = Daemon::start_limited(&config(case, workers), case.limit);
        if workers == 1 {
            assert_eq!(cpu::confine_threads(daemon.pid(), "rnicd-worker", worker), 1);
        }
        let context = Context::open_at(daemon.socket()).expect("the daemon answers");
        context.set_faults(case.faults).expect("root is an administrator");
        let mut bystander = daemon.actor_as(61_101, &["bystand", &pair.to_string()]);
        bystander.line_after("ready");
        Stage { daemon, bystander, peers: case.peers }
    }

    /// Takes all measurements of a window.
    fn all(&mut self, window: u32) -> Measurements {
        let window = window.to_string();
        let commands = self.figures("commands", &window);
        let sessions = self.figures("sessions", &window);
        // Last, because the scheduler has then placed the processes that have just been continued.
        let rate = self.figures("pair", "50")[0] as f64;
        let longest = [commands[0], commands[1], commands[2], sessions[0], sessions[1]];
        let served = if self.peers {
            let figures = self.figures("peers", &TIMEOUT.as_millis().to_string());
            figures[0] as f64 / figures[1] as f64
        } else {
            1.0
        };
        Measurements { rate, longest: longest.map(Duration::from_micros), served }
    }

    /// Returns the fault rules in force, without settings, which inject nothing.
    fn fault_rows(&self) -> Vec<FaultRow> {
        let context = Context::open_at(self.daemon.socket()).expect("the daemon answers");
        let page = context.list(ListKind::Faults, 0).expect("the daemon answers");
        let Rows::Faults(mut rows) = page.rows else { panic!("rows of another kind") };
        rows.retain(|row| !row.rule.contains("do=link") && !row.rule.contains("do=order"));
        rows
    }

    fn figures(&mut self, what: &str, time: &str) -> Vec<u64> {
        let figures = self.bystander.ask(&format!("{what} {time}"), &format!("{what}: "));
        figures.split_whitespace().map(|n| n.parse().expect("a number")).collect()
    }

    /// Runs `operations` round trips, sets of commands and sessions of the bystander, and serves
    /// its peers if the case has some.
    ///
    /// # Panics
    ///
    /// If an operation does not complete.
    pub(super) fn counted(&mut self, operations: u64) {
        assert_eq!(self.figures("counted", &operations.to_string()), [operations]);
        if self.peers {
            let figures = self.figures("peers", &DEADLINE.as_millis().to_string());
            assert_eq!(figures[0], figures[1], "peers that are served");
        }
    }

    /// Stops the bystander and the daemon. Returns the daemon's log.
    pub(super) fn end(mut self) -> Vec<String> {
        for rule in self.fault_rows() {
            assert!(rule.injected > 0, "the fault {} had no effect: {}", rule.name, rule.rule);
        }
        self.bystander.release();
        self.bystander.succeed();
        self.daemon.is_empty();
        self.daemon.stop()
    }
}

/// Returns the median rate and share and the maximum times of all windows.
fn summary(of: &[Measurements]) -> Measurements {
    Measurements {
        rate: median(of.iter().map(|f| f.rate).collect()),
        longest: std::array::from_fn(|n| of.iter().map(|f| f.longest[n]).max().unwrap_or_default()),
        served: median(of.iter().map(|f| f.served).collect()),
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Returns the kernel's TCP memory of this network namespace in KiB.
pub(super) fn tcp_memory() -> u64 {
    let stat = std::fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
    let line = stat.lines().find_map(|l| l.strip_prefix("TCP:")).unwrap_or_default();
    let pages = line.split_once(" mem ").map_or("0", |(_, pages)| pages.trim());
    pages.parse::<u64>().expect("a number from the kernel") * 4
}

/// Returns the number of KiB by which one user may grow the daemon's own memory, from the output of
/// `check-config`: the user's objects plus the limits for all users together.
pub(super) fn allowed(daemon: &Daemon) -> u64 {
    let mut command = Command::new(built::program("rnicd"));
    command.arg("check-config").arg("--config").arg(daemon.dir().join("rnicd.toml"));
    let output = command.output().expect("check-config runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = |begin: &str| {
        let line = text.lines().find(|l| l.trim_start().starts_with(begin));
        line.unwrap_or_else(|| panic!("no {begin:?} in {text}")).to_owned()
    };
    let user = line("one user:");
    // Queues precede this amount, and shared memory follows it.
    let (user, _) = user.split_once(" of bookkeeping").expect("a line about one user");
    let own = amounts(user).pop().expect("an amount");
    (own + amounts(&line("also:")).iter().sum::<u64>()) >> 10
}

/// Parses the amounts of bytes in a sentence.
fn amounts(sentence: &str) -> Vec<u64> {
    let words: Vec<&str> = sentence.split([' ', ',']).collect();
    let amount = |pair: &[&str]| {
        let unit = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|unit| *unit == pair[1])?;
        Some((pair[0].parse::<f64>().ok()? * f64::from(1u32 << 10).powi(unit as i32)) as u64)
    };
    words.windows(2).filter_map(amount).collect()
}

/// Returns the minimum number of windows.
fn min_windows() -> usize {
    if is_long() { 20 * MIN_WINDOWS } else { MIN_WINDOWS }
}

fn is_long() -> bool {
    std::env::var_os("RNIC_TEST_LONG").is_some()
}

/// Minimum number of windows without `RNIC_TEST_LONG`.
const MIN_WINDOWS: usize = 5;
/// Minimum share of served peers. On a busy machine, a few peers may be served too late.
const SERVED: f64 = 0.9;
