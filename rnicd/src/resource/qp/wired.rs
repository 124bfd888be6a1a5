//! Queue pairs that are wired by hand.

use rnic_core::abi::control::QpChange;
use rnic_core::types::*;

use crate::resource::answer::Answer;
use crate::resource::{Manager, refuse};

impl Manager {
    pub(in crate::resource) fn modify_qp(
        &mut self,
        _id: SessionId,
        _qp: QpId,
        _change: &QpChange,
        _now: Time,
    ) -> Answer {
        Err(refuse::invalid("change", "not served yet"))
    }
}
