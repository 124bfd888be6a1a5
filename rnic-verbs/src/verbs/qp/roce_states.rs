//! State and attributes of a queue pair of the RoCE device (`ibv_modify_qp(3)`): the attributes
//! that each transition requires and allows, and their ranges (IBTA specification, volume 1,
//! section 11.2.5.2, with the kernel's tables for RC, UC and UD).

use std::fmt;

use rnic_client::{Access, Gid, GidRow, QpId, QpState, QpType, Sending, Wiring};

use crate::c::{self, ibv_qp_attr};
use crate::errno::Errno;
use crate::ffi::handles::zeroed;
use crate::verbs::ah::{check_route, destination};
use crate::verbs::device::PORT;
use crate::verbs::qp::iwarp_states::{no_transition, state_name};

/// State and attributes of a queue pair.
#[derive(Clone, Copy)]
pub(crate) struct RoceStates {
    transitions: &'static [Transition],
    /// All attributes set so far, and the state.
    attr: ibv_qp_attr,
}

/// Limits of the device.
pub(crate) struct Allowed<'a> {
    pub(crate) gids: &'a [GidRow],
    pub(crate) max_ird: u16,
    pub(crate) max_ord: u16,
    /// Largest path MTU.
    pub(crate) max_mtu: c::ibv_mtu,
}

/// A transition with its required and optional attributes.
struct Transition {
    from: u32,
    to: u32,
    needs: i32,
    takes: i32,
}

const fn transition(from: u32, to: u32, needs: i32, takes: i32) -> Transition {
    Transition { from, to, needs, takes }
}

const INIT: i32 = c::IBV_QP_PKEY_INDEX | c::IBV_QP_PORT | c::IBV_QP_ACCESS_FLAGS;
const PEER: i32 = c::IBV_QP_AV
    | c::IBV_QP_PATH_MTU
    | c::IBV_QP_DEST_QPN
    | c::IBV_QP_RQ_PSN
    | c::IBV_QP_MAX_DEST_RD_ATOMIC
    | c::IBV_QP_MIN_RNR_TIMER;
const RETRIES: i32 = c::IBV_QP_TIMEOUT | c::IBV_QP_RETRY_CNT | c::IBV_QP_RNR_RETRY;
const SENDS: i32 = RETRIES | c::IBV_QP_SQ_PSN | c::IBV_QP_MAX_QP_RD_ATOMIC;
const LATER: i32 = UC_LATER | c::IBV_QP_MIN_RNR_TIMER;

/// Attributes that a program may repeat in SQD, but not change.
const FIXED: i32 = c::IBV_QP_AV | c::IBV_QP_MAX_DEST_RD_ATOMIC;

/// Transitions of RC. Transitions to RESET are valid from every state, transitions to ERR from
/// every state but RESET, as in the kernel; neither takes attributes. Alternate paths are not
/// supported. The transition to RTR sets the peer and the inbound Reads. In SQD these may be
/// repeated but not changed, which the kernel's table allows.
const RC_TRANSITIONS: [Transition; 8] = [
    transition(c::IBV_QPS_RESET, c::IBV_QPS_INIT, INIT, 0),
    transition(c::IBV_QPS_INIT, c::IBV_QPS_INIT, 0, INIT),
    transition(
        c::IBV_QPS_INIT,
        c::IBV_QPS_RTR,
        PEER,
        c::IBV_QP_ACCESS_FLAGS | c::IBV_QP_PKEY_INDEX,
    ),
    transition(c::IBV_QPS_RTR, c::IBV_QPS_RTS, SENDS, LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_RTS, 0, LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_SQD, 0, c::IBV_QP_EN_SQD_ASYNC_NOTIFY),
    transition(c::IBV_QPS_SQD, c::IBV_QPS_RTS, 0, LATER),
    transition(
        c::IBV_QPS_SQD,
        c::IBV_QPS_SQD,
        0,
        RETRIES
            | c::IBV_QP_PORT
            | c::IBV_QP_PKEY_INDEX
            | c::IBV_QP_ACCESS_FLAGS
            | c::IBV_QP_MIN_RNR_TIMER
            | c::IBV_QP_MAX_QP_RD_ATOMIC
            | c::IBV_QP_PATH_MIG_STATE
            | FIXED,
    ),
];

