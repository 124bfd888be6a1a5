//! Listeners: bound addresses, and passed connections that are handled like accepted ones.

mod passed;
mod requests;

use std::net::SocketAddr;

use crate::resource::ledger::Charge;
use crate::resource::numbers::Handle;

pub struct Listener {
    pub context: u64,
    pub address: SocketAddr,
    _handle: Handle,
    _charge: Charge,
}
