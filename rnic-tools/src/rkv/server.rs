//! The server: one table, and one connection for each client.

use std::time::Duration;

use parking_lot::Mutex;
use rnic_client::{AcceptOptions, Access, ConnectionRequest, Context, Pd};

use super::KvError;
use super::layout::Geometry;
use super::store::Store;
use super::wire::{self, Request, Table};
use crate::link::LinkError;
use crate::messenger::{Messenger, MessengerEvent, MessengerSizes};

/// Parameters of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Geometry of the table.
    pub geometry: Geometry,
    /// Clients without a request for this time are disconnected. GETs do not count, because the
    /// server does not see them. `None`: no limit.
    pub idle: Option<Duration>,
}

/// A table, and the resources for serving clients. Several threads may serve clients.
pub struct Server {
    context: Context,
    pd: Pd,
    store: Mutex<Store>,
    table: Table,
    idle: Option<Duration>,
}

impl Server {
    /// Creates an empty table.
    pub fn new(context: &Context, options: ServerOptions) -> Result<Self, KvError> {
        let geometry = options.geometry.check().map_err(KvError::Geometry)?;
        let pd = context.open_pd(None)?;
        let buffer = context.create_shared_buffer(geometry.bytes())?;
        // Peers can only read the region; only this process writes it.
        let rights = Access::REMOTE_READ | Access::ZERO_BASED;
        let region = pd.reg_mr(&buffer, ..geometry.bytes(), rights)?;
        let table = Table { geometry, region: region.remote() };
        let store = Mutex::new(Store::new(region, geometry));
        Ok(Server { context: context.clone(), pd, store, table, idle: options.idle })
    }

    /// Serves a client until it disconnects. Returns the number of its requests.
    pub fn serve(&self, request: ConnectionRequest) -> Result<u64, KvError> {
        let peer = request.peer();
        if let Err(why) = wire::check_greeting(request.private_data()) {
            // Fails if the client has already gone.
            let _ = request.reject(why.as_bytes());
            return Err(KvError::Protocol { peer, why });
        }
        let sizes = MessengerSizes {
            length: Request::max(self.table.geometry),
            receives: REQUESTS,
            sends: REQUESTS,
            others: 0,
        };
        let idle = self.idle.unwrap_or(Duration::MAX);
        let mut messenger = Messenger::new(&self.context, &self.pd, sizes, peer, idle)?;
        let accept =
            AcceptOptions { private_data: self.table.to_bytes(), ..AcceptOptions::default() };
        request
            .accept(messenger.qp(), &accept)
            .map_err(|source| LinkError::NotConnected { peer, source })?;
        let mut served = 0;
        loop {
            let reply = match messenger.next() {
                Ok(MessengerEvent::Message(bytes)) => match Request::parse(bytes) {
                    Some(request) => self.store.lock().apply(request)?,
                    None => {
                        let why = "a malformed request".to_owned();
                        return Err(KvError::Protocol { peer, why });
                    }
                },
                // Only messages are posted here.
                Ok(MessengerEvent::Done(_)) => continue,
                Err(LinkError::Closed { .. }) => return Ok(served),
                Err(e) => return Err(e.into()),
            };
            messenger.send(&reply.to_bytes())?;
            served += 1;
        }
    }
}

/// Requests that a client may send before it has received the reply to the first.
const REQUESTS: u32 = 4;