const UC_PEER: i32 = c::IBV_QP_AV | c::IBV_QP_PATH_MTU | c::IBV_QP_DEST_QPN | c::IBV_QP_RQ_PSN;
const UC_LATER: i32 = c::IBV_QP_CUR_STATE | c::IBV_QP_ACCESS_FLAGS | c::IBV_QP_PATH_MIG_STATE;

/// Transitions of UC.
const UC_TRANSITIONS: [Transition; 9] = [
    transition(c::IBV_QPS_RESET, c::IBV_QPS_INIT, INIT, 0),
    transition(c::IBV_QPS_INIT, c::IBV_QPS_INIT, 0, INIT),
    transition(
        c::IBV_QPS_INIT,
        c::IBV_QPS_RTR,
        UC_PEER,
        c::IBV_QP_ACCESS_FLAGS | c::IBV_QP_PKEY_INDEX,
    ),
    transition(c::IBV_QPS_RTR, c::IBV_QPS_RTS, c::IBV_QP_SQ_PSN, UC_LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_RTS, 0, UC_LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_SQD, 0, c::IBV_QP_EN_SQD_ASYNC_NOTIFY),
    transition(c::IBV_QPS_SQD, c::IBV_QPS_RTS, 0, UC_LATER),
    transition(c::IBV_QPS_SQE, c::IBV_QPS_RTS, 0, c::IBV_QP_CUR_STATE | c::IBV_QP_ACCESS_FLAGS),
    transition(
        c::IBV_QPS_SQD,
        c::IBV_QPS_SQD,
        0,
        c::IBV_QP_PKEY_INDEX | c::IBV_QP_ACCESS_FLAGS | c::IBV_QP_PATH_MIG_STATE | c::IBV_QP_AV,
    ),
];

const UD_INIT: i32 = c::IBV_QP_PKEY_INDEX | c::IBV_QP_PORT | c::IBV_QP_QKEY;
const UD_LATER: i32 = c::IBV_QP_CUR_STATE | c::IBV_QP_QKEY;

/// Transitions of UD.
const UD_TRANSITIONS: [Transition; 9] = [
    transition(c::IBV_QPS_RESET, c::IBV_QPS_INIT, UD_INIT, 0),
    transition(c::IBV_QPS_INIT, c::IBV_QPS_INIT, 0, UD_INIT),
    transition(c::IBV_QPS_INIT, c::IBV_QPS_RTR, 0, c::IBV_QP_PKEY_INDEX | c::IBV_QP_QKEY),
    transition(c::IBV_QPS_RTR, c::IBV_QPS_RTS, c::IBV_QP_SQ_PSN, UD_LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_RTS, 0, UD_LATER),
    transition(c::IBV_QPS_RTS, c::IBV_QPS_SQD, 0, c::IBV_QP_EN_SQD_ASYNC_NOTIFY),
    transition(c::IBV_QPS_SQD, c::IBV_QPS_RTS, 0, UD_LATER),
    transition(c::IBV_QPS_SQE, c::IBV_QPS_RTS, 0, UD_LATER),
    transition(c::IBV_QPS_SQD, c::IBV_QPS_SQD, 0, c::IBV_QP_PKEY_INDEX | c::IBV_QP_QKEY),
];

/// Checks that the transition exists, and that `mask` has all required attributes and beyond these
/// only optional ones.
///
/// # Errors
///
/// `EINVAL` otherwise.
fn check_transition(
    transitions: &[Transition],
    from: u32,
    to: u32,
    mask: i32,
) -> Result<(), Errno> {
    let mask = mask & !c::IBV_QP_STATE;
    let to_any = transition(from, to, 0, 0);
    let transition = match to {
        c::IBV_QPS_RESET => Some(&to_any),
        c::IBV_QPS_ERR if from != c::IBV_QPS_RESET => Some(&to_any),
        _ => transitions.iter().find(|transition| (transition.from, transition.to) == (from, to)),
    };
    let transition = transition.ok_or_else(|| no_transition(from, to))?;
    let lacks = transition.needs & !mask;
    let excess = mask & !(transition.needs | transition.takes);
    if lacks == 0 && excess == 0 {
        return Ok(());
    }
    let from = state_name(from);
    let to = state_name(to);
    let verb = if lacks != 0 { "lacks" } else { "must not have" };
    let names = Names(if lacks != 0 { lacks } else { excess });
    Err(invalid!("{from} to {to}: attr_mask {verb} {names}"))
}

