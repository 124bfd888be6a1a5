//! `rnicctl events --follow`: new events, oldest first.
//!
//! Queries the daemon twice a second for events after the last one shown. Events are lost only if
//! more of them occur between two queries than the daemon's ring holds.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use rnic_client::{Context, Error, EventRecord, ListKind, Page, Rows};

/// Writes all existing events, then new ones, until the reader or the daemon is gone.
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

/// Returns events after number `seen`, oldest first. `list` returns pages, newest first, with the
/// start of the next page.
fn newer(
    seen: u64,
    mut list: impl FnMut(u64) -> Result<Page, Error>,
) -> Result<Vec<EventRecord>, Error> {
    let mut all: Vec<EventRecord> = Vec::new();
    let mut from = Some(0);
    while let Some(place) = from {
        let page = list(place)?;
        // Rows of another kind: stop here.
        let Rows::Events(rows) = page.rows else { break };
        from = page.next.filter(|_| rows.last().is_some_and(|last| last.sequence > seen));
        all.extend(rows.into_iter().filter(|record| record.sequence > seen));
    }
    all.reverse();
    Ok(all)
}

/// Formats an event as text, with the time of day in UTC.
fn line(record: &EventRecord) -> String {
    let seconds = record.time_ms / 1000;
    let hours = seconds / 3600 % 24;
    let minutes = seconds / 60 % 60;
    let seconds = seconds % 60;
    let session = record.session.map_or_else(|| "-".to_owned(), |session| session.to_string());
    let EventRecord { sequence, kind, text, .. } = record;
    format!("{sequence} {hours:02}:{minutes:02}:{seconds:02}Z {session} {kind} {text}")
}

/// Time between two requests to the daemon.
const PAUSE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use rnic_abi::types::SessionId;

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

    /// Pages of a daemon with `last` records. One more is added after each page. Pages begin at a
    /// number, or at the newest for 0.
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
    fn each_event_is_shown_once_in_order() {
        for most in [1, 2, 3, 100] {
            for seen in [0, 4, 9, 10] {
                let all = newer(seen, pages(10, most)).unwrap_or_else(|e| panic!("{e}"));
                let numbers: Vec<u64> = all.iter().map(|record| record.sequence).collect();
                assert_eq!(numbers, (seen + 1..=10).collect::<Vec<_>>(), "{most} a page");
            }
        }
    }

    #[test]
    fn only_new_pages_are_requested() {
        let mut asked = 0;
        let mut pages = pages(10, 3);
        let all = newer(8, |from| {
            asked += 1;
            pages(from)
        });
        assert_eq!((all.unwrap_or_else(|e| panic!("{e}")).len(), asked), (2, 1));
    }

    #[test]
    fn line_has_time_session_and_kind() {
        assert_eq!(line(&record(1)), "1 01:01:01Z 7 session_ended why");
        assert_eq!(line(&record(2)), "2 01:01:01Z - session_ended why");
    }
}
