//! The fault rules that a QP has been given.

use std::net::IpAddr;

use rnic_abi::faults::FaultName;
use rnic_core::engine::PortChanges;

/// What the engine, or the configuration of a QP that no worker holds, was last told.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct QpFaults {
    pub rules: Vec<u64>,
    pub stopped: Option<FaultName>,
    /// The rule of memory order, if a worker holds the QP.
    pub order: Option<u64>,
    /// Changes of the ports, for a UD QP.
    pub port: PortChanges,
    /// The rule of its link, in the same way, with the addresses of both ends.
    pub link: Option<LinkKey>,
}

/// Key of an emulated link: the number of the rule, and the addresses of this end and of the peer.
/// QPs of the same addresses share its rate.
pub type LinkKey = (u64, Option<[IpAddr; 2]>);
