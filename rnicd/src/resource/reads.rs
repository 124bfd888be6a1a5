//! Reads that connections were granted, counted against their user: each inbound one occupies the
//! engine, and each outbound one a peer (RFC 5040 sections 8.1.1 and 8.1.2).

use rnic_core::abi::control::Refusal;
use rnic_core::types::QpId;

use super::ledger::{Counts, Kind, Ledger};
use super::{Manager, find};

/// What the connection of a QP was charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    ird: u16,
    ord: u16,
}

impl Reads {
    /// Charges what is asked for; if nothing is, as much as there is room for up to `most`, but at
    /// least one. What is asked for is limited to that accordingly.
    pub fn charge(
        ledger: &mut Ledger,
        counts: &mut Counts,
        (ird, ord): (&mut Option<u16>, &mut Option<u16>),
        (most_ird, most_ord): (u16, u16),
    ) -> Result<Reads, Refusal> {
        let ird = charge(ledger, counts, Kind::Ird, ird, most_ird)?;
        match charge(ledger, counts, Kind::Ord, ord, most_ord) {
            Ok(ord) => Ok(Reads { ird, ord }),
            Err(refusal) => {
                ledger.credit(counts, Kind::Ird, ird.into());
                Err(refusal)
            }
        }
    }

    /// Gives back what was not agreed on.
    pub fn settle(&mut self, ledger: &mut Ledger, counts: &mut Counts, ird: u16, ord: u16) {
        let (ird, ord) = (ird.min(self.ird), ord.min(self.ord));
        ledger.credit(counts, Kind::Ird, (self.ird - ird).into());
        ledger.credit(counts, Kind::Ord, (self.ord - ord).into());
        *self = Reads { ird, ord };
    }

    /// Gives back everything.
    pub fn credit_all(&mut self, ledger: &mut Ledger, counts: &mut Counts) {
        self.settle(ledger, counts, 0, 0);
    }
}

fn charge(
    ledger: &mut Ledger,
    counts: &mut Counts,
    kind: Kind,
    wanted: &mut Option<u16>,
    most: u16,
) -> Result<u16, Refusal> {
    let amount = wanted.unwrap_or_else(|| {
        let room = u16::try_from(ledger.room(counts, kind)).unwrap_or(u16::MAX);
        most.min(room.max(1))
    });
    ledger.charge(counts, kind, amount.into())?;
    if amount < most {
        *wanted = Some(amount);
    }
    Ok(amount)
}

impl Manager {
    /// A QP has no connection any more, or none yet.
    pub(super) fn release_reads(&mut self, qp: QpId) {
        let Some(owner) = self.handles.qps.owner(qp.0) else { return };
        let Ok(session) = find(&mut self.sessions, owner) else { return };
        if let Some(object) = session.qps.get_mut(&qp) {
            object.reads.credit_all(&mut self.ledger, &mut session.counts);
        }
    }
}
