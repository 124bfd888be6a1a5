//! Connections that the daemon has rejected and still sends bytes to.

use std::io;
use std::net::Shutdown;

use rnic_abi::types::SessionId;

use crate::cm::net::{self, OutgoingBytes};
use crate::socket::Socket;

/// A rejected connection. It sends the final bytes and then waits for the peer's FIN: closing with
/// unread bytes would reset the connection and could destroy the final bytes in flight.
#[derive(Debug)]
pub(in crate::cm) struct Closing {
    pub(in crate::cm) stream: Socket,
    final_bytes: OutgoingBytes,
    shut: bool,
    discarded: usize,
}

impl Closing {
    pub(super) fn new(stream: Socket, final_bytes: Vec<u8>) -> Self {
        let final_bytes = OutgoingBytes::new(final_bytes);
        Closing { stream, final_bytes, shut: false, discarded: 0 }
    }

    /// Returns true once finished.
    pub(super) fn drive(&mut self, scratch: &mut [u8]) -> bool {
        if !self.shut {
            match self.final_bytes.send(&self.stream) {
                Ok(true) => self.shut = self.stream.shutdown(Shutdown::Write).is_ok(),
                Ok(false) => return false,
                Err(_) => return true,
            }
        }
        while self.shut && self.discarded < MAX_DISCARDED {
            match net::receive(&self.stream, scratch) {
                Ok(n @ 1..) => self.discarded += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                Ok(0) | Err(_) => return true,
            }
        }
        true
    }
}

/// A rejected connection with a pending reply: the kernel's send buffer is full, because the peer
/// has not read the streaming-mode data before it.
#[derive(Debug)]
pub(in crate::cm) struct Returning {
    pub(super) session: SessionId,
    /// A client waits for [`CmEvent::Returned`](crate::cm::CmEvent::Returned).
    pub(super) awaited: bool,
    pub(super) stream: Socket,
    pub(super) reply: OutgoingBytes,
}

impl Returning {
    pub(in crate::cm) fn session(&self) -> SessionId {
        self.session
    }

    pub(in crate::cm) fn stream(&self) -> &Socket {
        &self.stream
    }
}

/// Maximum bytes from a rejected peer to read and discard before its connection is closed.
const MAX_DISCARDED: usize = 64 * 1024;
