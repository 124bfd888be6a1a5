//! How two queue pairs of one process meet.

use rnic_client::{AcceptOptions, ConnectOptions, Listener, Qp};

use crate::DEADLINE;

/// Connects `active` to `passive`, which answers at `listener`, both with the default options.
pub fn join(listener: &Listener, active: &Qp, passive: &Qp) {
    active.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    request.accept(passive, &AcceptOptions::default()).unwrap();
    active.wait_connected(Some(DEADLINE)).unwrap();
}