/// A mask, displayed as the names of its attributes without `IBV_QP_`.
struct Names(i32);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        for (bit, name) in NAMES.iter().filter(|(bit, _)| self.0 & bit != 0) {
            rest &= !bit;
            write!(f, "{name}{}", if rest == 0 { "" } else { ", " })?;
        }
        if rest == 0 { Ok(()) } else { write!(f, "{rest:#x}") }
    }
}

const NAMES: [(i32, &str); 20] = [
    (c::IBV_QP_CUR_STATE, "CUR_STATE"),
    (c::IBV_QP_EN_SQD_ASYNC_NOTIFY, "EN_SQD_ASYNC_NOTIFY"),
    (c::IBV_QP_ACCESS_FLAGS, "ACCESS_FLAGS"),
    (c::IBV_QP_PKEY_INDEX, "PKEY_INDEX"),
    (c::IBV_QP_PORT, "PORT"),
    (c::IBV_QP_QKEY, "QKEY"),
    (c::IBV_QP_AV, "AV"),
    (c::IBV_QP_PATH_MTU, "PATH_MTU"),
    (c::IBV_QP_TIMEOUT, "TIMEOUT"),
    (c::IBV_QP_RETRY_CNT, "RETRY_CNT"),
    (c::IBV_QP_RNR_RETRY, "RNR_RETRY"),
    (c::IBV_QP_RQ_PSN, "RQ_PSN"),
    (c::IBV_QP_MAX_QP_RD_ATOMIC, "MAX_QP_RD_ATOMIC"),
    (c::IBV_QP_MIN_RNR_TIMER, "MIN_RNR_TIMER"),
    (c::IBV_QP_SQ_PSN, "SQ_PSN"),
    (c::IBV_QP_MAX_DEST_RD_ATOMIC, "MAX_DEST_RD_ATOMIC"),
    (c::IBV_QP_DEST_QPN, "DEST_QPN"),
    (c::IBV_QP_ALT_PATH, "ALT_PATH"),
    (c::IBV_QP_PATH_MIG_STATE, "PATH_MIG_STATE"),
    (c::IBV_QP_CAP, "CAP"),
];

impl RoceStates {
    /// Creates the state of a queue pair of this type, in RESET.
    pub(crate) fn of(kind: QpType) -> Self {
        let transitions: &[Transition] = match kind {
            QpType::Uc => &UC_TRANSITIONS,
            QpType::Ud => &UD_TRANSITIONS,
            QpType::Iwarp | QpType::Rc => &RC_TRANSITIONS,
        };
        RoceStates { transitions, attr: zeroed() }
    }

    /// Returns the state, `IBV_QPS_...`.
    pub(crate) fn state(&self) -> u32 {
        self.attr.qp_state
    }

    /// Adopts the device's state if a fault has moved the QP: to ERR, or to SQE if a send request
    /// of a UC or UD QP has failed.
    pub(crate) fn follow(&mut self, device: QpState) {
        match device {
            QpState::Error => self.attr.qp_state = c::IBV_QPS_ERR,
            QpState::Sqe => self.attr.qp_state = c::IBV_QPS_SQE,
            _ => {}
        }
    }

    /// Returns all attributes set so far.
    pub(crate) fn attr(&self) -> ibv_qp_attr {
        self.attr
    }

