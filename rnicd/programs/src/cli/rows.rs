//! Lists of `rnicctl`.
//!
//! Columns are the fields of the rows, in the order in which `--json` prints them: a new field
//! needs no line here. `columns` lists the fields that need a special heading or format.

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use rnic_client::Row;
use rnicd::config::Size;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::table::Table;
use super::why::{age, explain};

/// A row of a list, as text.
pub trait Shown: Row + Serialize + DeserializeOwned {
    /// Formats rows as text.
    fn text(rows: &[Self]) -> String {
        table(rows).to_string()
    }
}

macro_rules! shown {
    ($($row:ty $(= $text:expr)?;)+) => {
        $(impl Shown for $row {
            $(
            fn text(rows: &[Self]) -> String {
                $text(rows)
            })?
        })+
    };
}

shown! {
    ClientRow;
    QpRow;
    CqRow;
    MrRow;
    ListenerRow;
    SrqRow;
    WindowRow;
    PdRow;
    LimitRow;
    EventRecord;
    FaultRow;
    // Their texts are too long for a table.
    Diagnosis = explain_all;
}

fn explain_all(records: &[Diagnosis]) -> String {
    records.iter().map(explain).collect::<Vec<_>>().join("\n\n")
}

fn table<R: Shown>(rows: &[R]) -> Table {
    let columns = columns::<R>("");
    let cells = |row| {
        let row = serde_json::to_value(row).unwrap_or_default();
        let cell = |c: &Column| (c.cell)(row.pointer(&c.field).unwrap_or(&Value::Null), &row);
        columns.iter().map(cell).collect()
    };
    let rows = rows.iter().map(cells).collect();
    Table { head: columns.into_iter().map(|column| column.head).collect(), rows }
}

/// A column of a list.
struct Column {
    head: String,
    /// JSON pointer of its field in a row.
    field: String,
    /// Formats the field of a row. The second argument is the row.
    cell: fn(&Value, &Value) -> String,
}

/// Returns the columns for the fields of a row, or of a group of fields at `group` in a row.
fn columns<'de, R: Deserialize<'de>>(group: &str) -> Vec<Column> {
    let Struct { name, fields } = Struct::of::<R>();
    let columns_of = |name: &str, field: &str| {
        let path = format!("{group}/{field}");
        let column =
            |head: &str, cell| vec![Column { head: head.to_owned(), field: path.clone(), cell }];
        match (name, field) {
            ("QpRow", "kind") => column("TYPE", plain),
            ("QpRow", "addresses") => columns::<AddressPair>(&path),
            ("QpRow", "counters") => columns::<QpCounters>(&path),
            ("QpRow", "srq" | "remote_qp" | "rq_psn" | "sq_psn")
            | ("QpCounters", "segments_sent" | "segments_received") => Vec::new(),
            ("ClientRow", "shared_bytes") => column("SHARED", size),
            ("ClientRow", "arena_bytes") => column("QUEUES", size),
            ("ClientRow", "refusals") => column("REFUSED", plain),
            ("QpCounters", "sends_completed") => column("SENDS", plain),
            ("QpCounters", "receives_completed") => column("RECEIVES", plain),
            ("QpCounters", "bytes_sent") => column("SENT", bytes),
            ("QpCounters", "bytes_received") => column("PLACED", bytes),
            ("QpCounters", "reads_answered") => column("READS", plain),
            ("QpRow", "terminate") => column("TERMINATE", terminate),
            ("CqRow", "capacity") => column("ENTRIES", plain),
            ("CqRow", "in_error") => {
                column("STATE", |dead, _| if *dead == true { "dead" } else { "alive" }.to_owned())
            }
            ("MrRow", "iova") => column("IOVA", |iova, _| typed(iova, |n: u64| format!("{n:#x}"))),
            ("MrRow", "length") => column("LENGTH", bytes),
            ("MrRow", "access") => column("ACCESS", |access, _| typed(access, rights)),
            ("MrRow", "scope") => column("SCOPE", |scope, _| match scope.get("Qp") {
                Some(qp) => format!("QP {qp}"),
                None => "PD".to_owned(),
            }),
            ("ListenerRow", "backlog") => column("BACKLOG", |n, _| unless_zero(n, "bound")),
            ("SrqRow", "limit") => column("LIMIT", |n, _| unless_zero(n, "-")),
            ("WindowRow", "kind") => {
                column("TYPE", |kind, row| plain(kind, row).trim_start_matches("Type").to_owned())
            }
            ("WindowRow", "stag") => column("STAG", |n, _| typed(n, |stag: Stag| stag.to_string())),
            ("LimitRow", "scope") => column("WHOSE", plain),
            ("LimitRow", "limit" | "used") => column(&field.to_uppercase(), amount),
            ("EventRecord", "sequence") => column("EVENT", plain),
            ("EventRecord", "time_ms") => column("WHEN", |time, _| typed(time, age)),
            _ => column(&field.to_uppercase(), plain),
        }
    };
    fields.iter().flat_map(|field| columns_of(name, field)).collect()
}

