//! Tables of `rnicctl`: columns as wide as their widest cell, with numbers aligned right. A table
//! wider than an 80-column terminal is shown as one block per record.

use std::fmt;

use rnic_abi::abi::control::{DeviceKind, DeviceRow, NO_GID, StatusInfo};
use rnicd::config::Size;

/// Rows of cells under a heading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Headings of the columns, or empty.
    pub head: Vec<String>,
    /// Cells of each row.
    pub rows: Vec<Vec<String>>,
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
            lines.push(line(&mut self.head.iter().map(String::as_str)));
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
fn block(head: &[String], row: &[String]) -> String {
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

/// Formats the devices.
pub fn of_devices(devices: &[DeviceRow]) -> Table {
    let head = ["NAME", "KIND", "GUID", "NETDEV", "GIDS"];
    let row = |device: &DeviceRow| {
        let netdev = match device.kind {
            DeviceKind::Roce if device.interface.is_empty() => "*",
            DeviceKind::Roce => &device.interface,
            DeviceKind::Iwarp => "-",
        };
        let gids = device.gids.iter().filter(|gid| **gid != NO_GID).count();
        vec![
            device.name.clone(),
            device.kind.to_string(),
            format!("{:016x}", device.guid),
            netdev.to_owned(),
            gids.to_string(),
        ]
    };
    Table { head: head.map(str::to_owned).to_vec(), rows: devices.iter().map(row).collect() }
}

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
        ("fault rules", s.faults.to_string()),
    ];
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    Table { head: Vec::new(), rows }
}

fn with_problem(value: u32, problem: &str) -> String {
    if problem.is_empty() { value.to_string() } else { format!("{value}: {problem}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_with_numbers_on_the_right() {
        let table = Table {
            head: ["QP", "STATE", "SENT"].map(str::to_owned).into(),
            rows: vec![
                vec!["7".into(), "Rts".into(), "12345".into()],
                vec!["12".into(), "Error".into(), "-".into()],
            ],
        };
        assert_eq!(table.to_string(), "QP  STATE   SENT\n 7  Rts    12345\n12  Error      -");
    }

    #[test]
    fn wide_tables_become_blocks_of_80_columns() {
        let long = "word ".repeat(30);
        let table = Table {
            head: ["EVENT", "KIND", "TEXT"].map(str::to_owned).into(),
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
}
