//! Results of measurements, as JSON and as text tables.

use std::fmt;

use rnic_client::StatusInfo;
use serde::Serialize;

use super::bench::{Measured, Subject};
use super::goals::Yardstick;
use super::machine::Machine;
use super::spec::{Op, Spec, Wait};
use super::stats::{Percentiles, Series};
use super::table::{Table, bytes, digits};

/// The results of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// CPUs, model, kernel and load of the machine.
    pub machine: Machine,
    /// Rounds of each measurement.
    pub rounds: u32,
    /// One row for each measurement, in the order measured.
    pub rows: Vec<Row>,
}

/// Kind of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// Payload bytes per second, in GB/s.
    Bw,
    /// Time per message of a ping-pong, in microseconds.
    Lat,
    /// Messages per second, in millions.
    Rate,
    /// Time per message of a stream, in nanoseconds.
    Cost,
    /// A resource used by the daemon.
    Daemon,
    /// Time of a library call.
    Call,
}

/// A measurement, with the results of all its subjects.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Description of the measurement.
    pub subject: String,
    /// Depth, working set and QPs, as a suffix of `subject`.
    pub manner: String,
    /// Kind of the results.
    pub kind: Measure,
    /// The path of the connections: `direct` or `tcp`; empty without connections.
    pub path: String,
    /// Description of the daemons.
    pub daemons: String,
    /// The parameters; `None` for some rows about the daemon itself.
    pub spec: Option<Spec>,
    /// The results, RDMA first.
    pub figures: Vec<Figure>,
    /// Ratios or values, compared with goals.
    pub outcomes: Vec<Outcome>,
    /// Reason for a failed measurement, which has no results.
    pub failure: Option<String>,
}

/// The results of one subject.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// Name of the subject.
    pub what: String,
    /// Unit of the results.
    pub unit: &'static str,
    /// Messages or round trips per round.
    pub count: u64,
    /// Median of the rounds.
    pub median: f64,
    /// The result of each round.
    #[serde(flatten)]
    pub series: Series,
    /// Summary of all messages of all rounds, for latencies.
    pub times: Option<Percentiles>,
}

/// A ratio or value, with its goal if it has one.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Name of the yardstick, as in `1.5 of raw TCP`.
    pub of: String,
    /// Index of our result in `figures`. With a goal, this is our best placement, because the
    /// yardstick is the best of its kind too.
    pub ours: usize,
    /// The ratio or value.
    pub value: f64,
    /// Unit of the value; empty for a ratio.
    pub unit: &'static str,
    /// The goal.
    pub goal: Option<Goal>,
    /// True if the goal is met; `None` without a goal.
    pub met: Option<bool>,
}

/// Goal for a value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// The value should be this or more.
    AtLeast(f64),
    /// The value should be this or less.
    AtMost(f64),
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Goal::AtLeast(bound) => value >= bound,
            Goal::AtMost(bound) => value <= bound,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AtLeast(bound) => write!(f, "≥ {bound}"),
            Goal::AtMost(bound) => write!(f, "≤ {bound}"),
        }
    }
}

impl Outcome {
    /// Creates an outcome and compares it with its goal.
    pub fn new(of: impl Into<String>, value: f64, unit: &'static str, goal: Option<Goal>) -> Self {
        let met = goal.map(|goal| goal.is_met(value));
        Outcome { of: of.into(), ours: 0, value, unit, goal, met }
    }

    fn verdict(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "missed",
            None => "",
        }
    }

    fn value_in_words(&self) -> String {
        format!("{} {}", digits(self.value), self.unit).trim_end().to_owned()
    }
}

impl Figure {
    /// Creates the result of a single round.
    pub fn single(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        let series = Series { rounds: vec![value] };
        Figure { what: what.into(), unit, count: 1, median: value, series, times: None }
    }

    /// Creates the result of all rounds.
    pub fn new(what: impl Into<String>, unit: &'static str, count: u64, series: Series) -> Self {
        let median = series.median().unwrap_or(0.0);
        Figure { what: what.into(), unit, count, median, series, times: None }
    }
}