fn plain(field: &Value, _: &Value) -> String {
    match field {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Formats a field as its type.
fn typed<T: DeserializeOwned>(field: &Value, format: impl Fn(T) -> String) -> String {
    serde_json::from_value(field.clone()).map_or_else(|_| "-".to_owned(), format)
}

fn unless_zero(field: &Value, zero: &str) -> String {
    if *field == 0 { zero.to_owned() } else { field.to_string() }
}

/// Formats bytes in a unit that divides them.
fn size(field: &Value, _: &Value) -> String {
    typed(field, |bytes| Size(bytes).to_string())
}

fn bytes(field: &Value, _: &Value) -> String {
    typed(field, readable)
}

/// Formats an amount of a limit: bytes if the key of the limit is a size.
fn amount(field: &Value, row: &Value) -> String {
    let is_size = row["key"].as_str().is_some_and(|key| key.ends_with("_bytes"));
    if is_size { bytes(field, row) } else { plain(field, row) }
}

fn terminate(field: &Value, _: &Value) -> String {
    typed(field, |(origin, code): (TerminateOrigin, TerminateCode)| match origin {
        TerminateOrigin::Local => format!("sent {code}"),
        TerminateOrigin::Peer => format!("received {code}"),
    })
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

/// Name and fields of a struct, in the order in which serde serializes them.
struct Struct {
    name: &'static str,
    fields: &'static [&'static str],
}

impl Struct {
    fn of<'de, T: Deserialize<'de>>() -> Self {
        let mut found = Struct { name: "", fields: &[] };
        // An error, because there are no values.
        let _ = T::deserialize(Recorder(&mut found));
        found
    }
}

/// Records the struct that a type deserializes.
struct Recorder<'a>(&'a mut Struct);

impl<'de> Deserializer<'de> for Recorder<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = Struct { name, fields };
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("no values"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Compares the text of a row with the text of all its cells.
    fn check<R: Shown>(row: Value, text: &str) {
        let row: R = serde_json::from_value(row).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(R::text(&[row]), text);
    }

    #[test]
    fn each_list_has_its_columns() {
        check::<ClientRow>(
            json!({
                "session": 7, "pid": 1000, "uid": 1001, "command": "rcopy", "qps": 1, "cqs": 2,
                "mrs": 3, "shared_bytes": 5000, "arena_bytes": 65536, "refusals": 5,
            }),
            "SESSION   PID   UID  COMMAND  QPS  CQS  MRS  SHARED  QUEUES  REFUSED\n      \
             7  1000  1001  rcopy      1    2    3  5000B   64KiB         5",
        );
        let mut qp = json!({
            "qp": 1, "kind": "Rc", "session": 7, "pd": 3, "srq": 99, "state": "Closing", "path": "tcp",
            "addresses": { "local": "192.0.2.1:9", "peer": "[fe80::1%2]:80" }, "worker": 0,
            "ird": 16, "ord": 15, "counters": {
                "sends_completed": 1, "receives_completed": 2, "bytes_sent": 1536,
                "bytes_received": 5_u64 << 40, "segments_sent": 90, "segments_received": 91,
                "reads_answered": 3, "errors": 4, "dropped": 5,
            },
            "terminate": ["Peer", { "layer": 1, "etype": 2, "code": 3 }],
            "remote_qp": 2, "rq_psn": 8, "sq_psn": 9,
        });
        check::<QpRow>(
            qp.clone(),
            "QP 1  TYPE Rc  SESSION 7  PD 3  STATE Closing  PATH tcp  LOCAL 192.0.2.1:9\n    \
             PEER [fe80::1%2]:80  WORKER 0  IRD 16  ORD 15  SENDS 1  RECEIVES 2\n    \
             SENT 1.5 KiB  PLACED 5 TiB  READS 3  ERRORS 4  DROPPED 5\n    \
             TERMINATE received 1/2/03 (untagged buffer: invalid MSN, range not valid)",
        );
        for unconnected in ["addresses", "worker", "terminate"] {
            qp[unconnected] = Value::Null;
        }
        check::<QpRow>(
            qp,
            "QP 1  TYPE Rc  SESSION 7  PD 3  STATE Closing  PATH tcp  LOCAL -  PEER -\n    \
             WORKER -  IRD 16  ORD 15  SENDS 1  RECEIVES 2  SENT 1.5 KiB  PLACED 5 TiB\n    \
             READS 3  ERRORS 4  DROPPED 5  TERMINATE -",
        );
        check::<CqRow>(
            json!({
                "cq": 1, "session": 7, "capacity": 16, "unread": 3, "reserved": 4, "qps": 5,
                "completions": 6, "in_error": true,
            }),
            "CQ  SESSION  ENTRIES  UNREAD  RESERVED  QPS  COMPLETIONS  STATE\n \
             1        7       16       3         4    5            6  dead",
        );
        check::<MrRow>(
            json!({
                "mr": 1, "session": 7, "pd": 3, "buffer": null, "iova": 4096, "length": 1_500_000,
                "access": "LOCAL_WRITE | REMOTE_READ", "scope": { "Qp": 5 },
            }),
            "MR  SESSION  PD  BUFFER  IOVA    LENGTH   ACCESS                   SCOPE\n \
             1        7   3       -  0x1000  1.4 MiB  local-write,remote-read  QP 5",
        );
        check::<ListenerRow>(
            json!({
                "listener": 1, "session": 7, "address": "[::1]:7471", "backlog": 0, "pending": 4,
                "accepted": 5, "rejected": 6,
            }),
            "LISTENER  SESSION  ADDRESS     BACKLOG  PENDING  ACCEPTED  REJECTED\n       \
             1        7  [::1]:7471  bound          4         5         6",
        );
        check::<SrqRow>(
            json!({
                "srq": 1, "session": 7, "pd": 3, "capacity": 512, "posted": 5, "taken": 6,
                "limit": 0, "qps": 8, "waiting": 9, "unfair": 10,
            }),
            "SRQ  SESSION  PD  CAPACITY  POSTED  TAKEN  LIMIT  QPS  WAITING  UNFAIR\n  \
             1        7   3       512       5      6      -    8        9      10",
        );
        check::<WindowRow>(
            json!({
                "window": 1, "session": 7, "pd": 3, "kind": "Type2", "stag": 0xAB00, "mr": 4,
            }),
            "WINDOW  SESSION  PD  TYPE  STAG        MR\n     \
             1        7   3     2  0x0000ab00   4",
        );
        check::<PdRow>(
            json!({ "pd": 3, "name": "x", "session": null, "sessions": 2, "mrs": 3, "qps": 4 }),
            "PD  NAME  SESSION  SESSIONS  MRS  QPS\n 3  x           -         2    3    4",
        );
        let event =
            json!({ "sequence": 9, "time_ms": u64::MAX, "session": 7, "kind": "k", "text": "a b" });
        check::<EventRecord>(
            event,
            "EVENT  WHEN         SESSION  KIND  TEXT\n    9  0.000 s ago        7  k     a b",
        );
    }

    #[test]
    fn empty_list_shows_its_heading() {
        assert!(CqRow::text(&[]).starts_with("CQ  SESSION  ENTRIES"));
    }

    #[test]
    fn byte_limits_have_units_others_do_not() {
        let row = |key: &str, limit, used| LimitRow {
            key: key.to_owned(),
            scope: "device".to_owned(),
            limit,
            used,
        };
        let rows =
            vec![row("limits.qps", 1 << 20, 7), row("limits.shared_bytes", 1 << 34, 1_500_000)];
        let table = LimitRow::text(&rows);
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
    fn diagnoses_are_blocks_of_80_columns() {
        let record = |id| Diagnosis {
            id,
            time_ms: 0,
            session: SessionId(3),
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
        let text = Diagnosis::text(&[record(2), record(1)]);
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        assert!(text.starts_with("why       2, ") && text.contains("\n\nwhy       1, "), "{text}");
    }
}
