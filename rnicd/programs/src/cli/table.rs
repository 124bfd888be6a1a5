//! Tables of `rnicctl`: columns as wide as their widest cell, with numbers aligned right. A table
//! wider than an 80-column terminal is shown as one block per record.

use std::fmt;

use rnic_abi::abi::control::{Rows, StatusInfo};
use rnic_abi::types::{Access, Scope, TerminateOrigin, WindowKind};

use super::why::{age, explain};
use rnic_daemon::config::Size;

/// Rows of cells under a heading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0).max(self.head.len());
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let head = self.head.get(column).map_or(0, |h| h.len());
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(head)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let numeric = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .all(|cell| cell == "-" || cell.chars().all(|c| c.is_ascii_digit()))
                && !self.head.is_empty()
        };
        let numeric: Vec<bool> = (0..columns).map(numeric).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for (column, cell) in cells.enumerate() {
                let width = widths[column];
                let fill = widths[column] - cell.chars().count();
                let cell = if numeric[column] {
                    format!("{}{cell}", " ".repeat(fill))
                } else {
                    format!("{cell:<width$}")
                };
                line.push_str(&cell);
                line.push_str("  ");
            }
            line.trim_end().to_owned()
        };
        let mut lines = Vec::new();
        if !self.head.is_empty() {
            lines.push(line(&mut self.head.iter().copied()));
        }
        for row in &self.rows {
            lines.push(line(&mut row.iter().map(String::as_str)));
        }
        if !self.head.is_empty() && lines.iter().any(|line| line.chars().count() > WIDTH) {
            let blocks: Vec<String> = self.rows.iter().map(|row| block(&self.head, row)).collect();
            return f.write_str(&blocks.join("\n"));
        }
        f.write_str(&lines.join("\n"))
    }
}