    /// Returns the state after a modification. Changes nothing.
    pub(crate) fn after(
        &self,
        wanted: &ibv_qp_attr,
        mask: i32,
        allowed: &Allowed<'_>,
    ) -> Result<RoceStates, Errno> {
        let from = self.state();
        let has = |attribute| mask & attribute != 0;
        let to = if has(c::IBV_QP_STATE) { wanted.qp_state } else { from };
        let current = wanted.cur_qp_state;
        if has(c::IBV_QP_CUR_STATE) && current != from {
            let current = state_name(current);
            let from = state_name(from);
            return Err(invalid!("cur_qp_state {current}: the queue pair is in {from}"));
        }
        check_transition(self.transitions, from, to, mask)?;
        if to == c::IBV_QPS_RESET {
            return Ok(RoceStates { attr: zeroed(), ..*self });
        }
        let mut attr = self.attr;
        attr.qp_state = to;
        check(wanted, mask, allowed)?;
        if from == c::IBV_QPS_SQD {
            self.check_repeated(wanted, mask)?;
        }
        if has(c::IBV_QP_EN_SQD_ASYNC_NOTIFY) || to == c::IBV_QPS_SQD && from == c::IBV_QPS_RTS {
            attr.en_sqd_async_notify =
                if has(c::IBV_QP_EN_SQD_ASYNC_NOTIFY) { wanted.en_sqd_async_notify } else { 0 };
        }
        macro_rules! adopt {
            ($($flag:ident: $field:ident $(& $mask:ident)?;)*) => {
                $(if has(c::$flag) {
                    attr.$field = wanted.$field $(& $mask)?;
                })*
            };
        }
        adopt! {
            IBV_QP_ACCESS_FLAGS: qp_access_flags;
            IBV_QP_PORT: port_num;
            IBV_QP_QKEY: qkey;
            IBV_QP_AV: ah_attr;
            IBV_QP_PATH_MTU: path_mtu;
            IBV_QP_TIMEOUT: timeout;
            IBV_QP_RETRY_CNT: retry_cnt;
            IBV_QP_RNR_RETRY: rnr_retry;
            IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
            IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
            IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
            IBV_QP_DEST_QPN: dest_qp_num;
            // Only the low 24 bits are used, as on adapters.
            IBV_QP_RQ_PSN: rq_psn & LOW_24;
            IBV_QP_SQ_PSN: sq_psn & LOW_24;
        }
        Ok(RoceStates { attr, ..*self })
    }

    /// Checks that the attributes of the peer repeat their earlier values.
    fn check_repeated(&self, wanted: &ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        let same_route = destination(&wanted.ah_attr) == destination(&self.attr.ah_attr);
        let changed = if mask & c::IBV_QP_AV != 0 && !same_route {
            "ah_attr"
        } else if mask & c::IBV_QP_MAX_DEST_RD_ATOMIC != 0
            && wanted.max_dest_rd_atomic != self.attr.max_dest_rd_atomic
        {
            "max_dest_rd_atomic"
        } else {
            return Ok(());
        };
        Err(invalid!("{changed} cannot be changed after the transition to RTR"))
    }

    /// Returns the parameters for the transition to RTR.
    pub(crate) fn wiring(&self, gids: &[GidRow]) -> Result<Wiring, Errno> {
        let grh = &self.attr.ah_attr.grh;
        let local = gids
            .get(usize::from(grh.sgid_index))
            .ok_or_else(|| invalid!("grh.sgid_index {} is not in the table", grh.sgid_index))?;
        // SAFETY: both members of the union are 16 bytes that may have any value.
        let remote = Gid(unsafe { grh.dgid.raw });
        Ok(Wiring {
            local: local.gid,
            remote,
            remote_qp: QpId(self.attr.dest_qp_num),
            rq_psn: self.attr.rq_psn,
            path_mtu: 128 << self.attr.path_mtu,
            min_rnr_timer: self.attr.min_rnr_timer,
            ird: self.attr.max_dest_rd_atomic.into(),
            rights: self.rights(),
        })
    }

    /// Returns the parameters for the transition to RTS.
    pub(crate) fn sending(&self) -> Sending {
        Sending {
            sq_psn: self.attr.sq_psn,
            timeout: self.attr.timeout,
            retry_count: self.attr.retry_cnt,
            rnr_retry: self.attr.rnr_retry,
            ord: self.attr.max_rd_atomic.into(),
        }
    }

    /// Returns the peer's access rights to memory.
    pub(crate) fn rights(&self) -> Access {
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        Access::from_bits_truncate(self.attr.qp_access_flags) & remote
    }
}

