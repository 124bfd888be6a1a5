//! Results compared with yardsticks and goals, as JSON and as text tables.

use std::fmt;

use rnic_tools::perf::machine::Machine;
use rnic_tools::perf::measured::Measured;
use rnic_tools::perf::report::{Figure, head};
use rnic_tools::perf::spec::{Measure, Op, Spec};
use rnic_tools::text::{Table, digits};
use serde::Serialize;

use crate::bench::Subject;
use crate::daemon::Setup;

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

/// Kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Time per message of a stream, in nanoseconds.
    Cost,
    /// A resource used by the daemon.
    Daemon,
    /// Time of a library call.
    Call,
    /// Bandwidth, latency or rate.
    #[serde(untagged)]
    Of(Measure),
}

/// A measurement, with the results of all its subjects.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Description of the measurement.
    pub subject: String,
    /// Depth, working set and QPs, as a suffix of `subject`.
    pub manner: String,
    /// Kind of the results.
    pub kind: Kind,
    /// The path of the connections: `direct` or `tcp`; empty without connections.
    pub path: String,
    /// Description of the daemons.
    pub daemons: String,
    /// Parameters; `None` for some rows about the daemon.
    pub spec: Option<Spec>,
    /// The results, RDMA first.
    pub figures: Vec<Figure>,
    /// Ratios or values, compared with goals.
    pub outcomes: Vec<Outcome>,
    /// Reason for a failed measurement, which has no results.
    pub failure: Option<String>,
}

/// A ratio or value, with its goal if it has one.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Name of the yardstick, as in `1.5 of raw TCP`.
    pub of: String,
    /// Index of our result in `figures`. With a goal, this is our best placement, because the
    /// yardstick is also the best of its kind.
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

/// Yardstick of a goal: one subject, or the best of a kind on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yardstick {
    /// This subject.
    Of(Subject),
    /// The best raw TCP, in any mode and placement.
    BestTcp,
    /// The best raw TCP with blocking calls.
    BestBlocking,
    /// The best relay.
    BestRelay,
}

impl Yardstick {
    /// Returns true if the yardstick includes a subject.
    pub fn includes(self, subject: Subject) -> bool {
        match (self, subject) {
            (Yardstick::Of(one), subject) => one == subject,
            (Yardstick::BestTcp, Subject::Tcp { .. })
            | (Yardstick::BestRelay, Subject::Relay(_)) => true,
            (Yardstick::BestBlocking, Subject::Tcp { polled, .. }) => !polled,
            _ => false,
        }
    }
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

impl Row {
    /// Creates the row of a measurement. `measured` starts with the subject, followed by the
    /// yardsticks. A goal applies to the ratio of our best placement to the best yardstick of its
    /// kind.
    pub fn new(
        kind: Measure,
        spec: &Spec,
        path: &str,
        daemons: &str,
        measured: &[(Subject, Measured)],
        goals: &[(Yardstick, Goal)],
    ) -> Self {
        let figure = |(subject, measured): &(Subject, Measured)| {
            Figure::of(name(kind, spec, *subject), kind, spec, measured)
        };
        let figures: Vec<Figure> = measured.iter().map(figure).collect();
        let mut outcomes = Vec::new();
        let placed = |n: usize| matches!(measured[n].0, Subject::Placed(_));
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
            subject: spec.title(kind),
            manner: spec.manner(kind),
            kind: Kind::Of(kind),
            path: path.to_owned(),
            daemons: daemons.to_owned(),
            spec: Some(spec.clone()),
            figures,
            outcomes,
            failure: None,
        }
    }

    /// Creates a row without parameters and outcomes.
    pub fn of(
        subject: impl Into<String>,
        kind: Kind,
        path: &str,
        setup: Setup,
        figures: Vec<Figure>,
    ) -> Self {
        Row {
            subject: subject.into(),
            manner: String::new(),
            kind,
            path: path.to_owned(),
            daemons: setup.words(),
            spec: None,
            figures,
            outcomes: Vec::new(),
            failure: None,
        }
    }

    /// Creates the row of a failed measurement.
    pub fn failed(
        subject: impl Into<String>,
        kind: Kind,
        setup: Setup,
        why: impl fmt::Display,
    ) -> Self {
        let failure = Some(why.to_string());
        Row { failure, ..Row::of(subject, kind, "", setup, Vec::new()) }
    }

