//! Connection management (`rdma_cm(7)`): ids, their event channels, and the effect of the daemon's
//! events on them.
//!
//! An id is an `IdBody`. Its events wait on its `EventChannel`. They change the C structure when
//! the program fetches them, so the event thread never writes memory that the program reads.
//!
//! The [`Service`](service::Service) of an id is its device and port space. Ids of `RDMA_PS_TCP`
//! belong to the iWARP device if it is visible to the program. Otherwise they connect RC or UC QPs
//! of the RoCE device ([`rc`]), as ids of `RDMA_PS_IB` always do. Ids of `RDMA_PS_UDP` belong to
//! the RoCE device, which has UD QPs. They make no connections: `rdma_connect(3)` looks up the QP
//! that serves the peer's port.

mod ack;
pub(crate) mod addrinfo;
pub(crate) mod channel;
pub(crate) mod connect;
mod delays;
pub(crate) mod devices;
pub(crate) mod endpoint;
pub(crate) mod events;
mod failed_resolutions;
mod ib;
pub(crate) mod id;
mod ids;
pub(crate) mod listen;
mod lookup;
pub(crate) mod option;
mod port;
pub(crate) mod qp;
mod rc;
mod rc_attr;
mod rejection;
pub(crate) mod resolve;
mod service;
pub(crate) mod srq;
mod state;
mod transitions;
