//! Text of a diagnosis: the event, the rule, the explanation and the values.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::types::TerminateOrigin;

/// Maximum columns of a line.
const WIDTH: usize = 78;
/// Columns for the names of fields.
const NAMES: usize = 10;

/// Formats a record as lines, one field each. Long texts continue below their start.
pub fn explain(record: &Diagnosis) -> String {
    let mut out = String::new();
    field(&mut out, "why", &format!("{}, {}", record.id, age(record.time_ms)));
    field(&mut out, "what", &describe_event(&record.what));
    field(&mut out, "rule", &record.rule);
    field(&mut out, "because", &record.text);
    let qp = record.qp.map(|qp| format!(", QP {qp}")).unwrap_or_default();
    let pd = record.pd.map(|pd| format!(", PD {pd}")).unwrap_or_default();
    field(&mut out, "whose", &format!("session {}{qp}{pd}", record.session));
    if let Some(stag) = record.stag {
        field(&mut out, "STag", &stag.to_string());
    }
    if let Some(offset) = record.offset {
        field(&mut out, "offset", &format!("{offset:#x}"));
    }
    if let Some(length) = record.length {
        field(&mut out, "length", &format!("{length} bytes"));
    }
    if let Some(addresses) = record.addresses {
        let text = format!("local {}, peer {}", addresses.local, addresses.peer);
        field(&mut out, "addresses", &text);
    }
    out.truncate(out.trim_end().len());
    out
}

/// Describes the event of a record in a few words.
fn describe_event(what: &DiagnosisKind) -> String {
    match what {
        DiagnosisKind::Refused => "refused".to_owned(),
        DiagnosisKind::Completion { wr_id, status } => format!("{status:?} of {wr_id} ({status})"),
        DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code } => format!("sent {code}"),
        DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code } => {
            format!("received {code}")
        }
        DiagnosisKind::Lost => "connection lost".to_owned(),
        DiagnosisKind::Ended => "session ended".to_owned(),
        DiagnosisKind::Dropped => "datagram dropped".to_owned(),
        DiagnosisKind::Injected => "fault".to_owned(),
    }
}

/// Formats the time since `time_ms`, in milliseconds since 1970.
pub fn age(time_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let ms = now.saturating_sub(u128::from(time_ms));
    match ms {
        0..10_000 => format!("{}.{:03} s ago", ms / 1000, ms % 1000),
        10_000..600_000 => format!("{} s ago", ms / 1000),
        600_000..36_000_000 => format!("{} min ago", ms / 60_000),
        _ => format!("{} h ago", ms / 3_600_000),
    }
}

fn field(out: &mut String, name: &str, text: &str) {
    let mut column = 0;
    let _ = write!(out, "{name:<NAMES$}");
    for word in text.split_whitespace() {
        let len = word.chars().count();
        if column > 0 && NAMES + column + 1 + len > WIDTH {
            let _ = write!(out, "\n{:NAMES$}", "");
            column = 0;
        }
        if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += len;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use rnic_abi::types::*;

    use super::*;

    #[test]
    fn record_has_all_fields_in_short_lines() {
        let record = Diagnosis {
            id: 17,
            time_ms: 0,
            session: SessionId(3),
            what: DiagnosisKind::Completion { wr_id: 7, status: CompletionStatus::LocalProtection },
            rule: "a rule".to_owned(),
            text: "words ".repeat(40),
            qp: Some(QpId(9)),
            pd: None,
            stag: Some(Stag(0xAB)),
            offset: Some(4096),
            length: Some(64),
            addresses: None,
        };
        let text = explain(&record);
        assert!(text.starts_with("why       17, "), "{text}");
        assert!(text.contains(
            "what      LocalProtection of 7 (a local key does not cover the range or lacks\n\
             \x20         the required right)\nrule      a rule\nbecause   words"
        ));
        assert!(text.contains("whose     session 3, QP 9\nSTag      0x000000ab\n"), "{text}");
        assert!(text.ends_with("offset    0x1000\nlength    64 bytes"), "{text}");
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
    }
}