    /// Renders the row as a table with a title line.
    pub fn render(&self) -> String {
        let mut text = format!("{}{}: {}\n", self.subject, self.manner, self.place());
        if let Some(why) = &self.failure {
            return text + "  not measured: " + why + "\n";
        }
        let mut titles = self.figures.first().map_or_else(Vec::new, Figure::titles);
        titles.extend(["ratio", "goal", ""].map(str::to_owned));
        let mut table = Table::new(titles);
        for (n, figure) in self.figures.iter().enumerate() {
            let mut cells = figure.cells();
            // The first result is compared with the others, except that a result about the daemon
            // or the library has its own goal.
            let judged = match self.kind {
                Kind::Daemon | Kind::Call => Some(n),
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

    /// Returns true if no measurement has failed.
    pub fn is_complete(&self) -> bool {
        self.rows.iter().all(|row| row.failure.is_none())
    }

    /// Renders the machine, and each row as a table.
    pub fn render(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Row::render).collect();
        format!("{}\n\n{}", self.head(), rows.join("\n"))
    }

    /// Renders all rows as one table: a line for each outcome with a goal, and a line for each row
    /// without goals.
    pub fn render_summary(&self) -> String {
        self.summary(true)
    }

    /// Like [`render_summary`](Self::render_summary), without rows that have no goal.
    pub fn render_goals(&self) -> String {
        self.summary(false)
    }

    fn summary(&self, with_others: bool) -> String {
        let mut table = Table::new(["what", "measured", "yardstick", "ratio or value", "goal", ""]);
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
                    Kind::Call => (of(row.figures.get(n)), outcome.of.clone()),
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
        head("rnic-bench", &self.machine, self.rounds)
    }
}

/// Returns the index of the best yardstick of a kind: the fastest, by time or by rate.
fn best(of: Yardstick, measured: &[(Subject, Measured)], figures: &[Figure]) -> Option<usize> {
    best_of(figures, |n| of.includes(measured[n].0))
}

/// Returns the index of the best result among those for which `wanted` returns true.
fn best_of(figures: &[Figure], wanted: impl Fn(usize) -> bool) -> Option<usize> {
    let speed = |figure: &Figure| match figure.unit {
        "us" | "ns" => -figure.median,
        _ => figure.median,
    };
    let candidates = figures.iter().enumerate().filter(|(n, _)| wanted(*n));
    candidates.max_by(|(_, a), (_, b)| speed(a).total_cmp(&speed(b))).map(|(n, _)| n)
}

fn name(kind: Measure, spec: &Spec, subject: Subject) -> String {
    match subject {
        Subject::Rdma if spec.rc => format!("{}, iWARP", spec.op),
        Subject::Rdma => spec.op.to_string(),
        Subject::Placed(placement) => format!("{}{}", spec.op, placement.words()),
        Subject::Rc => format!("{}, RC", spec.op),
        Subject::Reads => Op::Read.to_string(),
        Subject::Tcp { polled, placement } => {
            let what = match (kind, polled) {
                (Measure::Lat, true) => "raw TCP, polled",
                (Measure::Lat, false) => "raw TCP, blocking",
                (Measure::Rate, _) => "raw TCP, a write per message",
                (Measure::Bw, _) => "raw TCP stream",
            };
            format!("{what}{}", placement.words())
        }
        Subject::Relay(placement) => format!("relay{}", placement.words()),
        Subject::Memcpy => "memcpy".to_owned(),
        Subject::Crc => "CRC32C alone".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rnic_tools::perf::spec::{Flow, Wait};

    use super::*;
    use crate::placement::Placement;
    use crate::relay::RelayPlacement;

    fn measured(subject: Subject, rates: &[f64]) -> (Subject, Measured) {
        let mut measured = Measured { count: 10, ..Measured::default() };
        for rate in rates {
            measured.times.record(Duration::from_secs_f64(1.0 / rate));
            measured.medians_us.push(1e6 / rate);
            measured.rates.push(*rate);
        }
        (subject, measured)
    }

    fn tcp(placement: Placement) -> Subject {
        Subject::Tcp { polled: false, placement }
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
    fn the_best_is_chosen_among_those_of_its_kind() {
        let sleeps = tcp(Placement::Apart);
        let looks = Subject::Tcp { polled: true, placement: Placement::Apart };
        for (yardstick, subject, included) in [
            (Yardstick::BestTcp, looks, true),
            (Yardstick::BestBlocking, looks, false),
            (Yardstick::BestBlocking, sleeps, true),
            (Yardstick::BestRelay, Subject::Relay(RelayPlacement::Free), true),
            (Yardstick::BestRelay, sleeps, false),
            (Yardstick::Of(Subject::Memcpy), Subject::Memcpy, true),
            (Yardstick::Of(sleeps), looks, false),
        ] {
            assert_eq!(yardstick.includes(subject), included, "{yardstick:?} {subject:?}");
        }
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
    fn json_has_every_figure_and_parameter() {
        let report = Report::new(Machine::this(), 3, vec![bandwidth()]);
        let json = serde_json::to_value(&report).unwrap();
        let row = &json["rows"][0];
        assert_eq!(row["kind"], "bw");
        assert_eq!(row["figures"][1]["rounds"].as_array().unwrap().len(), 3);
        assert_eq!(row["outcomes"][0]["goal"]["at-least"], 0.75);
        assert_eq!(serde_json::to_value(Kind::Daemon).unwrap(), "daemon");
    }

    #[test]
    fn a_failed_row_has_its_reason() {
        let why = "refused: limits.qps = 5 reached";
        let row = Row::failed("10,000 QPs", Kind::Daemon, Setup::DIRECT, why);
        let report = Report::new(Machine::this(), 5, vec![row, bandwidth()]);
        for text in [report.render(), report.render_summary()] {
            assert!(text.contains("limits.qps = 5"), "{text}");
            assert!(text.contains("Linux"), "{text}");
        }
        assert_eq!(report.render_summary().matches("RDMA Write 1 MiB").count(), 2);
    }
}
