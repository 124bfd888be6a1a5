//! Records inversions as diagnoses, with both requests and the rule that permits the inversion.

use super::model::{Inversion, permission};
use super::pending::{DelayedRead, Inverted, Kind, LateAtomic, Part};
use super::set::PendingSet;
use crate::engine::fault_rules::rule_of_fault;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::rdmap::{AtomicRequest, ReadRequest};
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::faults::order::{OrderModel, OrderRule};
use rnic_abi::types::{ATOMIC_LEN, Stag};

/// Description of an inversion.
struct Account {
    rule: &'static str,
    text: String,
    stag: Stag,
    offset: u64,
    length: u64,
}

/// Records the inversions since the last call, as many as the QP may still record.
pub(super) fn record(order: &mut PendingSet, core: &QpCore, engine: &mut EngineState) {
    let OrderRule { fault, model, .. } = order.pending.rule;
    let delayed = order.pending.delayed.take().into_iter();
    let reads = delayed.map(|(read, latest)| read.account(latest, model));
    let pieces = order.pending.inverted.drain(..).map(|inverted| inverted.account(model));
    let atomics = order.pending.atomic.take().into_iter().map(|atomic| atomic.account(model));
    for account in reads.chain(atomics).chain(pieces).flatten() {
        if order.reports == 0 {
            continue;
        }
        order.reports -= 1;
        let text = format!("{} ({})", account.text, account.rule);
        let rule = rule_of_fault(fault);
        let record = Diagnosis {
            qp: Some(core.id),
            pd: Some(core.pd),
            stag: Some(account.stag),
            offset: Some(account.offset),
            length: Some(account.length),
            ..Diagnosis::new(core.session, DiagnosisKind::Injected, rule, text)
        };
        engine.options.diagnoses.record(engine.now, record);
    }
}

impl DelayedRead {
    /// Describes the delay of the response until after `latest`, the last Write placed during the
    /// delay.
    fn account(&self, latest: Option<Part>, model: OrderModel) -> Option<Account> {
        let ReadRequest { size, src_stag, src_to, .. } = self.request;
        let to = src_to.0;
        let message = self.message;
        let read = format!("RDMA Read {message} ({size} bytes of STag {src_stag} at {to:#x})");
        let (inversion, text) = match latest {
            Some(write) => {
                let write = write.describe();
                (Inversion::ReadSource, format!("{read} read its source after {write} was placed"))
            }
            None => {
                let early = self.early_len;
                let text = format!("{read} read the last {early} bytes of its source first");
                (Inversion::SourceBytes, text)
            }
        };
        let rule = permission(model, inversion)?;
        Some(Account { rule, text, stag: src_stag, offset: to, length: size.into() })
    }
}

impl LateAtomic {
    fn account(&self, model: OrderModel) -> Option<Account> {
        let AtomicRequest { stag, to, .. } = self.request;
        let message = self.message;
        let to = to.0;
        let text = format!(
            "atomic operation {message} (STag {stag} at {to:#x}) wrote its result some time after \
             it had read the word; a store of a processor in between is lost"
        );
        let rule = permission(model, Inversion::Store)?;
        Some(Account { rule, text, stag, offset: to, length: ATOMIC_LEN.into() })
    }
}

impl Inverted {
    fn account(&self, model: OrderModel) -> Option<Account> {
        let first = self.first.describe();
        let (inversion, text) = match &self.second {
            None => {
                let text = format!("{first} became visible after it had been acknowledged");
                (Inversion::Completion, text)
            }
            Some(second) => {
                let same = second.kind == self.first.kind && second.message == self.first.message;
                let inversion = if same { Inversion::Bytes } else { Inversion::Messages };
                (inversion, format!("{} was placed before {first}", second.describe()))
            }
        };
        let Part { stag, to, len, .. } = self.first;
        let rule = permission(model, inversion)?;
        Some(Account { rule, text, stag, offset: to, length: len as u64 })
    }
}

impl Part {
    fn describe(&self) -> String {
        let Part { kind, message, stag, to, len } = self;
        let kind = match kind {
            Kind::Write => "RDMA Write",
            Kind::Response => "Read Response",
        };
        format!("{kind} {message} ({len} bytes of STag {stag} at {to:#x})")
    }
}
