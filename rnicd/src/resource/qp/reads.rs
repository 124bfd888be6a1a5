//! Charges for the RDMA Reads of connections: an inbound Read occupies the engine, an outbound one
//! the peer (RFC 5040 sections 8.1.1 and 8.1.2).

use std::sync::Arc;

use rnic_abi::abi::control::Refusal;

use crate::resource::ledger::{Account, Charge, Kind};

/// Charge for the Reads of a QP's connection.
#[derive(Debug)]
pub struct Reads {
    ird: Charge,
    ord: Charge,
}

impl Reads {
    /// Charges the requested depths. For a depth of `None`, charges the available amount, at least
    /// 1 and at most the maximum, and stores it in the depth if it is below the maximum.
    pub fn charge(
        account: &Arc<Account>,
        ird: &mut Option<u16>,
        ord: &mut Option<u16>,
        most_ird: u16,
        most_ord: u16,
    ) -> Result<Reads, Refusal> {
        //= RDMAP-8.1.2-7
        let ird = charge(account, Kind::IrdTotal, ird, most_ird)?;
        let ord = charge(account, Kind::OrdTotal, ord, most_ord)?;
        Ok(Reads { ird, ord })
    }

    /// Changes the charged outbound depth. On error the charge is unchanged.
    pub fn set_ord(&mut self, account: &Arc<Account>, ord: u16) -> Result<(), Refusal> {
        let more = u64::from(ord).saturating_sub(self.ord.amount());
        if more > 0 {
            self.ord.add(account.charge(Kind::OrdTotal, more)?);
        }
        self.ord.reduce_to(ord.into());
        Ok(())
    }

    /// Reduces the charges to the negotiated depths.
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
