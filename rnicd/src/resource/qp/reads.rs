//! Reads that connections were granted, counted against their user: each inbound one occupies the
//! engine, and each outbound one a peer (RFC 5040 sections 8.1.1 and 8.1.2).

use std::sync::Arc;

use rnic_core::abi::control::Refusal;

use crate::resource::ledger::{Account, Charge, Kind};

/// What the connection of a QP was charged.
#[derive(Debug)]
pub struct Reads {
    ird: Charge,
    ord: Charge,
}

impl Reads {
    /// Charges what is asked for; if nothing is, as much as there is room for up to `most`, but at
    /// least one. What is asked for is limited to that accordingly.
    pub fn charge(
        account: &Arc<Account>,
        (ird, ord): (&mut Option<u16>, &mut Option<u16>),
        (most_ird, most_ord): (u16, u16),
    ) -> Result<Reads, Refusal> {
        //= RDMAP-8.1.2-7
        let ird = charge(account, Kind::IrdTotal, ird, most_ird)?;
        let ord = charge(account, Kind::OrdTotal, ord, most_ord)?;
        Ok(Reads { ird, ord })
    }

    /// Charges so many outbound ones instead; if that is refused, it has those that it had.
    pub fn set_ord(&mut self, account: &Arc<Account>, ord: u16) -> Result<(), Refusal> {
        let more = u64::from(ord).saturating_sub(self.ord.amount());
        if more > 0 {
            self.ord.add(account.charge(Kind::OrdTotal, more)?);
        }
        self.ord.reduce_to(ord.into());
        Ok(())
    }

    /// Gives back what was not agreed on.
    pub fn settle(&mut self, ird: u16, ord: u16) {
        self.ird.reduce_to(ird.into());
        self.ord.reduce_to(ord.into());
    }
}

fn charge(
    account: &Arc<Account>,
    kind: Kind,
    wanted: &mut Option<u16>,
    most: u16,
) -> Result<Charge, Refusal> {
    let amount = wanted.unwrap_or_else(|| {
        let room = u16::try_from(account.room(kind)).unwrap_or(u16::MAX);
        most.min(room.max(1))
    });
    let charge = account.charge(kind, amount.into())?;
    if amount < most {
        *wanted = Some(amount);
    }
    Ok(charge)
}