impl Row {
    /// Creates the row of a measurement. The first of `measured` is the subject, the others are
    /// yardsticks. A goal applies to the ratio of our best placement to the best yardstick of the
    /// kind.
    pub fn new(
        kind: Measure,
        spec: &Spec,
        path: &str,
        daemons: &str,
        measured: &[Measured],
        goals: &[(Yardstick, Goal)],
    ) -> Self {
        let figures: Vec<Figure> = measured.iter().map(|m| figure(kind, spec, m)).collect();
        let mut outcomes = Vec::new();
        let placed = |n: usize| matches!(measured[n].subject, Subject::Placed(_));
        let ours = best_of(&figures, |n| n == 0 || placed(n)).unwrap_or(0);
        if let Some((rdma, yardsticks)) = figures.split_first() {
            for (n, yardstick) in yardsticks.iter().enumerate() {
                let goal =
                    goals.iter().find(|(of, _)| best(*of, &measured[1..], yardsticks) == Some(n));
                let mut outcome = match goal {
                    Some((_, goal)) => {
                        let ratio = figures[ours].median / yardstick.median;
                        Outcome::new(&yardstick.what, ratio, "", Some(*goal))
                    }
                    None => Outcome::new(&yardstick.what, rdma.median / yardstick.median, "", None),
                };
                outcome.ours = goal.map_or(0, |_| ours);
                outcomes.push(outcome);
            }
        }
        Row {
            subject: subject(kind, spec),
            manner: manner(kind, spec),
            kind,
            path: path.to_owned(),
            daemons: daemons.to_owned(),
            spec: Some(spec.clone()),
            figures,
            outcomes,
            failure: None,
        }
    }

    /// Creates the row of a failed measurement.
    pub fn failed(subject: String, kind: Measure, daemons: &str, why: String) -> Self {
        Row {
            subject,
            manner: String::new(),
            kind,
            path: String::new(),
            daemons: daemons.to_owned(),
            spec: None,
            figures: Vec::new(),
            outcomes: Vec::new(),
            failure: Some(why),
        }
    }

    /// Renders the row as a table with a title line.
    pub fn render(&self) -> String {
        let mut text = format!("{}{}: {}\n", self.subject, self.manner, self.place());
        if let Some(why) = &self.failure {
            return text + "  not measured: " + why + "\n";
        }
        let latency = self.figures.iter().any(|f| f.times.is_some());
        let unit = self.figures.first().map_or("", |f| f.unit);
        let mut table = if latency {
            Table::new(&[
                "  us", "median", "mean", "p50", "p99", "p99.9", "longest", "ratio", "goal", "",
            ])
        } else {
            Table::new(&[&format!("  {unit}"), "median", "lowest", "highest", "ratio", "goal", ""])
        };
        for (n, figure) in self.figures.iter().enumerate() {
            let mut cells = vec![format!("  {}", figure.what), digits(figure.median)];
            match &figure.times {
                Some(t) => {
                    cells.extend([t.mean_us, t.p50_us, t.p99_us, t.p999_us, t.max_us].map(digits))
                }
                None if figure.series.rounds.len() < 2 => cells.extend(["".into(), "".into()]),
                None => cells.extend(
                    [figure.series.lowest(), figure.series.highest()]
                        .map(|x| x.map_or_else(String::new, digits)),
                ),
            }
            // The first result is compared with the others. A result about the daemon or the
            // library has its own goal.
            let judged = match self.kind {
                Measure::Daemon | Measure::Call => Some(n),
                _ => n.checked_sub(1),
            };
            if let Some(outcome) = judged.and_then(|n| self.outcomes.get(n)) {
                cells.push(outcome.value_in_words());
                cells.push(outcome.goal.map_or_else(String::new, |g| g.to_string()));
                cells.push(outcome.verdict().to_owned());
            }
            table.row(cells);
        }
        text += &table.render();
        text
    }

    fn place(&self) -> String {
        let path = match self.path.as_str() {
            "" => String::new(),
            path => format!("{path} path, "),
        };
        format!("{path}{}", self.daemons)
    }
}

impl Report {
    /// Creates the report of a run on this machine.
    pub fn new(machine: Machine, rounds: u32, rows: Vec<Row>) -> Self {
        Report { version: env!("CARGO_PKG_VERSION"), machine, rounds, rows }
    }