/// Formats a record as cells with their names, in lines of at most [`WIDTH`] columns. Lines after
/// the first are indented. A long cell is broken between words.
fn block(head: &[&'static str], row: &[String]) -> String {
    let mut lines = vec![String::new()];
    for (name, cell) in head.iter().zip(row) {
        let cell = format!("{name} {cell}");
        let last = lines.last().map_or(0, |line| line.chars().count());
        if last > 0 && last + 2 + cell.chars().count() > WIDTH {
            lines.push(" ".repeat(INDENT));
        } else if last > 0 {
            lines.last_mut().into_iter().for_each(|line| line.push_str("  "));
        }
        for (n, word) in cell.split_whitespace().enumerate() {
            let last = lines.last().map_or(0, |line| line.chars().count());
            if n > 0 && last + 1 + word.chars().count() > WIDTH {
                lines.push(" ".repeat(INDENT));
            } else if n > 0 {
                lines.last_mut().into_iter().for_each(|line| line.push(' '));
            }
            lines.last_mut().into_iter().for_each(|line| line.push_str(word));
        }
    }
    lines.join("\n")
}

/// Columns of a terminal.
const WIDTH: usize = 80;
/// Indentation of the second and later lines of a record.
const INDENT: usize = 4;

/// Returns the summary of the daemon, one value per line.
pub fn of_status(s: &StatusInfo) -> Table {
    let rows = [
        ("device", s.device.clone()),
        ("version", s.version.clone()),
        ("pid", s.pid.to_string()),
        ("uptime", format!("{} s", s.uptime_s)),
        ("workers", s.workers.to_string()),
        ("loopback", s.loopback.clone()),
        ("sessions", s.sessions.to_string()),
        ("protection domains", s.pds.to_string()),
        ("shared buffers", format!("{} ({})", s.shared_buffers, Size(s.shared_bytes))),
        ("memory regions", s.mrs.to_string()),
        ("memory windows", s.windows.to_string()),
        ("completion queues", s.cqs.to_string()),
        ("queue pairs", s.qps.to_string()),
        ("shared receive queues", s.srqs.to_string()),
        ("listeners", s.listeners.to_string()),
        ("connections in start-up", s.startups.to_string()),
        ("queue memory", Size(s.arena_bytes).to_string()),
        ("requests refused", s.refusals.to_string()),
        ("sessions ended for misbehaviour", s.sessions_ended.to_string()),
        ("terminates sent", s.terminates_sent.to_string()),
        ("terminates received", s.terminates_received.to_string()),
        ("draining", if s.draining { "yes" } else { "no" }.to_owned()),
        ("wired port", with_problem(s.wired_port.into(), &s.wired_port_problem)),
        ("GIDs", with_problem(s.gids, &s.gids_problem)),
        ("unknown packets dropped", s.packets_dropped.to_string()),
    ];
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    Table { head: Vec::new(), rows }
}

fn with_problem(value: u32, problem: &str) -> String {
    if problem.is_empty() { value.to_string() } else { format!("{value}: {problem}") }
}

/// Formats a list of objects.
pub fn of_rows(rows: &Rows) -> String {
    match rows {
        Rows::Diagnoses(rows) => rows.iter().map(explain).collect::<Vec<_>>().join("\n\n"),
        _ => table_of(rows).to_string(),
    }
}

fn table_of(rows: &Rows) -> Table {
    match rows {
        // Their texts are long, so `of_rows` formats them without a table.
        Rows::Diagnoses(_) => Table::default(),
        Rows::Clients(rows) => Table {
            head: vec![
                "SESSION", "PID", "UID", "COMMAND", "QPS", "CQS", "MRS", "SHARED", "QUEUES",
                "REFUSED",
            ],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.session.to_string(),
                        r.pid.to_string(),
                        r.uid.to_string(),
                        r.command.clone(),
                        r.qps.to_string(),
                        r.cqs.to_string(),
                        r.mrs.to_string(),
                        Size(r.shared_bytes).to_string(),
                        Size(r.arena_bytes).to_string(),
                        r.refusals.to_string(),
                    ]
                })
                .collect(),
        },
        Rows::Qps(rows) => Table {
            head: vec![
                "QP",
                "SESSION",
                "PD",
                "STATE",
                "PATH",
                "LOCAL",
                "PEER",
                "WORKER",
                "IRD",
                "ORD",
                "SENDS",
                "RECEIVES",
                "SENT",
                "PLACED",
                "READS",
                "ERRORS",
                "DROPPED",
                "TERMINATE",
            ],
            rows: rows
                .iter()
                .map(|r| {
                    let c = &r.counters;
                    vec![
                        r.qp.to_string(),
                        r.session.to_string(),
                        r.pd.to_string(),
                        format!("{:?}", r.state),
                        r.path.clone(),
                        or_dash(r.addresses.map(|a| a.local)),
                        or_dash(r.addresses.map(|a| a.peer)),
                        or_dash(r.worker),
                        r.ird.to_string(),
                        r.ord.to_string(),
                        c.sends_completed.to_string(),
                        c.receives_completed.to_string(),
                        readable(c.bytes_sent),
                        readable(c.bytes_received),
                        c.reads_answered.to_string(),
                        c.errors.to_string(),
                        c.dropped.to_string(),
                        or_dash(r.terminate.map(|(origin, code)| match origin {
                            TerminateOrigin::Local => format!("sent {code}"),
                            TerminateOrigin::Peer => format!("received {code}"),
                        })),
                    ]
                })
                .collect(),
        },
        Rows::Cqs(rows) => Table {
            head: vec![
                "CQ",
                "SESSION",
                "ENTRIES",
                "UNREAD",
                "RESERVED",
                "QPS",
                "COMPLETIONS",
                "STATE",
            ],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.cq.to_string(),
                        r.session.to_string(),
                        r.capacity.to_string(),
                        r.unread.to_string(),
                        r.reserved.to_string(),
                        r.qps.to_string(),
                        r.completions.to_string(),
                        if r.in_error { "dead" } else { "alive" }.to_owned(),
                    ]
                })
                .collect(),
        },
        Rows::Mrs(rows) => Table {
            head: vec!["MR", "SESSION", "PD", "BUFFER", "IOVA", "LENGTH", "ACCESS", "SCOPE"],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.mr.to_string(),
                        r.session.to_string(),
                        r.pd.to_string(),
                        or_dash(r.buffer),
                        format!("{:#x}", r.iova),
                        readable(r.length),
                        rights(r.access),
                        match r.scope {
                            Scope::Pd => "PD".to_owned(),
                            Scope::Qp(qp) => format!("QP {qp}"),
                        },
                    ]
                })
                .collect(),
        },
        Rows::Listeners(rows) => Table {
            head: vec![
                "LISTENER", "SESSION", "ADDRESS", "BACKLOG", "PENDING", "ACCEPTED", "REJECTED",
            ],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.listener.to_string(),
                        r.session.to_string(),
                        r.address.to_string(),
                        if r.backlog == 0 { "bound".to_owned() } else { r.backlog.to_string() },
                        r.pending.to_string(),
                        r.accepted.to_string(),
                        r.rejected.to_string(),
                    ]
                })
                .collect(),
        },
        Rows::Srqs(rows) => Table {
            head: vec![
                "SRQ", "SESSION", "PD", "CAPACITY", "POSTED", "TAKEN", "LIMIT", "QPS", "WAITING",
                "UNFAIR",
            ],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.srq.to_string(),
                        r.session.to_string(),
                        r.pd.to_string(),
                        r.capacity.to_string(),
                        r.posted.to_string(),
                        r.taken.to_string(),
                        or_dash((r.limit > 0).then_some(r.limit)),
                        r.qps.to_string(),
                        r.waiting.to_string(),
                        r.unfair.to_string(),
                    ]
                })
                .collect(),
        },
        Rows::Windows(rows) => Table {
            head: vec!["WINDOW", "SESSION", "PD", "TYPE", "STAG", "MR"],
            rows: rows
                .iter()
                .map(|r| {
                    let kind = match r.kind {
                        WindowKind::Type1 => "1",
                        WindowKind::Type2 => "2",
                    };
                    vec![
                        r.window.to_string(),
                        r.session.to_string(),
                        r.pd.to_string(),
                        kind.to_owned(),
                        r.stag.to_string(),
                        or_dash(r.mr),
                    ]
                })
                .collect(),
        },
        Rows::Pds(rows) => Table {
            head: vec!["PD", "NAME", "SESSION", "SESSIONS", "MRS", "QPS"],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.pd.to_string(),
                        or_dash(r.name.as_ref()),
                        or_dash(r.session),
                        r.sessions.to_string(),
                        r.mrs.to_string(),
                        r.qps.to_string(),
                    ]
                })
                .collect(),
        },
        Rows::Limits(rows) => Table {
            head: vec!["KEY", "WHOSE", "LIMIT", "USED"],
            rows: rows
                .iter()
                .map(|r| {
                    let cell = |amount| of_limit(&r.key, amount);
                    vec![r.key.clone(), r.scope.clone(), cell(r.limit), cell(r.used)]
                })
                .collect(),
        },
        Rows::Events(rows) => Table {
            head: vec!["EVENT", "WHEN", "SESSION", "KIND", "TEXT"],
            rows: rows
                .iter()
                .map(|r| {
                    vec![
                        r.sequence.to_string(),
                        age(r.time_ms),
                        or_dash(r.session),
                        r.kind.clone(),
                        r.text.clone(),
                    ]
                })
                .collect(),
        },
    }
}

