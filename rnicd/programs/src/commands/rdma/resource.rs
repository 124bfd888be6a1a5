//! `rdma resource`: the objects of the daemon.
//!
//! A session may use all devices, and only a QP belongs to one kind of them. So iWARP QPs are shown
//! with the iWARP device, and everything else with the first RoCE device.

use std::collections::HashMap;

use rnic_abi::abi::control::*;
use rnic_abi::types::{QpState, QpType, SessionId};
use rnic_client::Context;

use super::Failure;
use super::devices::Device;
use super::output::Object;
use crate::cli::ctl::rows;

/// Kinds of objects, in iproute2's words.
pub const KINDS: [&str; 7] = ["qp", "cm_id", "pd", "mr", "cq", "ctx", "srq"];

/// Returns the number of objects of each kind, per device.
pub fn summary(context: &Context, devices: Vec<&Device>) -> Result<Vec<Object>, Failure> {
    let tables = Tables::read(context)?;
    let count = |device: &Device, is_first: bool| {
        let qps =
            tables.qps.iter().filter(|qp| is_of(qp, device) && (is_first || !device.is_roce()));
        let of_first = |rows: usize| if is_first { rows as u64 } else { 0 };
        device
            .head()
            .number("pd", of_first(tables.pds.len()))
            .number("cq", of_first(tables.cqs.len()))
            .number("qp", qps.count() as u64)
            .number("cm_id", of_first(tables.listeners.len()))
            .number("mr", of_first(tables.mrs.len()))
            .number("ctx", of_first(tables.clients.len()))
            .number("srq", of_first(tables.srqs.len()))
    };
    let first = devices.iter().position(|device| device.is_roce());
    Ok(devices.iter().enumerate().map(|(n, device)| count(device, Some(n) == first)).collect())
}

/// Returns the objects of a kind that belong to one of the devices.
pub fn list(context: &Context, kind: &str, devices: &[Device]) -> Result<Vec<Object>, Failure> {
    let tables = Tables::read(context)?;
    let roce = devices.iter().find(|device| device.is_roce());
    let iwarp = devices.iter().find(|device| !device.is_roce());
    if kind == "qp" {
        let device = |qp: &&QpRow| if qp.kind == QpType::Iwarp { iwarp } else { roce };
        let shown = tables.qps.iter().filter_map(|qp| Some(tables.qp(device(&qp)?, qp)));
        return Ok(shown.collect());
    }
    let Some(device) = roce else { return Ok(Vec::new()) };
    let of = |session| tables.owner(session);
    Ok(match kind {
        "cm_id" => tables.listeners.iter().map(|row| tables.cm_id(device, row)).collect(),
        "pd" => {
            let pd = |row: &PdRow| {
                let object = device.dev().number("pdn", row.pd.0.into());
                let object = object.number("users", (row.mrs + row.qps).into());
                row.session
                    .map_or(object.clone(), |session| of(session)(with_context(object, session)))
            };
            tables.pds.iter().map(pd).collect()
        }
        "mr" => {
            let mr = |row: &MrRow| {
                let object = device.dev().number("mrn", row.mr.0.into());
                let object = object
                    .field("iova", format!("{:x}", row.iova), format!("iova 0x{:x} ", row.iova))
                    .number("mrlen", row.length)
                    .number("pdn", row.pd.0.into());
                of(row.session)(object)
            };
            tables.mrs.iter().map(mr).collect()
        }
        "cq" => {
            let cq = |row: &CqRow| {
                let object = device.dev().number("cqn", row.cq.0.into());
                let object =
                    object.number("cqe", row.capacity.into()).number("users", row.qps.into());
                of(row.session)(with_context(object, row.session))
            };
            tables.cqs.iter().map(cq).collect()
        }
        "ctx" => {
            let ctx = |row: &ClientRow| of(row.session)(with_context(device.dev(), row.session));
            tables.clients.iter().map(ctx).collect()
        }
        "srq" => {
            let srq = |row: &SrqRow| {
                let object = device.dev().number("srqn", row.srq.0.into()).text("type", "BASIC");
                of(row.session)(object.number("pdn", row.pd.0.into()))
            };
            tables.srqs.iter().map(srq).collect()
        }
        _ => Vec::new(),
    })
}

fn is_of(qp: &QpRow, device: &Device) -> bool {
    (qp.kind == QpType::Iwarp) != device.is_roce()
}

fn with_context(object: Object, session: SessionId) -> Object {
    object.number("ctxn", session.0.into())
}

/// The daemon's tables.
struct Tables {
    clients: Vec<ClientRow>,
    qps: Vec<QpRow>,
    cqs: Vec<CqRow>,
    mrs: Vec<MrRow>,
    pds: Vec<PdRow>,
    srqs: Vec<SrqRow>,
    listeners: Vec<ListenerRow>,
    /// Process ID and command of each session.
    owners: HashMap<SessionId, (i32, String)>,
}

impl Tables {
    /// Reads all tables, without the session of this process itself.
    fn read(context: &Context) -> Result<Self, Failure> {
        let mut clients: Vec<ClientRow> = rows(context)?;
        clients.retain(|row| row.pid.cast_unsigned() != std::process::id());
        let owners = clients.iter().map(|row| (row.session, (row.pid, row.command.clone())));
        let owners = owners.collect();
        Ok(Tables {
            qps: rows(context)?,
            cqs: rows(context)?,
            mrs: rows(context)?,
            pds: rows(context)?,
            srqs: rows(context)?,
            listeners: rows(context)?,
            clients,
            owners,
        })
    }

    /// Returns a function that adds process and command of a session.
    fn owner(&self, session: SessionId) -> impl Fn(Object) -> Object + '_ {
        move |object| match self.owners.get(&session) {
            Some((pid, command)) => {
                object.number("pid", pid.unsigned_abs().into()).text("comm", command)
            }
            None => object,
        }
    }

    fn qp(&self, device: &Device, row: &QpRow) -> Object {
        let kind = match row.kind {
            QpType::Iwarp | QpType::Rc => "RC",
            QpType::Uc => "UC",
            QpType::Ud => "UD",
        };
        let state = match row.state {
            QpState::Idle => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Sqd => "SQD",
            QpState::Sqe => "SQE",
            QpState::Closing | QpState::Terminate | QpState::Error => "ERR",
        };
        let object = device.link().number("lqpn", row.qp.0.into()).text("type", kind);
        self.owner(row.session)(object.text("state", state).number("pdn", row.pd.0.into()))
    }

    fn cm_id(&self, device: &Device, row: &ListenerRow) -> Object {
        let state = if row.backlog == 0 { "ADDR_BOUND" } else { "LISTEN" };
        let object = device.link().number("cm-idn", row.listener.0.into());
        let object = self.owner(row.session)(object.text("state", state).text("ps", "TCP"));
        // Without brackets around an IPv6 address, as iproute2.
        let address = format!("{}:{}", row.address.ip(), row.address.port());
        object.text("src-addr", &address)
    }
}