    /// Renders the machine, and each row as a table.
    pub fn render(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Row::render).collect();
        format!("{}\n\n{}", self.head(), rows.join("\n"))
    }

    /// Renders all rows as one table: a line for each outcome with a goal, and one for each row
    /// without goals.
    pub fn render_summary(&self) -> String {
        self.summary(true)
    }

    /// Like [`render_summary`](Self::render_summary), without rows that have no goal.
    pub fn render_goals(&self) -> String {
        self.summary(false)
    }

    fn summary(&self, with_others: bool) -> String {
        let mut table =
            Table::new(&["what", "measured", "yardstick", "ratio or value", "goal", ""]);
        for row in &self.rows {
            let what = format!("{}{}, {}", row.subject, row.manner, row.place());
            if let Some(why) = row.failure.as_ref().filter(|_| with_others) {
                table.row(vec![what.clone(), "not measured".to_owned()]);
                table.row(vec![format!("    {why}")]);
            }
            let judged = |(n, outcome): &(usize, &Outcome)| {
                let none = || row.outcomes.iter().all(|o| o.goal.is_none());
                outcome.goal.is_some() || with_others && *n == 0 && none()
            };
            for (n, outcome) in row.outcomes.iter().enumerate().filter(judged) {
                let of = |figure: Option<&Figure>| {
                    figure.map_or_else(String::new, |f| format!("{} {}", digits(f.median), f.unit))
                };
                let yardstick = of(row.figures.get(n + 1)) + " " + &outcome.of;
                // A call is compared with its goal only, not with a yardstick.
                let (measured, yardstick) = match row.kind {
                    Measure::Call => (of(row.figures.get(n)), outcome.of.clone()),
                    _ => (of(row.figures.get(outcome.ours)), yardstick.trim().to_owned()),
                };
                table.row(vec![
                    what.clone(),
                    measured,
                    yardstick,
                    outcome.value_in_words(),
                    outcome.goal.map_or_else(String::new, |g| g.to_string()),
                    outcome.verdict().to_owned(),
                ]);
            }
        }
        format!("{}\n\n{}", self.head(), table.render())
    }

    fn head(&self) -> String {
        let Machine { cpus, model, kernel, busy } = &self.machine;
        let rounds = self.rounds;
        let mut head = format!(
            "rnic-perf {} on {cpus} CPUs ({model}), Linux {kernel}; medians of {rounds} rounds, \
             measured in turn",
            self.version
        );
        if *busy > NOTICED {
            let percent = busy * 100.0;
            head += &format!("\nOther programs used {percent:.0} % of the CPUs: expect noise.");
        }
        head
    }
}

/// Describes a daemon.
pub fn daemon_in_words(status: &StatusInfo) -> String {
    let StatusInfo { version, pid, workers, loopback, .. } = status;
    format!("rnicd {version} (pid {pid}, workers {workers}, loopback {loopback})")
}

/// Share of CPU time used by other programs above which the report contains a warning.
const NOTICED: f64 = 0.05;

/// Returns the result of a subject in the unit of its kind.
pub fn figure(kind: Measure, spec: &Spec, measured: &Measured) -> Figure {
    let (unit, series) = match kind {
        Measure::Bw => ("GB/s", scaled(&measured.rates, f64::from(spec.size) / 1e9)),
        Measure::Rate => ("M/s", scaled(&measured.rates, 1e-6)),
        Measure::Lat => ("us", scaled(&measured.medians_us, one_way(spec))),
        Measure::Cost | Measure::Daemon | Measure::Call => {
            ("ns", Series { rounds: measured.rates.rounds.iter().map(|rate| 1e9 / rate).collect() })
        }
    };
    let mut figure = Figure::new(what(kind, spec, measured.subject), unit, measured.count, series);
    figure.times =
        (kind == Measure::Lat).then(|| measured.times.percentiles().scaled(one_way(spec)));
    figure
}

/// Returns the index of the best yardstick of a kind: the fastest, by time or by rate.
fn best(of: Yardstick, measured: &[Measured], figures: &[Figure]) -> Option<usize> {
    best_of(figures, |n| of.includes(measured[n].subject))
}

/// Returns the index of the best of the wanted results.
fn best_of(figures: &[Figure], wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let speed = |figure: &Figure| match figure.unit {
        "us" | "ns" => -figure.median,
        _ => figure.median,
    };
    let candidates = figures.iter().enumerate().filter(|(n, _)| wanted(*n));
    candidates.max_by(|(_, a), (_, b)| speed(a).total_cmp(&speed(b))).map(|(n, _)| n)
}