/// Formats an amount of a limit: bytes with a unit, rounded, and other amounts as they are.
fn of_limit(key: &str, amount: u64) -> String {
    if key.ends_with("_bytes") { readable(amount) } else { amount.to_string() }
}

/// Formats bytes in the largest unit that does not exceed them, rounded to a tenth.
fn readable(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = units.into_iter().find(|(shift, _)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let whole = bytes >> shift;
    if bytes == whole << shift {
        format!("{whole} {unit}")
    } else {
        // Exact enough: the mantissa has 53 bits.
        format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64)
    }
}

fn or_dash(value: Option<impl fmt::Display>) -> String {
    value.map_or("-".to_owned(), |v| v.to_string())
}

fn rights(access: Access) -> String {
    let names = [
        (Access::LOCAL_WRITE, "local-write"),
        (Access::REMOTE_WRITE, "remote-write"),
        (Access::REMOTE_READ, "remote-read"),
        (Access::ZERO_BASED, "zero-based"),
    ];
    let held: Vec<&str> =
        names.iter().filter(|(right, _)| access.contains(*right)).map(|(_, name)| *name).collect();
    if held.is_empty() { "local-read".to_owned() } else { held.join(",") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_with_numbers_on_the_right() {
        let table = Table {
            head: vec!["QP", "STATE", "SENT"],
            rows: vec![
                vec!["7".into(), "Rts".into(), "12345".into()],
                vec!["12".into(), "Error".into(), "-".into()],
            ],
        };
        assert_eq!(table.to_string(), "QP  STATE   SENT\n 7  Rts    12345\n12  Error      -");
    }

    #[test]
    fn byte_limits_have_units_others_do_not() {
        let row = |key: &str, limit, used| rnic_abi::abi::control::LimitRow {
            key: key.to_owned(),
            scope: "device".to_owned(),
            limit,
            used,
        };
        let rows =
            vec![row("limits.qps", 1 << 20, 7), row("limits.shared_bytes", 1 << 34, 1_500_000)];
        let table = of_rows(&Rows::Limits(rows));
        let cells = |line| -> Vec<&str> {
            table.lines().nth(line).unwrap_or_default().split_whitespace().collect()
        };
        assert_eq!(cells(1), ["limits.qps", "device", "1048576", "7"]);
        assert_eq!(cells(2), ["limits.shared_bytes", "device", "16", "GiB", "1.4", "MiB"]);
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (5 << 40, "5 TiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(readable(bytes), text);
        }
    }

    #[test]
    fn empty_list_shows_its_heading() {
        let table = of_rows(&Rows::Cqs(Vec::new()));
        assert!(table.starts_with("CQ  SESSION  ENTRIES"));
    }

    #[test]
    fn wide_tables_become_blocks_of_80_columns() {
        let long = "word ".repeat(30);
        let table = Table {
            head: vec!["EVENT", "KIND", "TEXT"],
            rows: vec![
                vec!["1".into(), "x".repeat(70), "short".into()],
                vec!["2".into(), "note".into(), long],
            ],
        };
        let text = table.to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.starts_with("EVENT 1\n    KIND xxx"), "{text}");
        assert!(text.contains("\nEVENT 2  KIND note\n    TEXT word word"), "{text}");
        assert_eq!(text.matches("word").count(), 30, "{text}");
    }

    #[test]
    fn diagnoses_are_blocks_of_80_columns() {
        use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
        let record = |id| Diagnosis {
            id,
            time_ms: 0,
            session: rnic_abi::types::SessionId(3),
            what: DiagnosisKind::Refused,
            rule: "a rule".to_owned(),
            text: "words ".repeat(60),
            qp: None,
            pd: None,
            stag: None,
            offset: None,
            length: None,
            addresses: None,
        };
        let text = of_rows(&Rows::Diagnoses(vec![record(2), record(1)]));
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        assert!(text.starts_with("why       2, ") && text.contains("\n\nwhy       1, "), "{text}");
    }
}
