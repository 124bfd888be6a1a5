//! Results of measurements, as JSON and as text tables.

use rnic_client::StatusInfo;
use serde::Serialize;

use super::error::PerfError;
use super::machine::Machine;
use super::measured::Measured;
use super::spec::{Measure, Spec};
use super::stats::{Percentiles, Series};
use crate::cli;
use crate::text::{Table, digits};

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

/// A measurement.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Description of the measurement.
    pub subject: String,
    /// Depth, working set and QPs, as a suffix of `subject`.
    pub manner: String,
    /// Kind of the results.
    pub kind: Measure,
    /// The path of the connections: `direct` or `tcp`.
    pub path: String,
    /// Description of the daemons.
    pub daemons: String,
    /// The parameters.
    pub spec: Spec,
    /// The result.
    pub figures: [Figure; 1],
}

/// The results of one subject.
#[derive(Clone, Debug, Serialize)]
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

impl Figure {
    /// Creates the result of a single round.
    pub fn single(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Figure::new(what, unit, 1, Series { rounds: vec![value] })
    }

    /// Creates the result of all rounds.
    pub fn new(what: impl Into<String>, unit: &'static str, count: u64, series: Series) -> Self {
        let median = series.median().unwrap_or(0.0);
        Figure { what: what.into(), unit, count, median, series, times: None }
    }

    /// Creates the result of a measurement in the unit of its kind.
    pub fn of(what: impl Into<String>, kind: Measure, spec: &Spec, measured: &Measured) -> Self {
        let one_way = spec.one_way();
        let (unit, series) = match kind {
            Measure::Bw => ("GB/s", measured.rates.scaled(f64::from(spec.size) / 1e9)),
            Measure::Rate => ("M/s", measured.rates.scaled(1e-6)),
            Measure::Lat => ("us", measured.medians_us.scaled(one_way)),
        };
        let times = (kind == Measure::Lat).then(|| measured.times.percentiles().scaled(one_way));
        Figure { times, ..Figure::new(what, unit, measured.count, series) }
    }

    /// Returns the titles of the columns that [`cells`](Self::cells) fills.
    pub fn titles(&self) -> Vec<String> {
        let titles: &[&str] = match self.times {
            Some(_) => &["median", "mean", "p50", "p99", "p99.9", "longest"],
            None => &["median", "lowest", "highest"],
        };
        let first = format!("  {}", self.unit);
        std::iter::once(first).chain(titles.iter().map(|title| (*title).to_owned())).collect()
    }

    /// Returns the name and the results for a row of a table.
    pub fn cells(&self) -> Vec<String> {
        let mut cells = vec![format!("  {}", self.what), digits(self.median)];
        match &self.times {
            Some(t) => {
                cells.extend([t.mean_us, t.p50_us, t.p99_us, t.p999_us, t.max_us].map(digits))
            }
            None if self.series.rounds.len() < 2 => cells.extend([String::new(), String::new()]),
            None => cells.extend(
                [self.series.lowest(), self.series.highest()]
                    .map(|x| x.map_or_else(String::new, digits)),
            ),
        }
        cells
    }
}

impl Row {
    /// Creates the row of a measurement.
    pub fn new(kind: Measure, spec: &Spec, path: &str, daemons: &str, measured: &Measured) -> Self {
        let rc = if spec.rc { ", RC" } else { "" };
        Row {
            subject: spec.title(kind),
            manner: spec.manner(kind),
            kind,
            path: path.to_owned(),
            daemons: daemons.to_owned(),
            spec: spec.clone(),
            figures: [Figure::of(format!("{}{rc}", spec.op), kind, spec, measured)],
        }
    }

    /// Renders the row as a table with a title line.
    fn render(&self) -> String {
        let Row { subject, manner, path, daemons, figures: [figure], .. } = self;
        let mut table = Table::new(figure.titles());
        table.row(figure.cells());
        format!("{subject}{manner}: {path} path, {daemons}\n{}", table.render())
    }
}

impl Report {
    /// Creates the report of a run.
    pub fn new(machine: Machine, rounds: u32, rows: Vec<Row>) -> Self {
        Report { version: env!("CARGO_PKG_VERSION"), machine, rounds, rows }
    }

    /// Renders the machine, and each row as a table.
    pub fn render(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Row::render).collect();
        let head = head("rnic-perf", &self.machine, self.rounds);
        format!("{head}\n\n{}", rows.join("\n"))
    }
}

/// Describes a program and its machine.
pub fn head(program: &str, machine: &Machine, rounds: u32) -> String {
    let Machine { cpus, model, kernel, busy } = machine;
    let mut head = format!(
        "{program} {} on {cpus} CPUs ({model}), Linux {kernel}; medians of {rounds} rounds",
        env!("CARGO_PKG_VERSION")
    );
    if *busy > NOTICED {
        let percent = busy * 100.0;
        head += &format!("\nOther programs used {percent:.0} % of the CPUs: expect noise.");
    }
    head
}

/// Prints a report as JSON or as text.
pub fn print(report: &impl Serialize, json: bool, text: &str) -> Result<(), PerfError> {
    let json = json.then(|| serde_json::to_string_pretty(report)).transpose();
    let json =
        json.map_err(|e| PerfError::Arguments(format!("cannot write the report as JSON: {e}")))?;
    let text = json.as_deref().unwrap_or(text);
    cli::print_line(text.trim_end()).map_err(PerfError::io("printing"))
}

/// Describes a daemon.
pub fn describe_daemon(status: &StatusInfo) -> String {
    let StatusInfo { version, pid, workers, loopback, .. } = status;
    format!("rnicd {version} (pid {pid}, workers {workers}, loopback {loopback})")
}

/// Share of CPU time used by other programs above which the report contains a warning.
const NOTICED: f64 = 0.05;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::spec::{Flow, Op, Wait};
    use super::*;

    fn measured(rates: &[f64]) -> Measured {
        let mut measured = Measured { count: 10, ..Measured::default() };
        for rate in rates {
            measured.times.record(Duration::from_secs_f64(1.0 / rate));
            measured.medians_us.push(1e6 / rate);
            measured.rates.push(*rate);
        }
        measured
    }

    fn bandwidth() -> Row {
        let spec = Spec::new(Op::Write, Flow::Stream, 1 << 20).stream(16, 4, 64 << 20);
        let rates = measured(&[3000.0, 2900.0, 2800.0]);
        Row::new(Measure::Bw, &spec, "tcp", "one daemon", &rates)
    }

    #[test]
    fn a_row_has_the_median_and_the_range() {
        assert_eq!(
            bandwidth().render(),
            "RDMA Write 1 MiB, depth 16, working set 64 MiB: tcp path, one daemon\n\
             \x20 GB/s        median  lowest  highest\n\
             \x20 RDMA Write    3.04    2.94     3.15\n"
        );
    }

    #[test]
    fn a_half_round_trip_is_half_and_a_read_is_whole() {
        for (op, us) in [(Op::Send, 5.0), (Op::Read, 10.0)] {
            let spec = Spec { wait: Wait::Polled, ..Spec::new(op, Flow::PingPong, 8) };
            let row = Row::new(Measure::Lat, &spec, "direct", "one daemon", &measured(&[1e5; 3]));
            assert!((row.figures[0].median - us).abs() < 1e-3);
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
        assert_eq!(row["figures"][0]["rounds"].as_array().unwrap().len(), 3);
        assert!(json["machine"]["cpus"].as_u64().unwrap() >= 1);
        assert!(report.render().contains("Linux"));
    }
}
