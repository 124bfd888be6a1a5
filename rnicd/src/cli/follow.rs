//! `rnicctl events --follow`: happenings as they come, the oldest first.
//!
//! The daemon is asked twice a second for what is newer than what was shown; it keeps so many that
//! only a storm of them gets lost in between, as it would later.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use rnic_client::{Context, Error, EventRecord, ListKind, Rows};

/// Writes what there is, then what comes, until the reader or the daemon is gone.
pub(super) fn follow(
    context: &Context,
    json: bool,
    out: &mut impl Write,
) -> Result<(), Box<dyn std::error::Error>> {
    let list = |from| match context.list(ListKind::Events, from)? {
        (Rows::Events(page), _) => Ok(page),
        // Another daemon's idea of an answer.
        _ => Ok(Vec::new()),
    };
    let mut seen = 0;
    loop {
        for record in newer(seen, list)? {
            seen = record.sequence;
            let line = if json { serde_json::to_string(&record)? } else { line(&record) };
            match writeln!(out, "{line}").and_then(|()| out.flush()) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// Happenings after number `seen`, the oldest first. `list` gives pages, the newest first, from
/// the one on that is so many before the newest.
fn newer(
    seen: u64,
    mut list: impl FnMut(u32) -> Result<Vec<EventRecord>, Error>,
) -> Result<Vec<EventRecord>, Error> {
    let mut all: Vec<EventRecord> = Vec::new();
    let mut oldest = u64::MAX;
    loop {
        let page = list(u32::try_from(all.len()).unwrap_or(u32::MAX))?;
        // Nothing older than what is known: that was all, or more happens than can be asked for.
        let Some(last) = page.last().map(|last| last.sequence).filter(|last| *last < oldest) else {
            break;
        };
        oldest = last;
        all.extend(page.into_iter().filter(|record| record.sequence > seen));
        if oldest <= seen {
            break;
        }
    }
    // What happened between two pages has moved the rest on, so that some came twice.
    all.sort_by_key(|record| record.sequence);
    all.dedup_by_key(|record| record.sequence);
    Ok(all)
}

/// A happening for people, with the time of day in UTC.
fn line(record: &EventRecord) -> String {
    let seconds = record.time_ms / 1000;
    let (hours, minutes, seconds) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let session = record.session.map_or_else(|| "-".to_owned(), |session| session.to_string());
    let EventRecord { sequence, kind, text, .. } = record;
    format!("{sequence} {hours:02}:{minutes:02}:{seconds:02}Z {session} {kind} {text}")
}

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use rnic_core::types::SessionId;

    use super::*;

    fn record(sequence: u64) -> EventRecord {
        EventRecord {
            sequence,
            time_ms: 86_400_000 + 3_661_500,
            session: (sequence % 2 == 1).then_some(SessionId(7)),
            kind: "session_ended".to_owned(),
            text: "why".to_owned(),
        }
    }

    /// A daemon with so many records, of which one more happens after each page.
    fn pages(mut last: u64, most: usize) -> impl FnMut(u32) -> Result<Vec<EventRecord>, Error> {
        move |from| {
            let page = (1..=last).rev().skip(from as usize).take(most).map(record).collect();
            last += 1;
            Ok(page)
        }
    }

    #[test]
    fn each_happening_comes_once_and_in_order() {
        for most in [2, 3, 100] {
            for seen in [0, 4, 9, 10] {
                let all = newer(seen, pages(10, most)).unwrap_or_else(|e| panic!("{e}"));
                let numbers: Vec<u64> = all.iter().map(|record| record.sequence).collect();
                assert_eq!(numbers, (seen + 1..=10).collect::<Vec<_>>(), "{most} a page");
            }
        }
    }

    #[test]
    fn more_than_can_be_asked_for_is_not_asked_for_endlessly() {
        let all = newer(0, pages(10, 1)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(all.len(), 1);
    }

    #[test]
    fn a_line_says_when_who_and_what() {
        assert_eq!(line(&record(1)), "1 01:01:01Z 7 session_ended why");
        assert_eq!(line(&record(2)), "2 01:01:01Z - session_ended why");
    }
}
