//! Local and peer addresses (`rdma_bind_addr(3)`, `rdma_resolve_addr(3)`).

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use rnic_client::{BindOptions, Listener};

use super::devices::device_with;
use super::events::completed;
use super::id::{cm_id, show_addresses};
use super::port::ReservedPort;
use super::service::Service;
use super::state::{IbForm, IdBody, Phase};
use crate::c::{self, rdma_cm_id};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::socket_address::Address;
use crate::{log, net};

impl IdBody {
    /// Binds the id to an address (`rdma_bind_addr(3)`). Port 0 selects a free port.
    pub(crate) fn bind(&self, address: SocketAddr) -> Result<(), Errno> {
        self.ids().check_sources(self, address)?;
        let mut state = self.state.lock();
        state.expect(&[Phase::Idle])?;
        if net::is_multicast_or_broadcast(address.ip()) {
            return Err(errno!(
                libc::EADDRNOTAVAIL,
                "{} is a multicast or broadcast address",
                address.ip()
            ));
        }
        if !address.ip().is_unspecified() {
            device_with(&self.device, self.device_kind(), Some(address.ip()))?;
        }
        let ids = self.ids();
        let service = self.service_of(state.ib);
        let listener = self
            .claim(service, address, state.family_only)
            .map(Arc::new)
            .or_else(|error| ids.reusable(service, state.reuses_address, address).ok_or(error));
        let listener = listener.map_err(|error| {
            let errno = Errno::from(error);
            // As in the kernel, binding a wildcard address fails with EADDRNOTAVAIL if another
            // address has the same port. The daemon returns that for its own listeners; here, a
            // socket of another program holds the port.
            if errno.number() == libc::EADDRINUSE && address.ip().is_unspecified() {
                errno.with_number(libc::EADDRNOTAVAIL)
            } else {
                errno
            }
        })?;
        if state.reuses_address {
            ids.allow_reuse(service, true, &listener);
        }
        state.source = Some(listener.local_addr());
        state.source_chosen = true;
        state.listener = Some(listener);
        state.phase = Phase::Bound;
        Ok(())
    }

    /// Returns the service whose ports the id binds.
    fn service_of(&self, form: Option<IbForm>) -> Service {
        match (self.service, form) {
            (Service::Rc(_), Some(form)) => Service::Rc(form.own),
            (service, _) => service,
        }
    }

    /// Binds an address in the daemon.
    fn claim(
        &self,
        service: Service,
        address: SocketAddr,
        v6_only: bool,
    ) -> Result<Listener, rnic_client::Error> {
        let context = &self.device.context;
        let options = BindOptions { v6_only };
        match service {
            Service::Iwarp => context.bind_with(address, options),
            Service::Rc(space) => context.bind_rc(space, address, options),
            Service::Ud => context.bind_datagrams(address, options),
        }
    }

