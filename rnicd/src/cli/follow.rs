//! `rnicctl events --follow`: happenings as they come, the oldest first.
//!
//! The daemon is asked twice a second for what is newer than what was shown; it keeps so many that
//! only a storm of them gets lost in between, as it would later.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use rnic_client::{Context, Error, EventRecord, ListKind, Page, Rows};

/// Writes what there is, then what comes, until the reader or the daemon is gone.
pub(super) fn follow(
    context: &Context,
    json: bool,
    out: &mut impl Write,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut seen = 0;
    loop {
        for record in newer(seen, |from| context.list(ListKind::Events, from))? {
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

/// Happenings after number `seen`, the oldest first. `list` gives pages, the newest first, and says
/// where the next one begins.
fn newer(
    seen: u64,
    mut list: impl FnMut(u64) -> Result<Page, Error>,
) -> Result<Vec<EventRecord>, Error> {
    let mut all: Vec<EventRecord> = Vec::new();
    let mut from = Some(0);
    while let Some(place) = from {
        let page = list(place)?;
        // Another daemon's idea of an answer is none.
        let Rows::Events(rows) = page.rows else { break };
        from = page.next.filter(|_| rows.last().is_some_and(|last| last.sequence > seen));
        all.extend(rows.into_iter().filter(|record| record.sequence > seen));
    }
    all.reverse();
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

/// Time between two questions to the daemon.
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

    /// A daemon with so many records, of which one more happens after each page. Pages begin at a
    /// number, or at the newest.
    fn pages(mut last: u64, most: usize) -> impl FnMut(u64) -> Result<Page, Error> {
        move |from| {
            let newest = if from == 0 { last } else { from };
            let rows: Vec<EventRecord> = (1..=newest).rev().take(most).map(record).collect();
            let next = newest.checked_sub(most as u64).filter(|next| *next > 0);
            let total = last as u32;
            last += 1;
            Ok(Page { rows: Rows::Events(rows), total, next })
        }
    }

    #[test]
    fn each_happening_comes_once_and_in_order() {
        for most in [1, 2, 3, 100] {
            for seen in [0, 4, 9, 10] {
                let all = newer(seen, pages(10, most)).unwrap_or_else(|e| panic!("{e}"));
                let numbers: Vec<u64> = all.iter().map(|record| record.sequence).collect();
                assert_eq!(numbers, (seen + 1..=10).collect::<Vec<_>>(), "{most} a page");
            }
        }
    }

    #[test]
    fn no_more_is_asked_for_than_is_new() {
        let mut asked = 0;
        let mut pages = pages(10, 3);
        let all = newer(8, |from| {
            asked += 1;
            pages(from)
        });
        assert_eq!((all.unwrap_or_else(|e| panic!("{e}")).len(), asked), (2, 1));
    }

    #[test]
    fn a_line_says_when_who_and_what() {
        assert_eq!(line(&record(1)), "1 01:01:01Z 7 session_ended why");
        assert_eq!(line(&record(2)), "2 01:01:01Z - session_ended why");
    }
}
