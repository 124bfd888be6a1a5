//! The types of rows in the daemon's lists.

use rnic_abi::abi::control::*;

/// A row of a list ([`Context::rows`](crate::Context::rows)).
pub trait Row: Sized {
    /// The list.
    const KIND: ListKind;

    /// Returns the rows of a page, or `None` if they are of another kind.
    fn of(rows: Rows) -> Option<Vec<Self>>;
}

macro_rules! rows {
    ($($row:ident = $kind:ident;)+) => {
        $(impl Row for $row {
            const KIND: ListKind = ListKind::$kind;

            fn of(rows: Rows) -> Option<Vec<Self>> {
                if let Rows::$kind(rows) = rows { Some(rows) } else { None }
            }
        })+
    };
}

rows! {
    ClientRow = Clients;
    QpRow = Qps;
    CqRow = Cqs;
    MrRow = Mrs;
    ListenerRow = Listeners;
    SrqRow = Srqs;
    WindowRow = Windows;
    PdRow = Pds;
    LimitRow = Limits;
    EventRecord = Events;
    FaultRow = Faults;
    Diagnosis = Diagnoses;
}