    /// Restricts the id to its own address family on a wildcard address, or lifts the restriction
    /// (`RDMA_OPTION_ID_AFONLY`). An id bound to the IPv6 wildcard address is bound again, to the
    /// same port.
    ///
    /// # Errors
    ///
    /// The errors of binding, for instance if the port is in use in the other family. The id then
    /// keeps its address, unless another program has taken the port in the meantime.
    pub(crate) fn set_family_only(&self, on: bool) -> Result<(), Errno> {
        let mut state = self.state.lock();
        state.expect(&[Phase::Idle, Phase::Bound])?;
        let before = std::mem::replace(&mut state.family_only, on);
        let both = |bound: &mut Arc<Listener>| {
            let address = bound.local_addr();
            // An address shared with other ids remains bound (`RDMA_OPTION_ID_REUSEADDR`).
            let changes = address.is_ipv6() && address.ip().is_unspecified() && before != on;
            changes && Arc::strong_count(bound) == 1
        };
        let Some(bound) = state.listener.take_if(both) else { return Ok(()) };
        let address = bound.local_addr();
        // Closed first, because the daemon binds a port only once.
        drop(bound);
        let service = self.service_of(state.ib);
        let (bound, refused) = match self.claim(service, address, on) {
            Ok(bound) => (bound, None),
            Err(error) => {
                state.family_only = before;
                let Ok(bound) = self.claim(service, address, before) else {
                    state.phase = Phase::Idle;
                    state.source = None;
                    state.source_chosen = false;
                    return Err(error.into());
                };
                (bound, Some(error))
            }
        };
        let bound = Arc::new(bound);
        if state.reuses_address {
            self.ids().allow_reuse(service, true, &bound);
        }
        state.listener = Some(bound);
        refused.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Finds the route to a peer (`rdma_resolve_addr(3)`). The kernel's routing table contains it,
    /// so the result is available at once.
    pub(crate) fn resolve_address(
        self: &Arc<Self>,
        source: Option<SocketAddr>,
        peer: SocketAddr,
    ) -> Result<(), Errno> {
        self.state.lock().expect(&[Phase::Idle, Phase::Bound])?;
        if !self.admit_address(peer)? {
            return Ok(());
        }
        if let Some(source) = source.filter(|source| source.port() != 0)
            && self.phase() == Phase::Idle
        {
            self.bind(source)?;
        }
        {
            let mut state = self.state.lock();
            state.expect(&[Phase::Idle, Phase::Bound])?;
            let from = state.source.or(source);
            let chosen = from.is_some_and(|from| !from.ip().is_unspecified());
            let from = match from {
                Some(from) if from.is_ipv4() == peer.is_ipv4() => from,
                // An unspecified GID stands for both families.
                Some(from) if state.ib.is_some() && from.ip().is_unspecified() => {
                    let any: IpAddr = match peer {
                        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                    };
                    SocketAddr::new(any, from.port())
                }
                Some(from) => {
                    return Err(invalid!("{from} and {peer} are of different families"));
                }
                None if peer.is_ipv4() => SocketAddr::from(([0; 4], 0)),
                None => SocketAddr::from(([0u16; 8], 0)),
            };
            let mut found = net::source_towards(from, peer).map_err(|error| {
                let number = error.raw_os_error().unwrap_or(libc::EIO);
                Errno::new(number, format_args!("no route from {} to {peer}: {error}", from.ip()))
            })?;
            let bound = state.source.map_or(0, |source| source.port());
            if bound == 0 {
                match ReservedPort::reserve(peer, self.device_kind()) {
                    Ok(port) => state.port = Some(port),
                    // The daemon then chooses a port when it connects.
                    Err(error) => log::debug(|| format!("no source port reserved: {error}")),
                }
            }
            // Fails here rather than with the first QP.
            device_with(&self.device, self.device_kind(), Some(found.ip()))?;
            found.set_port(state.port.as_ref().map_or(bound, ReservedPort::number));
            state.source = Some(found);
            state.peer = Some(peer);
            state.source_chosen = chosen;
            state.phase = Phase::AddressResolved;
        }
        self.ids().keep_source(self);
        self.push(c::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        Ok(())
    }

    /// Resolves the route (`rdma_resolve_route(3)`), which `resolve_address` has already found.
    pub(crate) fn resolve_route(self: &Arc<Self>) -> Result<(), Errno> {
        let (peer, tos) = {
            let state = self.state.lock();
            (state.peer.filter(|_| state.phase == Phase::AddressResolved), state.tos)
        };
        if let Some(peer) = peer
            && !self.admit_route(peer)?
        {
            return Ok(());
        }
        self.resolve_route_with(None, tos)
    }

    /// Resolves the route with a maximum of the path MTU, in bytes, and a traffic class.
    pub(super) fn resolve_route_with(
        self: &Arc<Self>,
        most_mtu: Option<u16>,
        traffic_class: u8,
    ) -> Result<(), Errno> {
        {
            let mut state = self.state.lock();
            state.expect(&[Phase::AddressResolved])?;
            state.phase = Phase::RouteResolved;
            state.most_mtu = most_mtu;
            state.traffic_class = traffic_class;
        }
        self.push(c::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        Ok(())
    }
}

/// Binds an id to an address.
pub(super) fn bind(id: *mut rdma_cm_id, address: Address) -> Result<(), Errno> {
    let found = cm_id(id)?;
    let address = match address.read_ib() {
        Some(address) => found.id.own_ib(&address)?,
        None => {
            found.id.no_ib()?;
            address.read().ok_or_else(no_address)?
        }
    };
    found.id.bind(address)?;
    show_addresses(found)
}

fn no_address() -> Errno {
    invalid!("the address is null, or its family is not AF_INET, AF_INET6 or AF_IB")
}

/// Finds the route to a peer. The result is available at once.
pub(super) fn resolve_address(
    id: *mut rdma_cm_id,
    source: Address,
    peer: Address,
) -> Result<(), Errno> {
    let found = cm_id(id)?;
    if let Some(peer) = peer.read_ib() {
        let from = source.read_ib();
        if from.is_none() && !source.is_null() {
            return Err(no_address());
        }
        let (from, peer) = found.id.peer_ib(from.as_ref(), &peer)?;
        return completed(id, |_, of| of.resolve_address(from, peer));
    }
    let peer = peer.read().ok_or_else(no_address)?;
    let from = source.read();
    if from.is_none() && !source.is_null() {
        return Err(no_address());
    }
    found.id.no_ib()?;
    completed(id, |_, of| of.resolve_address(from, peer))
}

pub(super) fn resolve_route(id: *mut rdma_cm_id) -> Result<(), Errno> {
    completed(id, |_, of| of.resolve_route())
}

entry! {
    uncancelled rdma_bind_addr(id: *mut rdma_cm_id, address: Address) -> minus_one = bind;
    /// rdma_resolve_addr(3). The timeout is not used.
    cancellable rdma_resolve_addr(
        id: *mut rdma_cm_id, source: Address, peer: Address, timeout_ms: c_int,
    ) -> minus_one = |id, source, peer, _| resolve_address(id, source, peer);
    /// rdma_resolve_route(3). The timeout is not used.
    cancellable rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> minus_one
        = |id, _| resolve_route(id);
}
