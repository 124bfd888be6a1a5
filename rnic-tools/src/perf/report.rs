//! What has been measured, as JSON and as tables of text.

use std::fmt;

use rnic_client::StatusInfo;
use serde::Serialize;

use super::bench::{Measured, Subject};
use super::goals::Yardstick;
use super::machine::Machine;
use super::spec::{Op, Spec, Wait};
use super::stats::{Percentiles, Series};
use super::table::{Table, bytes, digits};

/// Everything of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this program.
    pub version: &'static str,
    /// CPUs, model, kernel and load of the machine it ran on.
    pub machine: Machine,
    /// Rounds of each measurement.
    pub rounds: u32,
    /// One row for each measurement, in the order measured.
    pub rows: Vec<Row>,
}

/// What kind of figures a measurement has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// Payload bytes per second, in GB/s.
    Bw,
    /// Time per message of a ping-pong, in microseconds.
    Lat,
    /// Messages per second, in millions.
    Rate,
    /// Time per message of a stream.
    Cost,
    /// Something of the daemon itself.
    Daemon,
    /// Time of one call of the library.
    Call,
}

/// One measurement, with the figures of all its subjects.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What was measured, in words.
    pub subject: String,
    /// How it was measured, in words that follow the subject: depth, working set and QPs.
    pub manner: String,
    /// What kind of figures it has.
    pub kind: Measure,
    /// The path of the connections: `direct` or `tcp`; empty if there was none.
    pub path: String,
    /// How the daemons were set up, in words.
    pub daemons: String,
    /// The parameters; none for rows about the daemon itself.
    pub spec: Option<Spec>,
    /// The figures, RDMA first.
    pub figures: Vec<Figure>,
    /// What they come to.
    pub outcomes: Vec<Outcome>,
    /// Why there are no figures, if it could not be measured.
    pub failure: Option<String>,
}

/// The figures of one subject.
#[derive(Debug, Serialize)]
pub struct Figure {
    /// Name of the subject, in words.
    pub what: String,
    /// Unit of the figures.
    pub unit: &'static str,
    /// Messages or round trips per round.
    pub count: u64,
    /// Median of the rounds.
    pub median: f64,
    /// The figure of each round.
    #[serde(flatten)]
    pub series: Series,
    /// For latency: of all messages of all rounds.
    pub times: Option<Percentiles>,
}

/// A figure that is compared with a goal.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Of what, as in `1.5 of raw TCP`.
    pub of: String,
    /// Which figure of the row it is about: with a goal, that of our best placement, because the
    /// yardstick is at its best one, too.
    pub ours: usize,
    /// The figure, in `unit`.
    pub value: f64,
    /// Its unit; empty for a ratio.
    pub unit: &'static str,
    /// What it should be.
    pub goal: Option<Goal>,
    /// Whether the goal is met; `None` without a goal.
    pub met: Option<bool>,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// The figure should be this or more.
    AtLeast(f64),
    /// The figure should be this or less.
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
    /// A figure and its goal.
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
    /// A figure of one round.
    pub fn single(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        let series = Series { rounds: vec![value] };
        Figure { what: what.into(), unit, count: 1, median: value, series, times: None }
    }

    /// Figures of all rounds in `unit`.
    pub fn new(what: impl Into<String>, unit: &'static str, count: u64, series: Series) -> Self {
        let median = series.median().unwrap_or(0.0);
        Figure { what: what.into(), unit, count, median, series, times: None }
    }
}

impl Row {
    /// A measurement of `kind` whose yardsticks are all but the first of `measured`. A goal is for
    /// the ratio of ours, in its best placement, to the best of those that it is about.
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

    /// A measurement that could not be made.
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

