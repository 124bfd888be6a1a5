//! Fetching events of ids, and waiting for them.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::DatagramAddress;

use super::ack::{CmEventBody, acknowledge_by_program, acknowledge_own};
use super::channel::channel;
use super::id::{self, CmIdBody, cm_id};
use super::qp::show_state;
use super::service::Service;
use super::state::{CmEvent, IdBody};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Live, live, publish, zeroed};
use crate::ffi::pointers::{Out, get, set};
use crate::strings::cm_event;
use crate::system;
use crate::verbs::ah::attributes_to;

fn get(from: *mut rdma_event_channel, to: Out<*mut rdma_cm_event>) -> Result<(), Errno> {
    let to = to.required("event")?;
    to.write(fetch(from)?);
    Ok(())
}

/// Returns the next event of a channel.
pub(super) fn fetch(from: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    let arrived = channel(from)?.next()?;
    let listener = arrived.id.clone();
    show(arrived).inspect_err(|_| listener.unacknowledged.acknowledge(1))
}

/// Turns an event into its C structure, and updates the C structure of its id. The id is live,
/// because `IdBody::destroy` waits until the event that `next` has counted is acknowledged.
fn show(mut arrived: CmEvent) -> Result<*mut rdma_cm_event, Errno> {
    let mut head: rdma_cm_event = zeroed();
    head.event = arrived.kind;
    head.status = arrived.status;
    let at = arrived.id.head().0;
    let of = cm_id(at)?;
    match arrived.request.take() {
        Some(request) => {
            let channel = if of.is_synchronous() { null_mut() } else { get!(of.channel) };
            let body = |on| IdBody::with_request(&arrived.id, on, request);
            let device = &arrived.id.device;
            head.listen_id = at;
            head.id = id::make(device, channel, get!(of.context), get!(of.ps), body)?;
            let new = cm_id(head.id)?;
            id::show_addresses(new)?;
            if arrived.id.is_rc() {
                set!(new.qp_type = get!(of.qp_type));
                id::show_path(new)?;
            }
        }
        None => {
            head.id = at;
            id::show_addresses(of)?;
            if arrived.kind == RDMA_CM_EVENT_ROUTE_RESOLVED {
                id::show_path(of)?;
            }
        }
    }
    let connection = arrived.connection.unwrap_or_default();
    let private_data = connection.private_data;
    let small = |n: u16| u8::try_from(n).unwrap_or(u8::MAX);
    let length = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
    let mut conn: rdma_conn_param = zeroed();
    if length > 0 {
        conn.private_data = private_data.as_ptr().cast();
    }
    conn.private_data_len = length;
    conn.responder_resources = small(connection.inbound);
    conn.initiator_depth = small(connection.outbound);
    if let Some(peer) = &connection.rc_peer {
        conn.retry_count = peer.retry_count;
        conn.rnr_retry_count = peer.rnr_retry;
        conn.srq = peer.srq.into();
        conn.qp_num = peer.qp.0;
    }
    if arrived.id.is_rc() {
        match arrived.kind {
            RDMA_CM_EVENT_ESTABLISHED => show_state(of, IBV_QPS_RTS),
            RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_CONNECT_ERROR => show_state(of, IBV_QPS_ERR),
            _ => {}
        }
    }
    head.param = match arrived.id.service {
        Service::Iwarp | Service::Rc(_) => rdma_cm_event_param { conn },
        Service::Ud => {
            let private_data = conn.private_data;
            let private_data_len = conn.private_data_len;
            rdma_cm_event_param {
                ud: match connection.address {
                    Some(to) => rdma_ud_param {
                        private_data,
                        private_data_len,
                        ah_attr: ud_address(&arrived.id, to)?,
                        qp_num: to.qp.0,
                        qkey: to.q_key,
                    },
                    None => rdma_ud_param { private_data, private_data_len, ..zeroed() },
                },
            }
        }
    };
    Ok(publish(head, CmEventBody { id: arrived.id, _private_data: private_data }).as_ptr())
}

/// Returns the address of the peer's UD QP, with the traffic class of the id's route.
fn ud_address(id: &IdBody, to: DatagramAddress) -> Result<ibv_ah_attr, Errno> {
    let mut address = attributes_to(id.gid_index(to.source)?, to.gid)?;
    address.grh.traffic_class = id.traffic_class();
    Ok(address)
}

/// Begins an operation. If the id is synchronous, waits for its event, which stays in the id until
/// the next one. Otherwise the id is not accessed after `begin`, because another thread may fetch
/// the event and destroy the id. The wait is a cancellation point.
pub(super) fn completed(
    id: *mut rdma_cm_id,
    begin: impl FnOnce(Live<CmIdBody>, &Arc<IdBody>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let found = cm_id(id)?;
    let guard = system::uncancelled();
    let of = found.id.clone();
    let waits = found.is_synchronous();
    begin(found, &of)?;
    // No resources may be held during the wait.
    drop(of);
    drop(guard);
    if waits { complete(found) } else { Ok(()) }
}

/// Waits for the next event of a synchronous id.
fn complete(id: Live<CmIdBody>) -> Result<(), Errno> {
    acknowledge_own(id);
    let event = fetch(get!(id.channel))?;
    set!(id.event = event);
    let event = live::<CmEventBody>(event)?;
    match get!(event.status) {
        0 => Ok(()),
        status => Err(failed_event(get!(event.event), status)),
    }
}

/// Returns the error of a synchronous call with this event status.
pub(super) fn failed_event(kind: rdma_cm_event_type, status: c_int) -> Errno {
    let number = if status < 0 { -status } else { libc::ECONNREFUSED };
    let name = cm_event(kind).to_string_lossy();
    Errno::new(number, format_args!("{name} with status {status}"))
}

entry! {
    /// rdma_get_cm_event(3). Holds no resources while it waits.
    cancellable rdma_get_cm_event(
        from: *mut rdma_event_channel, to: Out<*mut rdma_cm_event>,
    ) -> minus_one = get;
    uncancelled rdma_ack_cm_event(event: *mut rdma_cm_event) -> minus_one = acknowledge_by_program;
}
