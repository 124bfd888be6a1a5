//! The fault rules that a QP has been given.

use std::net::IpAddr;

use rnic_abi::faults::FaultName;
use rnic_core::engine::PortChanges;

/// Rules that the worker of a QP, or the configuration of a QP without a worker, was last given.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct QpFaults {
    /// Numbers of the rules that the engine evaluates.
    pub rules: Vec<u64>,
    /// Rule that keeps the QP from sending and receiving.
    pub stopped: Option<FaultName>,
    /// Number of the rule of memory order, if a worker holds the QP.
    pub order: Option<u64>,
    /// Changes of the ports, for a UD QP.
    pub port: PortChanges,
    /// The emulated link, if a worker holds the QP.
    pub link: Option<LinkKey>,
}

/// Key of an emulated link: the number of the rule, and the addresses of this end and of the peer.
/// QPs with the same addresses share the link and its rate.
pub type LinkKey = (u64, Option<[IpAddr; 2]>);
