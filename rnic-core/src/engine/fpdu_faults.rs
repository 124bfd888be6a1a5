//! Effects of fault rules on outgoing FPDUs: wrong CRCs, and streams that end inside an FPDU.

use std::sync::Arc;

use super::fault_rules::{StreamCut, rule_of_fault};
use super::faults::record;
use super::qp::Qp;
use super::qp_core::QpCore;
use super::state::EngineState;
use crate::device::{ArmedFault, Occasion};
use rnic_abi::faults::{Action, Point};

impl QpCore {
    /// Carries out the rules of an FPDU that has been framed into `fpdu`: may invert a bit of its
    /// CRC. Returns the cut if the stream ends inside this FPDU.
    pub(super) fn fpdu_fault(
        &self,
        fpdu: &mut [u8],
        has_crc: bool,
        engine: &EngineState,
    ) -> Option<Box<StreamCut>> {
        let rules = &self.faults.as_ref()?.rules;
        // An FPDU without a CRC is no occasion for a wrong CRC.
        let mut rules =
            rules.iter().filter(|rule| has_crc || rule.rule.action != Action::CorruptCrc);
        let occasion = Occasion::new(Point::Fpdu, None);
        let struck = |rule: &Arc<ArmedFault>| rule.at(&occasion, engine.now);
        let (fault, action) = rules.find_map(|rule| Some((rule.name, struck(rule)?)))?;
        match action {
            Action::CorruptCrc => {
                // The CRC is at the end of an FPDU.
                *fpdu.last_mut()? ^= 1;
                record(self, engine, fault, "the CRC of an FPDU was corrupted".to_owned());
                None
            }
            Action::CutFpdu { reset } => {
                record(self, engine, fault, "the stream ended inside an FPDU".to_owned());
                Some(Box::new(StreamCut { fault, reset }))
            }
            _ => None,
        }
    }

    /// Returns true if the stream may end inside an FPDU.
    pub(super) fn may_cut_fpdus(&self) -> bool {
        let cuts = |action| matches!(action, Action::CutFpdu { .. });
        self.faults.as_ref().is_some_and(|f| f.rules.iter().any(|rule| cuts(rule.rule.action)))
    }
}

impl Qp {
    /// Ends a stream that a rule has cut, once TCP has accepted the bytes before the end.
    pub(super) fn end_cut_stream(&mut self, engine: &mut EngineState) {
        let Some(tcp) = self.link.tcp_mut() else { return };
        if let Some(cut) = tcp.take_cut() {
            self.lose(engine, cut.reset, &rule_of_fault(cut.fault));
        }
    }
}
