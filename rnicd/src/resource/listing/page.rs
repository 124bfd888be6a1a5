//! Pages of lists. A page starts at the key that the previous page returned, and skips earlier
//! objects without visiting them.

use std::collections::BTreeMap;

use rnic_abi::abi::control::{MAX_MESSAGE, PAGE_ROWS, ReplyBody, Rows};
use rnic_abi::types::SessionId;
use serde::Serialize;

use crate::resource::session::Session;

/// Returns the key of a session's object. Keys sort by session, then by object.
pub fn key(session: SessionId, object: u32) -> u64 {
    u64::from(session.0) << 32 | u64::from(object)
}

/// Returns the visible sessions, starting at the session of the key `from`. If `own` is set, only
/// this session is visible.
pub fn sessions(
    all: &BTreeMap<SessionId, Session>,
    own: Option<SessionId>,
    from: u64,
) -> impl Iterator<Item = &Session> {
    // The upper half is the session.
    let first = SessionId((from >> 32) as u32);
    let range = match own {
        Some(own) => all.range(own..=own),
        None => all.range(first..),
    };
    range.map(|(_, session)| session).filter(move |session| session.id >= first)
}

/// Returns the objects of sessions in the order of their keys, starting at the key `from`.
pub fn objects<'a, K: Ord + Copy + 'a, V: 'a>(
    sessions: impl Iterator<Item = &'a Session>,
    from: u64,
    table: fn(&Session) -> &BTreeMap<K, V>,
    named: fn(u32) -> K,
    number: fn(&K) -> u32,
) -> impl Iterator<Item = (u64, (&'a Session, K, &'a V))> {
    sessions.flat_map(move |session| {
        let first = if key(session.id, 0) < from { from as u32 } else { 0 };
        let rows = table(session).range(named(first)..);
        rows.map(move |(id, object)| (key(session.id, number(id)), (session, *id, object)))
    })
}

/// Returns the total number of objects of the sessions.
pub fn count<'a, K: 'a, V: 'a>(
    sessions: impl Iterator<Item = &'a Session>,
    table: fn(&Session) -> &BTreeMap<K, V>,
) -> usize {
    sessions.map(|session| table(session).len()).sum()
}

/// Rows of one page.
#[derive(Debug, PartialEq, Eq)]
pub struct Page<R> {
    rows: Vec<R>,
    /// Number of rows on all pages.
    total: u32,
    /// Key of the next page, or 0 if there is none.
    next: u64,
}

impl<R> Page<R> {
    /// Returns the first page of `all`. `total` is the number of rows on all pages.
    pub fn new<T>(
        mut all: impl Iterator<Item = (u64, T)>,
        total: usize,
        mut row: impl FnMut(T) -> R,
    ) -> Self {
        let rows = all.by_ref().take(PAGE_ROWS).map(|(_, item)| row(item)).collect();
        let next = all.next().map_or(0, |(key, _)| key);
        Page { rows, total: u32::try_from(total).unwrap_or(u32::MAX), next }
    }

    /// Returns the page as a reply, with rows of this kind.
    pub fn reply(self, kind: fn(Vec<R>) -> Rows) -> ReplyBody {
        let Page { rows, total, next } = self;
        ReplyBody::Rows { rows: kind(rows), total, next }
    }
}

impl<R: Serialize> Page<R> {
    /// Like [`Page::new`] for long rows: visits at most [`PAGE_ROWS`] items and returns as many
    /// rows as fit in a message. `row` returns `None` for items that the client may not see.
    pub fn that_fits<T>(
        all: impl Iterator<Item = (u64, T)>,
        total: usize,
        mut row: impl FnMut(T) -> Option<R>,
    ) -> Self {
        let mut room = MAX_MESSAGE - REPLY_HEAD;
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let mut page = Page { rows: Vec::new(), total, next: 0 };
        for (looked_at, (key, item)) in all.enumerate() {
            if looked_at == PAGE_ROWS {
                page.next = key;
                break;
            }
            let Some(row) = row(item) else { continue };
            let bytes = postcard::to_stdvec(&row).map_or(usize::MAX, |bytes| bytes.len());
            if bytes > room {
                page.next = key;
                break;
            }
            room -= bytes;
            page.rows.push(row);
        }
        page
    }
}

/// Maximum length of a reply without its rows, in bytes.
const REPLY_HEAD: usize = 64;

#[cfg(test)]
mod tests {
    use rnic_abi::abi::control::*;
    use rnic_abi::types::*;
    use rnic_core::device::diagnoses::{MAX_RULE, MAX_TEXT};

    use super::*;

    /// Returns the numbers below `before` of `rows` records, newest first, with their keys.
    fn below(before: u64, rows: u64) -> impl Iterator<Item = (u64, u64)> {
        (1..before.min(rows + 1)).rev().map(|n| (n + 1, n))
    }

    #[test]
    fn pages_of_longest_records_fit_a_message() {
        let all = u64::MAX;
        let address = std::net::SocketAddr::from(([0xFFFF; 8], u16::MAX));
        let record = Diagnosis {
            id: all,
            time_ms: all,
            session: SessionId(u32::MAX),
            what: DiagnosisKind::Completion { wr_id: all, status: CompletionStatus::General },
            rule: "r".repeat(MAX_RULE),
            text: "t".repeat(MAX_TEXT),
            qp: Some(QpId(u32::MAX)),
            pd: Some(PdId(u32::MAX)),
            stag: Some(Stag(u32::MAX)),
            offset: Some(all),
            length: Some(all),
            addresses: Some(AddressPair { local: address, peer: address }),
        };
        let mut from = u64::MAX;
        let mut pages = 0;
        let mut seen = 0;
        while from != 0 {
            let page = Page::that_fits(below(from, 100), usize::MAX, |_| Some(record.clone()));
            assert!(!page.rows.is_empty(), "stuck at {from}");
            from = page.next;
            pages += 1;
            seen += page.rows.len();
            let body = Page { next: all, ..page }.reply(Rows::Diagnoses);
            let reply = Reply { id: u32::MAX, result: Ok(body), diagnosis_id: all };
            let bytes = postcard::to_stdvec(&reply).map_or(usize::MAX, |bytes| bytes.len());
            assert!(bytes <= MAX_MESSAGE, "{bytes}");
        }
        assert!(seen == 100 && pages < 20, "{seen} in {pages} pages");
    }

    #[test]
    fn page_visits_a_bounded_number_of_rows() {
        let mut looked_at = 0;
        let counted = below(u64::MAX, 1000).inspect(|_| looked_at += 1);
        let page = Page::that_fits(counted, 0, |n| (n % 2 == 0).then_some(n));
        assert_eq!((page.rows.len(), page.next, looked_at), (PAGE_ROWS / 2, 969, PAGE_ROWS + 1));
        let page = Page::that_fits(below(3, 1000), 2, Some);
        assert_eq!(page, Page { rows: vec![2, 1], total: 2, next: 0 });
        let page = Page::new(below(u64::MAX, 33), 33, |n| n);
        assert_eq!((page.rows.len(), page.next), (32, 2));
        let last = Page { rows: vec![1], total: 33, next: 0 };
        assert_eq!(Page::new(below(page.next, 33), 33, |n| n), last);
    }
}
