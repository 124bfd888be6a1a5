//! Connections of RC and UC QPs (rdma_cm on the RoCE device).
//!
//! The daemons exchange the messages of the InfiniBand connection manager (IBTA specification,
//! volume 1, chapter 12), but do not change the QPs. The requesting program moves its QP to Rtr and
//! Rts after the peer's reply, and then confirms it. The responding program moves its QP before it
//! accepts. The ports are in port spaces of the RoCE device, separate from that of TCP, at the
//! addresses of its GIDs.

use std::net::{SocketAddr, ToSocketAddrs};

use rnic_abi::abi::control::{RcOffer, RequestBody};
use rnic_abi::roce::PortSpace;

use crate::addresses::try_each;
use crate::context::Context;
use crate::error::Error;
use crate::listener::{BindOptions, ConnectionRequest, Listener};
use crate::qp::Qp;

impl Context {
    /// Binds an address in a port space for RC and UC QPs, without listening (`rdma_bind_addr(3)`
    /// on a RoCE device). With port 0 the daemon chooses the port. The result is used like any
    /// [`Listener`]; [`ConnectionRequest::accept_rc`] accepts its requests.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the address does not belong to a GID of the device or is in use, or if
    /// a limit or an administrator's rule forbids it.
    pub fn bind_rc(
        &self,
        space: PortSpace,
        address: impl ToSocketAddrs,
        BindOptions { v6_only }: BindOptions,
    ) -> Result<Listener, Error> {
        try_each(address, |address| {
            let body = RequestBody::BindRc { space, address, context: 0, v6_only };
            Listener::bind_as(&self.session, body)
        })
    }
}

impl ConnectionRequest {
    /// Accepts a request of [`Context::bind_rc`] with an RC or UC QP in Rts, and at most 196 bytes
    /// of private data. [`Event::Established`](crate::Event::Established) follows when the peer has
    /// confirmed, otherwise [`Event::RcRejected`](crate::Event::RcRejected) or
    /// [`Event::Unreachable`](crate::Event::Unreachable). [`reject`](Self::reject) takes at most
    /// 148 bytes here.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the peer has given up or the QP has a connection already.
    pub fn accept_rc(self, qp: &Qp, offer: &RcOffer, private_data: &[u8]) -> Result<(), Error> {
        qp.forget_last_connection()?;
        let private_data = private_data.to_vec();
        let (request, id) = (self.id(), qp.id());
        self.decide(qp, RequestBody::AcceptRc { request, qp: id, offer: *offer, private_data })
    }
}

impl Qp {
    /// Requests a connection of an RC or UC QP (`rdma_connect(3)` on a RoCE device), with at most
    /// 56 bytes of private data. [`Event::RcReply`](crate::Event::RcReply) follows, otherwise
    /// [`Event::RcRejected`](crate::Event::RcRejected) or
    /// [`Event::Unreachable`](crate::Event::Unreachable).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the QP has a connection already, or a limit or a rule forbids it.
    pub fn start_connect_rc(
        &self,
        space: PortSpace,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        offer: &RcOffer,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.forget_last_connection()?;
        let private_data = private_data.to_vec();
        let (qp, offer) = (self.id(), *offer);
        self.session().command(RequestBody::ConnectRc {
            qp,
            space,
            peer,
            local,
            offer,
            private_data,
        })
    }

    /// Confirms the peer's reply, after the QP has been moved to Rts (`rdma_establish(3)`).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no reply waits to be confirmed.
    pub fn establish_rc(&self) -> Result<(), Error> {
        self.session().command(RequestBody::EstablishRc { qp: self.id() })
    }
}
