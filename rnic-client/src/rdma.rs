//! Objects and links as `rdma` of iproute2 shows and changes them: for rnicd's program of this
//! name, and for the library that answers the netlink requests of iproute2's.
//!
//! A session may use all devices, and only a QP belongs to one kind of them. So iWARP QPs are shown
//! with the iWARP device, and everything else with the first RoCE device.

use std::collections::HashMap;
use std::net::SocketAddr;

use rnic_abi::abi::control::*;
use rnic_abi::types::*;

use crate::context::Context;
use crate::error::Error;

/// Kinds of objects.
pub const KINDS: [&str; 7] = ["qp", "cm_id", "cq", "mr", "pd", "ctx", "srq"];

/// An attribute of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// Name in the output of `rdma`.
    pub name: &'static str,
    /// `RDMA_NLDEV_ATTR_RES_...` (`rdma/rdma_netlink.h`).
    pub number: u16,
    /// The value.
    pub value: Value,
}

/// The value of an attribute, with its width in the messages of netlink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number of 32 bits.
    U32(u32),
    /// A number of 64 bits.
    U64(u64),
    /// A number of 8 bits and its word.
    Word8(u8, &'static str),
    /// A number of 32 bits and its word.
    Word32(u32, &'static str),
    /// On or off, as a number of 8 bits.
    Switch(bool),
    /// A socket address.
    Address(SocketAddr),
    /// A process and its command.
    Process(u32, String),
    /// Ranges of QP numbers, in ascending order, with their last numbers.
    Qps(Vec<(u32, u32)>),
}

fn attribute(name: &'static str, number: u16, value: Value) -> Attribute {
    Attribute { name, number, value }
}

fn number(name: &'static str, kind: u16, value: u32) -> Attribute {
    attribute(name, kind, Value::U32(value))
}

/// The objects of all sessions that the user may see.
#[derive(Clone, Debug)]
pub struct Objects {
    clients: Vec<ClientRow>,
    qps: Vec<QpRow>,
    cqs: Vec<CqRow>,
    mrs: Vec<MrRow>,
    pds: Vec<PdRow>,
    srqs: Vec<SrqRow>,
    listeners: Vec<ListenerRow>,
    /// Process and command of each session.
    owners: HashMap<SessionId, Value>,
}

impl Objects {
    /// Reads the daemon's tables, without the session of the context.
    pub fn read(context: &Context) -> Result<Self, Error> {
        let mut clients: Vec<ClientRow> = context.rows()?;
        clients.retain(|row| row.session != context.session());
        let owner = |row: &ClientRow| {
            (row.session, Value::Process(row.pid.cast_unsigned(), row.command.clone()))
        };
        Ok(Objects {
            owners: clients.iter().map(owner).collect(),
            qps: context.rows()?,
            cqs: context.rows()?,
            mrs: context.rows()?,
            pds: context.rows()?,
            srqs: context.rows()?,
            listeners: context.rows()?,
            clients,
        })
    }

    /// Returns the number of objects of each kind. `None` is a RoCE device after the first.
    pub fn counts(&self, device: Option<DeviceKind>) -> [(&'static str, usize); 7] {
        let counted = |kind| (kind, self.list(kind, device).len());
        ["pd", "cq", "qp", "cm_id", "mr", "ctx", "srq"].map(counted)
    }

    /// Returns the objects of a kind with their attributes, in the order of iproute2's output. The
    /// device `None` is a RoCE device after the first.
    pub fn list(&self, kind: &str, device: Option<DeviceKind>) -> Vec<Vec<Attribute>> {
        let Some(device) = device else { return Vec::new() };
        match (kind, device) {
            ("qp", _) => {
                let is_of = |row: &&QpRow| row.kind.is_roce() == (device == DeviceKind::Roce);
                self.qps.iter().filter(is_of).map(|row| self.qp(row)).collect()
            }
            (_, DeviceKind::Iwarp) => Vec::new(),
            ("cm_id", _) => self.listeners.iter().map(|row| self.cm_id(row)).collect(),
            ("cq", _) => self.cqs.iter().map(|row| self.cq(row)).collect(),
            ("mr", _) => self.mrs.iter().map(|row| self.mr(row)).collect(),
            ("pd", _) => self.pds.iter().map(|row| self.pd(row)).collect(),
            ("ctx", _) => {
                let ctx = |row: &ClientRow| self.owned(row.session, vec![ctxn(row.session)]);
                self.clients.iter().map(ctx).collect()
            }
            ("srq", _) => self.srqs.iter().map(|row| self.srq(row)).collect(),
            _ => Vec::new(),
        }
    }

    /// Appends process and command of a session.
    fn owned(&self, session: SessionId, mut attributes: Vec<Attribute>) -> Vec<Attribute> {
        let owner = self.owners.get(&session).cloned();
        attributes.extend(owner.map(|owner| attribute("pid", PID, owner)));
        attributes
    }

    fn qp(&self, row: &QpRow) -> Vec<Attribute> {
        let (kind, name) = match row.kind {
            QpType::Iwarp | QpType::Rc => (2, "RC"),
            QpType::Uc => (3, "UC"),
            QpType::Ud => (4, "UD"),
        };
        let state = match row.state {
            QpState::Idle => Value::Word8(1, "INIT"),
            QpState::Rtr => Value::Word8(2, "RTR"),
            QpState::Rts => Value::Word8(3, "RTS"),
            QpState::Sqd => Value::Word8(4, "SQD"),
            QpState::Sqe => Value::Word8(5, "SQE"),
            QpState::Closing | QpState::Terminate | QpState::Error => Value::Word8(6, "ERR"),
        };
        let is_connected = row.kind != QpType::Ud;
        let mut attributes = vec![number("lqpn", LQPN, row.qp.0)];
        if is_connected {
            attributes.push(number("rqpn", RQPN, row.remote_qp.map_or(0, |qp| qp.0)));
        }
        attributes.push(attribute("type", TYPE, Value::Word8(kind, name)));
        attributes.push(attribute("state", STATE, state));
        if is_connected {
            attributes.push(number("rq-psn", RQ_PSN, row.rq_psn));
        }
        attributes.push(number("sq-psn", SQ_PSN, row.sq_psn));
        if is_connected {
            let migrated = Value::Word8(0, "MIGRATED");
            attributes.push(attribute("path-mig-state", PATH_MIG_STATE, migrated));
        }
        attributes.push(pdn(row.pd));
        self.owned(row.session, attributes)
    }

    fn cm_id(&self, row: &ListenerRow) -> Vec<Attribute> {
        let is_bound = row.backlog == 0;
        let state =
            if is_bound { Value::Word8(7, "ADDR_BOUND") } else { Value::Word8(8, "LISTEN") };
        let attributes = vec![
            number("cm-idn", CM_IDN, row.listener.0),
            attribute("state", STATE, state),
            attribute("ps", PS, Value::Word32(0x106, "TCP")),
        ];
        let mut attributes = self.owned(row.session, attributes);
        attributes.push(attribute("src-addr", SRC_ADDR, Value::Address(row.address)));
        attributes
    }

    fn cq(&self, row: &CqRow) -> Vec<Attribute> {
        let attributes = vec![
            number("cqn", CQN, row.cq.0),
            number("cqe", CQE, row.capacity),
            attribute("users", USECNT, Value::U64(row.qps.into())),
            attribute("adaptive-moderation", DIM, Value::Switch(false)),
            ctxn(row.session),
        ];
        self.owned(row.session, attributes)
    }

    fn mr(&self, row: &MrRow) -> Vec<Attribute> {
        let attributes = vec![
            number("mrn", MRN, row.mr.0),
            attribute("mrlen", MRLEN, Value::U64(row.length)),
            pdn(row.pd),
        ];
        self.owned(row.session, attributes)
    }

    fn pd(&self, row: &PdRow) -> Vec<Attribute> {
        let users = u64::from(row.mrs) + u64::from(row.qps);
        let mut attributes = vec![pdn(row.pd), attribute("users", USECNT, Value::U64(users))];
        let Some(session) = row.session else { return attributes };
        attributes.push(ctxn(session));
        self.owned(session, attributes)
    }

    fn srq(&self, row: &SrqRow) -> Vec<Attribute> {
        let of_srq = |qp: &&QpRow| qp.srq == Some(row.srq) && qp.session == row.session;
        let mut numbers: Vec<u32> = self.qps.iter().filter(of_srq).map(|qp| qp.qp.0).collect();
        numbers.sort_unstable();
        let attributes = vec![
            number("srqn", SRQN, row.srq.0),
            attribute("type", TYPE, Value::Word8(0, "BASIC")),
            attribute("lqpn", QP, Value::Qps(ranges(&numbers))),
            pdn(row.pd),
        ];
        self.owned(row.session, attributes)
    }
}

fn pdn(pd: PdId) -> Attribute {
    number("pdn", PDN, pd.0)
}

fn ctxn(session: SessionId) -> Attribute {
    number("ctxn", CTXN, session.0)
}

/// Returns the ranges of consecutive numbers.
fn ranges(numbers: &[u32]) -> Vec<(u32, u32)> {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    runs.filter_map(|run| Some((*run.first()?, *run.last()?))).collect()
}

/// Adds a link of type `rxe`: a RoCE device on an interface.
///
/// A device of all interfaces with this name becomes a device of the interface: the profile or the
/// configuration has given it the name, and a job for the kernel's rxe expects to create it.
pub fn add_link(context: &Context, name: &str, netdev: &str) -> Result<(), Error> {
    let devices = context.device_unruled()?.devices;
    let is_of_all = |device: &DeviceRow| device.name == name && device.interface.is_empty();
    let replaces = devices.iter().any(|d| d.kind == DeviceKind::Roce && is_of_all(d));
    if replaces {
        context.remove_device(name)?;
    }
    let added = context.add_device(name, Some(netdev));
    if added.is_err() && replaces {
        context.add_device(name, None)?;
    }
    added
}

/// `RDMA_NLDEV_ATTR_RES_...`, except for `RDMA_NLDEV_ATTR_DEV_DIM`.
const QP: u16 = 19;
/// The number of a QP.
pub const LQPN: u16 = 21;
const RQPN: u16 = 22;
const RQ_PSN: u16 = 23;
const SQ_PSN: u16 = 24;
const PATH_MIG_STATE: u16 = 25;
const TYPE: u16 = 26;
const STATE: u16 = 27;
const PID: u16 = 28;
const PS: u16 = 32;
const SRC_ADDR: u16 = 33;
const CQE: u16 = 37;
const USECNT: u16 = 38;
const MRLEN: u16 = 45;
const PDN: u16 = 60;
const CQN: u16 = 61;
const MRN: u16 = 62;
const CM_IDN: u16 = 63;
const CTXN: u16 = 64;
const DIM: u16 = 84;
const SRQN: u16 = 90;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qp_numbers_form_ranges() {
        assert_eq!(ranges(&[]), []);
        assert_eq!(ranges(&[5, 7, 8, 9, u32::MAX]), [(5, 5), (7, 9), (u32::MAX, u32::MAX)]);
    }
}
