//! Follows changes to the addresses of this host.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use if_addrs::Interface;
use rnic_abi::abi::control::Event;
use rnic_abi::types::Gid;
use rnic_core::engine::EngineCommand;

use super::devices::RoceDevices;
use super::qp::QpPhase;
use super::{Manager, gids};
use crate::clock;
use crate::config::Config;

impl Manager {
    /// Updates the GID table after the interfaces have been read again.
    pub fn addresses_read(&mut self, found: io::Result<Vec<Interface>>) {
        let found = match found {
            Ok(found) => found,
            Err(error) => return self.gids_unknown(&error),
        };
        self.gids_problem.clear();
        self.devices.interfaces = found;
        self.update_gids();
    }

    /// Updates the GID table for the addresses that were read last, and those that devices name.
    pub(super) fn update_gids(&mut self) {
        let mut gids = self.gids.clone();
        let RoceDevices { interfaces, named, .. } = &self.devices;
        let now = gids::table(&self.config, named, interfaces);
        gids::update(&mut gids, now.clone());
        let internal = gids::internal(&gids, interfaces);
        self.devices.addresses = now;
        if self.remove_devices_of_lost_interfaces() {
            self.announce_devices();
        }
        if (&gids, &internal) == (&self.gids, &self.internal_gids) {
            return;
        }
        self.gids = gids;
        self.internal_gids = internal;
        if self.devices_follow() {
            self.announce_devices();
        }
        self.follow_gids();
        self.refresh_datagram_port();
        for session in self.sessions.values() {
            session.tell(&Event::GidsChanged);
        }
        let count = self.gid_count();
        tracing::info!(gids = count, "the addresses of this host have changed");
        self.note("gids_changed", None, format!("{count} GIDs"));
    }

    /// Passes the GIDs to the connection manager and to all UD QPs, after a change of the GIDs or
    /// of the sockets.
    pub(super) fn refresh_datagram_port(&mut self) {
        let Config { wired, engine, .. } = &*self.config;
        let without_socket: Vec<Gid> = self.gids_without_socket().collect();
        let port = gids::datagram_port(&self.gids, &without_socket, wired.port, engine.loopback);
        if port == self.datagram_port {
            return;
        }
        self.datagram_port = port;
        let has_loopback = self.config.device.addresses.is_empty();
        self.cm.set_datagram_port(&self.datagram_port, has_loopback, clock::now());
        for session in self.sessions.values() {
            for (&qp, object) in &session.qps {
                if let (QpPhase::Bound(worker), Some(_)) = (&object.phase, &object.datagrams) {
                    let port = self.datagram_port_with(&object.faults.port);
                    self.workers.one(*worker, EngineCommand::SetDatagramPort(qp, port));
                }
            }
        }
    }

    pub(super) fn gids_unknown(&mut self, error: &io::Error) {
        let problem = format!("cannot read the addresses of this host (getifaddrs): {error}");
        // Log once, because later attempts may fail in the same way.
        if self.gids_problem != problem {
            tracing::warn!("{problem}; check that the service manager allows AF_NETLINK");
        }
        self.gids_problem = problem;
    }

    /// Returns true if the daemon has this GID.
    pub(super) fn has_gid(&self, gid: Gid) -> bool {
        !gid.is_zero() && self.gids.iter().any(|row| row.gid == gid)
    }

    /// Returns true if only QPs of this daemon have this GID.
    pub(super) fn is_internal(&self, gid: Gid) -> bool {
        self.internal_gids.contains(&gid)
    }

    /// Returns the socket address of a GID for a socket of this daemon that is bound to the GID
    /// `own`. A link-local address gets the scope ID of the interface of `own`.
    pub(super) fn socket_address(&self, gid: Gid, port: u16, own: Gid) -> SocketAddr {
        match gid.address() {
            IpAddr::V6(ip) if gids::is_link_local(gid) => {
                let row = self.gids.iter().find(|row| row.gid == own);
                let scope = row.map_or(0, |row| row.interface_index);
                SocketAddrV6::new(ip, port, 0, scope).into()
            }
            ip => SocketAddr::new(ip, port),
        }
    }

    /// Returns the GIDs that are addresses of this host.
    pub(super) fn host_gids(&self) -> impl Iterator<Item = Gid> {
        let gids = self.gids.iter().map(|row| row.gid);
        gids.filter(|gid| !gid.is_zero() && !self.is_internal(*gid))
    }

    /// Returns the number of entries that are not empty.
    pub(super) fn gid_count(&self) -> usize {
        self.gids.iter().filter(|row| !row.gid.is_zero()).count()
    }
}