/// Returns the factor from a round trip to the reported latency: 0.5 for a ping-pong, 1 for an
/// operation that the peer's RNIC answers.
fn one_way(spec: &Spec) -> f64 {
    if spec.op.is_answered() { 1.0 } else { 0.5 }
}

fn scaled(series: &Series, by: f64) -> Series {
    Series { rounds: series.rounds.iter().map(|x| x * by).collect() }
}

fn what(kind: Measure, spec: &Spec, subject: Subject) -> String {
    match (subject, kind) {
        (Subject::Rdma, _) if spec.rc => format!("{}, iWARP", spec.op),
        (Subject::Rdma, _) => spec.op.to_string(),
        (Subject::Placed(placement), _) => format!("{}{}", spec.op, placement.words()),
        (Subject::Rc, _) => format!("{}, RC", spec.op),
        (Subject::Reads, _) => Op::Read.to_string(),
        (Subject::Tcp(manner), kind) => {
            let what = match (kind, manner.polled) {
                (Measure::Lat, true) => "raw TCP, polled",
                (Measure::Lat, false) => "raw TCP, blocking",
                (Measure::Rate, _) => "raw TCP, a write per message",
                _ => "raw TCP stream",
            };
            format!("{what}{}", manner.placement.words())
        }
        (Subject::Relay(placement), _) => format!("relay{}", placement.words()),
        (Subject::Memcpy, _) => "memcpy".to_owned(),
        (Subject::Crc, _) => "CRC32C alone".to_owned(),
    }
}

fn subject(kind: Measure, spec: &Spec) -> String {
    let rc = if spec.rc { ", RC" } else { "" };
    let message = format!("{} {}{rc}", spec.op, bytes(u64::from(spec.size)));
    let waits = match spec.wait {
        Wait::Polled => ", polled",
        Wait::Event => ", event-driven",
        Wait::Adaptive => "",
    };
    match kind {
        Measure::Lat if spec.op.is_answered() => format!("{message}, round trip{waits}"),
        Measure::Lat => format!("{message}, half round trip{waits}"),
        Measure::Bw => message + waits,
        Measure::Rate | Measure::Cost => format!("{message} in batches of {}", spec.batch),
        Measure::Daemon | Measure::Call => message,
    }
}