/// Checks the values of the attributes that are set.
fn check(wanted: &ibv_qp_attr, mask: i32, allowed: &Allowed<'_>) -> Result<(), Errno> {
    let has = |attribute| mask & attribute != 0;
    if has(c::IBV_QP_AV) {
        check_route(&wanted.ah_attr, allowed.gids)?;
    }
    let in_range = |attribute, name: &str, value: u32, least: u32, most: u32| {
        if has(attribute) && !(least..=most).contains(&value) {
            Err(invalid!("{name} {value}: must be {least} to {most}"))
        } else {
            Ok(())
        }
    };
    let state = wanted.path_mig_state;
    let migrated = c::IBV_MIG_MIGRATED;
    in_range(c::IBV_QP_PATH_MIG_STATE, "path_mig_state", state, migrated, migrated)?;
    let port = u32::from(PORT);
    in_range(c::IBV_QP_PORT, "port_num", wanted.port_num.into(), port, port)?;
    in_range(c::IBV_QP_PKEY_INDEX, "pkey_index", wanted.pkey_index.into(), 0, 0)?;
    let mtu = allowed.max_mtu;
    in_range(c::IBV_QP_PATH_MTU, "path_mtu (enum)", wanted.path_mtu, c::IBV_MTU_256, mtu)?;
    in_range(c::IBV_QP_TIMEOUT, "timeout", wanted.timeout.into(), 0, 31)?;
    in_range(c::IBV_QP_RETRY_CNT, "retry_cnt", wanted.retry_cnt.into(), 0, 7)?;
    in_range(c::IBV_QP_RNR_RETRY, "rnr_retry", wanted.rnr_retry.into(), 0, 7)?;
    in_range(c::IBV_QP_MIN_RNR_TIMER, "min_rnr_timer", wanted.min_rnr_timer.into(), 0, 31)?;
    in_range(c::IBV_QP_DEST_QPN, "dest_qp_num", wanted.dest_qp_num, 0, LOW_24)?;
    let ord = allowed.max_ord.into();
    in_range(c::IBV_QP_MAX_QP_RD_ATOMIC, "max_rd_atomic", wanted.max_rd_atomic.into(), 0, ord)?;
    let ird = allowed.max_ird.into();
    let reads = wanted.max_dest_rd_atomic.into();
    in_range(c::IBV_QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", reads, 0, ird)
}

const LOW_24: u32 = (1 << 24) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_MTU: c::ibv_mtu = c::IBV_MTU_4096;

    const STATES: [u32; 7] = [
        c::IBV_QPS_RESET,
        c::IBV_QPS_INIT,
        c::IBV_QPS_RTR,
        c::IBV_QPS_RTS,
        c::IBV_QPS_SQD,
        c::IBV_QPS_SQE,
        c::IBV_QPS_ERR,
    ];

    /// Each attribute alone.
    fn attributes() -> impl Iterator<Item = i32> {
        (1..31).map(|bit| 1 << bit)
    }

    #[test]
    fn every_step_needs_and_takes_its_attributes() {
        let all = STATES.into_iter().flat_map(|from| STATES.map(|to| (from, to)));
        for (transitions, (from, to)) in [&RC_TRANSITIONS[..], &UC_TRANSITIONS, &UD_TRANSITIONS]
            .into_iter()
            .flat_map(|of| all.clone().map(move |transition| (of, transition)))
        {
            let may_step = |from, to, mask| check_transition(transitions, from, to, mask).is_ok();
            let found = transitions.iter().find(|s| (s.from, s.to) == (from, to));
            if matches!(to, c::IBV_QPS_RESET | c::IBV_QPS_ERR) {
                let open = (from, to) != (c::IBV_QPS_RESET, c::IBV_QPS_ERR);
                assert!(found.is_none());
                assert_eq!(may_step(from, to, c::IBV_QP_STATE), open, "{from} to {to}");
                assert!(attributes().all(|one| !may_step(from, to, one)), "{from} to {to}");
                continue;
            }
            let Some(transition) = found else {
                assert!((0..1 << 21).step_by(77).all(|mask| !may_step(from, to, mask)));
                continue;
            };
            assert!(may_step(from, to, c::IBV_QP_STATE | transition.needs));
            for attribute in attributes() {
                let needed = transition.needs & attribute != 0;
                assert_eq!(may_step(from, to, transition.needs & !attribute), !needed);
                let taken = (transition.needs | transition.takes) & attribute != 0;
                assert_eq!(
                    may_step(from, to, transition.needs | attribute),
                    taken,
                    "{attribute:#x}"
                );
            }
        }
    }

    /// Checks the limits of each attribute, and that valid values are kept.
    #[test]
    fn each_attribute_is_checked_and_kept() {
        let gid = Gid([7; 16]);
        let gids = [GidRow { gid, interface: String::new(), interface_index: 0, mtu: 1500 }];
        let allowed = Allowed { gids: &gids, max_ird: 4, max_ord: 5, max_mtu: MAX_MTU };
        let mut right: ibv_qp_attr = zeroed();
        right.port_num = PORT;
        right.qp_access_flags = Access::REMOTE_WRITE.bits();
        right.qkey = 77;
        right.ah_attr.is_global = 1;
        right.ah_attr.port_num = PORT;
        right.path_mtu = c::IBV_MTU_512;
        right.timeout = 31;
        right.retry_cnt = 7;
        right.rnr_retry = 6;
        right.rq_psn = 0xFF12_3456;
        right.sq_psn = 0xFF65_4321;
        right.max_rd_atomic = 5;
        right.max_dest_rd_atomic = 4;
        right.min_rnr_timer = 30;
        right.dest_qp_num = LOW_24;
        assert!(check(&right, i32::MAX, &allowed).is_ok());
        type Spoil = fn(&mut ibv_qp_attr);
        let wrong: [(i32, Spoil); 11] = [
            (c::IBV_QP_PORT, |a| a.port_num = PORT + 1),
            (c::IBV_QP_PKEY_INDEX, |a| a.pkey_index = 1),
            (c::IBV_QP_AV, |a| a.ah_attr.is_global = 0),
            (c::IBV_QP_PATH_MTU, |a| a.path_mtu = MAX_MTU + 1),
            (c::IBV_QP_TIMEOUT, |a| a.timeout = 32),
            (c::IBV_QP_RETRY_CNT, |a| a.retry_cnt = 8),
            (c::IBV_QP_RNR_RETRY, |a| a.rnr_retry = 8),
            (c::IBV_QP_MIN_RNR_TIMER, |a| a.min_rnr_timer = 32),
            (c::IBV_QP_DEST_QPN, |a| a.dest_qp_num = LOW_24 + 1),
            (c::IBV_QP_MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 6),
            (c::IBV_QP_MAX_DEST_RD_ATOMIC, |a| a.max_dest_rd_atomic = 5),
        ];
        for (attribute, spoil) in wrong {
            let mut spoilt = right;
            spoil(&mut spoilt);
            let refused = check(&spoilt, attribute, &allowed).err().map(|e| e.number());
            assert_eq!(refused, Some(libc::EINVAL), "{attribute:#x}");
            assert!(check(&spoilt, i32::MAX & !attribute, &allowed).is_ok(), "{attribute:#x}");
        }
        // RC keeps all of them but the Q_Key on its way to RTS.
        let mut states = RoceStates::of(QpType::Rc);
        for (state, mask) in
            [(c::IBV_QPS_INIT, INIT), (c::IBV_QPS_RTR, PEER), (c::IBV_QPS_RTS, SENDS)]
        {
            let wanted = ibv_qp_attr { qp_state: state, ..right };
            states = states.after(&wanted, c::IBV_QP_STATE | mask, &allowed).unwrap();
        }
        let wiring = states.wiring(&gids).unwrap();
        assert_eq!((wiring.rq_psn, wiring.path_mtu, wiring.min_rnr_timer), (0x12_3456, 512, 30));
        assert_eq!((wiring.remote_qp, wiring.ird), (QpId(LOW_24), 4));
        assert_eq!(wiring.rights, Access::REMOTE_WRITE);
        let sending = states.sending();
        assert_eq!((sending.sq_psn, sending.timeout, sending.retry_count), (0x65_4321, 31, 7));
        assert_eq!((sending.rnr_retry, sending.ord), (6, 5));
        assert_eq!(states.attr().port_num, PORT);
        let datagrams = RoceStates::of(QpType::Ud);
        let wanted = ibv_qp_attr { qp_state: c::IBV_QPS_INIT, ..right };
        let init = datagrams.after(&wanted, c::IBV_QP_STATE | UD_INIT, &allowed).unwrap();
        assert_eq!(init.attr().qkey, 77);
    }

    /// UC and UD leave SQE by the transition to RTS with the kernel's attributes; RC has no SQE.
    #[test]
    fn sqe_leads_to_rts() {
        let takes = |kind, mask| {
            let mut states = RoceStates::of(kind);
            states.follow(QpState::Sqe);
            assert_eq!(states.state(), c::IBV_QPS_SQE);
            let wanted =
                ibv_qp_attr { qp_state: c::IBV_QPS_RTS, cur_qp_state: c::IBV_QPS_SQE, ..zeroed() };
            let allowed = Allowed { gids: &[], max_ird: 4, max_ord: 4, max_mtu: MAX_MTU };
            let after = states.after(&wanted, c::IBV_QP_STATE | mask, &allowed);
            after.is_ok_and(|after| after.state() == c::IBV_QPS_RTS)
        };
        for (mask, uc, ud) in [
            (0, true, true),
            (c::IBV_QP_CUR_STATE, true, true),
            (c::IBV_QP_ACCESS_FLAGS, true, false),
            (c::IBV_QP_QKEY, false, true),
            (c::IBV_QP_PATH_MIG_STATE, false, false),
        ] {
            assert_eq!(takes(QpType::Uc, mask), uc, "{mask:#x}");
            assert_eq!(takes(QpType::Ud, mask), ud, "{mask:#x}");
            assert!(!takes(QpType::Rc, mask), "{mask:#x}");
        }
    }

    #[test]
    fn refused_attributes_change_nothing() {
        let gid = Gid([7; 16]);
        let gids = [GidRow { gid, interface: String::new(), interface_index: 0, mtu: 1500 }];
        let allowed = Allowed { gids: &gids, max_ird: 4, max_ord: 4, max_mtu: MAX_MTU };
        let mut wanted: ibv_qp_attr = zeroed();
        wanted.qp_state = c::IBV_QPS_INIT;
        wanted.port_num = PORT;
        wanted.qp_access_flags = Access::REMOTE_READ.bits();
        let states = RoceStates::of(QpType::Rc);
        assert!(states.after(&wanted, c::IBV_QP_STATE, &allowed).is_err());
        let init = states.after(&wanted, c::IBV_QP_STATE | INIT, &allowed).unwrap();
        wanted.port_num = 2;
        assert!(states.after(&wanted, c::IBV_QP_STATE | INIT, &allowed).is_err());

        wanted.qp_state = c::IBV_QPS_RTR;
        wanted.path_mtu = c::IBV_MTU_1024;
        wanted.dest_qp_num = 5;
        wanted.rq_psn = 0xFF00_0006;
        wanted.max_dest_rd_atomic = 3;
        wanted.ah_attr.is_global = 1;
        wanted.ah_attr.port_num = PORT;
        wanted.min_rnr_timer = 12;
        let mask = c::IBV_QP_STATE | PEER;
        let rtr = init.after(&wanted, mask, &allowed).unwrap();
        let wiring = rtr.wiring(&gids).unwrap();
        assert_eq!((wiring.local, wiring.remote_qp, wiring.rq_psn), (gid, QpId(5), 6));
        assert_eq!((wiring.ird, wiring.path_mtu, wiring.rights), (3, 1024, Access::REMOTE_READ));
        for mtu in c::IBV_MTU_256..=MAX_MTU {
            wanted.path_mtu = mtu;
            let wiring = init.after(&wanted, mask, &allowed).unwrap().wiring(&gids).unwrap();
            assert_eq!(wiring.path_mtu, 128 << mtu);
        }
        type Spoil = fn(&mut ibv_qp_attr);
        let wrong: [Spoil; 6] = [
            |a| a.ah_attr.port_num = 2,
            |a| a.path_mtu = MAX_MTU + 1,
            |a| a.ah_attr.is_global = 0,
            |a| a.ah_attr.grh.sgid_index = 1,
            |a| a.dest_qp_num = 1 << 24,
            |a| a.max_dest_rd_atomic = 5,
        ];
        for (n, spoil) in wrong.into_iter().enumerate() {
            let mut spoilt = wanted;
            spoil(&mut spoilt);
            assert!(init.after(&spoilt, mask, &allowed).is_err(), "{n}");
        }
        assert!(rtr.after(&wanted, 0, &allowed).is_err());
    }
}