    /// The row as a table of its own, with a line above it.
    pub fn render(&self) -> String {
        let mut text = format!("{}{}: {}\n", self.subject, self.manner, self.place());
        if let Some(why) = &self.failure {
            return text + "  not measured: " + why + "\n";
        }
        let latency = self.figures.iter().any(|f| f.times.is_some());
        let unit = self.figures.first().map_or("", |f| f.unit);
        let mut table = match latency {
            true => Table::new(&[
                "  us", "median", "mean", "p50", "p99", "p99.9", "longest", "ratio", "goal", "",
            ]),
            false => Table::new(&[
                &format!("  {unit}"),
                "median",
                "lowest",
                "highest",
                "ratio",
                "goal",
                "",
            ]),
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
            // The first figure is what the others are yardsticks for; one about the daemon or the
            // library is judged itself.
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
    /// A report of what was measured on this machine.
    pub fn new(machine: Machine, rounds: u32, rows: Vec<Row>) -> Self {
        Report { version: env!("CARGO_PKG_VERSION"), machine, rounds, rows }
    }

    /// The machine, and each row as a table.
    pub fn render(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Row::render).collect();
        format!("{}\n\n{}", self.head(), rows.join("\n"))
    }

    /// All rows as one table: a line for each outcome that has a goal, and one for each row without
    /// any.
    pub fn render_summary(&self) -> String {
        self.summary(true)
    }

    /// The same without the rows that have no goal.
    pub fn render_goals(&self) -> String {
        self.summary(false)
    }

    fn summary(&self, with_others: bool) -> String {
        let mut table =
            Table::new(&["what", "measured", "yardstick", "ratio or figure", "goal", ""]);
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
                // A figure about a call is its own, and has no yardstick.
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

/// A daemon in words.
pub fn daemon_in_words(status: &StatusInfo) -> String {
    let StatusInfo { version, pid, workers, loopback, .. } = status;
    format!("rnicd {version} (pid {pid}, workers {workers}, loopback {loopback})")
}

/// Use of the CPUs by others that is worth a warning.
const NOTICED: f64 = 0.05;

/// The figure of a subject in the unit of its kind.
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

/// The position of the best of those that a goal is about: the fastest, whether its figure is a
/// time or a rate.
fn best(of: Yardstick, measured: &[Measured], figures: &[Figure]) -> Option<usize> {
    best_of(figures, |n| of.includes(measured[n].subject))
}

/// The best of the figures that are wanted.
fn best_of(figures: &[Figure], wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let speed = |figure: &Figure| match figure.unit {
        "us" | "ns" => -figure.median,
        _ => figure.median,
    };
    let candidates = figures.iter().enumerate().filter(|(n, _)| wanted(*n));
    candidates.max_by(|(_, a), (_, b)| speed(a).total_cmp(&speed(b))).map(|(n, _)| n)
}

/// A ball goes there and back; what is answered is done when it is back.
fn one_way(spec: &Spec) -> f64 {
    if spec.op.is_answered() { 1.0 } else { 0.5 }
}

fn scaled(series: &Series, by: f64) -> Series {
    Series { rounds: series.rounds.iter().map(|x| x * by).collect() }
}

fn what(kind: Measure, spec: &Spec, subject: Subject) -> String {
    match (subject, kind) {
        (Subject::Rdma, _) if spec.wired => format!("{}, connected", spec.op),
        (Subject::Rdma, _) => spec.op.to_string(),
        (Subject::Placed(placement), _) => format!("{}{}", spec.op, placement.words()),
        (Subject::Wired, _) => format!("{}, wired by hand", spec.op),
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
        (Subject::Relay(seats), _) => format!("relay{}", seats.words()),
        (Subject::Memcpy, _) => "memcpy".to_owned(),
        (Subject::Crc, _) => "CRC32C alone".to_owned(),
    }
}

fn subject(kind: Measure, spec: &Spec) -> String {
    let by_hand = if spec.wired { ", wired by hand" } else { "" };
    let message = format!("{} {}{by_hand}", spec.op, bytes(u64::from(spec.size)));
    let waits = match spec.wait {
        Wait::Polled => ", polled",
        Wait::Event => ", event-driven",
        Wait::Adaptive => "",
    };
    match kind {
        Measure::Lat if spec.op.is_answered() => format!("{message}, there and back{waits}"),
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
    use crate::perf::raw::Manner;
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
        Subject::Tcp(Manner { polled: false, placement })
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
    fn a_goal_is_about_our_best_placement_against_theirs() {
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
    fn ratios_are_those_of_the_medians_and_are_judged() {
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
    fn what_was_not_measured_says_why() {
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