fn manner(kind: Measure, spec: &Spec) -> String {
    let Spec { depth, qps, active, .. } = spec;
    let many = match qps {
        1 => String::new(),
        _ => format!(", {qps} QPs of which {active} active"),
    };
    match kind {
        Measure::Lat | Measure::Daemon | Measure::Call => String::new(),
        Measure::Rate | Measure::Cost => format!(", depth {depth}{many}"),
        Measure::Bw => {
            format!(", depth {depth}, working set {}{many}", bytes(spec.working_set()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::perf::placement::Placement;
    use crate::perf::raw::TcpMode;
    use crate::perf::spec::Flow;
    use crate::perf::stats::Times;

    fn measured(subject: Subject, rates: &[f64]) -> Measured {
        let mut times = Times::new();
        let mut medians_us = Series::default();
        for rate in rates {
            times.record(Duration::from_secs_f64(1.0 / rate));
            medians_us.push(1e6 / rate);
        }
        let rates = Series { rounds: rates.to_vec() };
        Measured { subject, count: 10, rates, medians_us, times }
    }

    fn tcp(placement: Placement) -> Subject {
        Subject::Tcp(TcpMode { polled: false, placement })
    }

    fn bandwidth() -> Row {
        let spec = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
        let all = [
            measured(Subject::Rdma, &[3000.0, 2900.0, 2800.0]),
            measured(tcp(Placement::Together), &[4000.0, 3866.6, 3800.0]),
            measured(tcp(Placement::Apart), &[400.0, 386.66, 380.0]),
            measured(Subject::Memcpy, &[9000.0, 9000.0, 100.0]),
        ];
        let goals = [
            (Yardstick::BestTcp, Goal::AtLeast(0.75)),
            (Yardstick::Of(Subject::Memcpy), Goal::AtLeast(0.9)),
        ];
        Row::new(Measure::Bw, &spec, "tcp", "one daemon", &all, &goals)
    }

    #[test]
    fn goals_compare_the_best_placements() {
        let spec = Spec { wait: Wait::Event, ..Spec::new(Op::Send, Flow::PingPong, 8) };
        let all = [
            measured(Subject::Rdma, &[1e5; 3]),
            measured(Subject::Placed(Placement::Apart), &[0.5e5; 3]),
            measured(Subject::Placed(Placement::WithWorkers), &[2e5; 3]),
            measured(tcp(Placement::Together), &[2.5e5; 3]),
            measured(tcp(Placement::Apart), &[0.5e5; 3]),
        ];
        let goals = [(Yardstick::BestBlocking, Goal::AtMost(1.2))];
        let row = Row::new(Measure::Lat, &spec, "direct", "one daemon", &all, &goals);
        let judged: Vec<_> = row.outcomes.iter().filter(|o| o.goal.is_some()).collect();
        assert_eq!((judged.len(), judged[0].ours), (1, 2));
        // 5 us and 4 us for a round trip.
        assert!((judged[0].value - 1.25).abs() < 1e-3, "{:?}", judged[0]);
        assert_eq!(judged[0].met, Some(false));
        let report = Report::new(Machine::this(), 3, vec![row]).render_summary();
        assert!(report.contains("2.50 us"), "{report}");
    }

    #[test]
    fn ratios_of_medians_are_compared_with_goals() {
        let row = bandwidth();
        assert!((row.outcomes[0].value - 0.75).abs() < 1e-4);
        let met: Vec<_> = row.outcomes.iter().map(|outcome| outcome.met).collect();
        assert_eq!(met, [Some(true), None, Some(false)]);
        assert_eq!(
            row.render(),
            "RDMA Write 1 MiB, depth 16, working set 64 MiB: tcp path, one daemon\n\
             \x20 GB/s                      median  lowest  highest  ratio    goal\n\
             \x20 RDMA Write                  3.04    2.94     3.15\n\
             \x20 raw TCP stream, one CPU     4.05    3.98     4.19  0.750  ≥ 0.75     met\n\
             \x20 raw TCP stream, two CPUs   0.405   0.398    0.419   7.50\n\
             \x20 memcpy                      9.44   0.105     9.44  0.322   ≥ 0.9  missed\n"
        );
    }

    #[test]
    fn a_half_round_trip_is_half_and_a_read_is_whole() {
        let all = [measured(Subject::Rdma, &[1e5; 3]), measured(tcp(Placement::Free), &[0.5e5; 3])];
        for (op, us) in [(Op::Send, 5.0), (Op::Read, 10.0)] {
            let spec = Spec { wait: Wait::Polled, ..Spec::new(op, Flow::PingPong, 8) };
            let goals = [(Yardstick::BestTcp, Goal::AtMost(0.6))];
            let row = Row::new(Measure::Lat, &spec, "direct", "one daemon", &all, &goals);
            assert!((row.figures[0].median - us).abs() < 1e-3);
            assert!((row.outcomes[0].value - 0.5).abs() < 1e-3);
            assert_eq!(row.outcomes[0].met, Some(true));
            assert!(row.render().contains("p99.9"), "{}", row.render());
        }
    }

    #[test]
    fn json_has_every_figure_and_parameter() {
        let report = Report::new(Machine::this(), 3, vec![bandwidth()]);
        let json = serde_json::to_value(&report).unwrap();
        let row = &json["rows"][0];
        assert_eq!(row["kind"], "bw");
        assert_eq!(row["spec"]["op"], "write");
        assert_eq!(row["spec"]["size"], 1 << 20);
        assert_eq!(row["figures"][1]["rounds"].as_array().unwrap().len(), 3);
        assert_eq!(row["outcomes"][0]["goal"]["at-least"], 0.75);
        assert!(json["machine"]["cpus"].as_u64().unwrap() >= 1);
    }

    #[test]
    fn a_failed_row_has_its_reason() {
        let why = "refused: limits.qps = 5 reached".to_owned();
        let row = Row::failed("10,000 QPs".to_owned(), Measure::Daemon, "one daemon", why);
        let report = Report::new(Machine::this(), 5, vec![row, bandwidth()]);
        for text in [report.render(), report.render_summary()] {
            assert!(text.contains("limits.qps = 5"), "{text}");
            assert!(text.contains("Linux"), "{text}");
        }
        assert_eq!(report.render_summary().matches("RDMA Write 1 MiB").count(), 2);
    }
}
