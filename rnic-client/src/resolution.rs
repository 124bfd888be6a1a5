//! Resolution of ports to UD QPs (`RDMA_PS_UDP` of `rdma_cm(7)`).
//!
//! There is no connection. A program requests the QP of a port ([`Qp::resolve`]). A program that
//! listens on that port ([`Context::bind_datagrams`]) replies with the number and the Q_Key of one
//! of its QPs, or rejects the request. After that, both can send datagrams to each other. The ports
//! are in their own port space, separate from that of TCP, at the addresses of the device's GIDs.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rnic_abi::abi::control::{Event, RequestBody};
use rnic_abi::types::{AddressPair, Gid};

use crate::addresses::try_each;
use crate::connect::Claim;
use crate::context::Context;
use crate::datagram::DatagramAddress;
use crate::error::Error;
use crate::events::{Subject, settles_resolution};
use crate::inbox::deadline;
use crate::listener::{BindOptions, ConnectionRequest, Listener};
use crate::qp::Qp;

/// Options for a resolution (compare `struct rdma_conn_param` of `rdma_connect(3)`).
#[derive(Clone, Debug)]
pub struct ResolveOptions {
    /// Private data for the other program, at most 180 bytes; zero-padded to 180.
    pub private_data: Vec<u8>,
    /// Source address, which must belong to a GID of the device; `None` lets the daemon choose.
    pub local: Option<SocketAddr>,
    /// Timeout of [`Qp::resolve`]; default 40 s. With `None`, only the daemon's own deadline
    /// applies (`mpa.reply_deadline`).
    pub timeout: Option<Duration>,
}

impl Default for ResolveOptions {
    fn default() -> Self {
        let timeout = Some(Duration::from_secs(40));
        ResolveOptions { private_data: Vec::new(), local: None, timeout }
    }
}

/// The QP of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Destination for datagrams to the QP.
    pub address: DatagramAddress,
    /// Address and port of this end and of the peer.
    pub addresses: AddressPair,
    /// Private data of the reply, zero-padded to 136 bytes.
    pub private_data: Vec<u8>,
}

impl Context {
    /// Binds an address of the UD port space without listening (`rdma_bind_addr(3)` with
    /// `RDMA_PS_UDP`). With port 0 the daemon chooses the port. The result is used like any
    /// [`Listener`]; [`ConnectionRequest::accept_datagrams`] accepts its requests.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the address does not belong to a GID of the device or is in use, or if
    /// a limit or an administrator's rule forbids it.
    pub fn bind_datagrams(
        &self,
        address: impl ToSocketAddrs,
        BindOptions { v6_only }: BindOptions,
    ) -> Result<Listener, Error> {
        try_each(address, |address| {
            let body = RequestBody::BindDatagrams { address, context: 0, v6_only };
            Listener::bind_as(&self.session, body)
        })
    }
}

impl ConnectionRequest {
    /// Replies that this UD QP serves the port, with at most 136 bytes of private data. The peer
    /// also receives the QP's Q_Key. The QP must be in Rtr or later, and may serve any number of
    /// requests. No event follows. [`reject`](Self::reject) also takes at most 136 bytes here.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the deadline for a reply has passed or the QP is in another state.
    pub fn accept_datagrams(self, qp: &Qp, private_data: &[u8]) -> Result<(), Error> {
        self.decide_with(qp, None, None, private_data)
    }
}

impl Qp {
    /// Requests the QP of a port and waits for the reply (`rdma_connect(3)` with `RDMA_PS_UDP`).
    /// `self` must be a UD QP. Its state does not change, and it can have one resolution
    /// outstanding. The addresses of a name are tried in turn, each with the timeout of the
    /// options.
    ///
    /// # Errors
    ///
    /// [`Error::Rejected`] with the rejection's private data, zero-padded; [`Error::Unreachable`]
    /// with the reason, usually that no program listens on the port. After [`Error::TimedOut`] a
    /// late reply is ignored.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn ask(qp: &Qp) -> Result<(), Box<dyn std::error::Error>> {
    /// let found = qp.resolve("192.0.2.7:7471", &ResolveOptions::default())?;
    /// qp.post_send(&[SendRequest::send_inline(1, b"hello").to(&found.address).signaled()])?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn resolve(
        &self,
        peer: impl ToSocketAddrs,
        options: &ResolveOptions,
    ) -> Result<Resolved, Error> {
        try_each(peer, |peer| self.resolve_at(peer, options))
    }

    fn resolve_at(&self, peer: SocketAddr, options: &ResolveOptions) -> Result<Resolved, Error> {
        let subject = Subject::Qp(self.id());
        let _claim = Claim::new(self.session(), subject, settles_resolution);
        self.start_resolve(peer, options)?;
        let answer = self
            .session()
            .await_event(deadline(options.timeout), |e| e.take(subject, settles_resolution))?;
        match answer {
            Some(event) => outcome(event),
            None => match self.abort() {
                // Refused if the reply has just arrived. The next resolution discards it.
                Ok(()) | Err(Error::Refused { .. }) => {
                    Err(Error::TimedOut { what: "the reply; the resolution has been aborted" })
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Starts a resolution. [`Context::next_event`] returns the outcome: [`Event::Resolved`],
    /// [`Event::Rejected`] or [`Event::Unreachable`]. [`Qp::abort`] cancels it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if this QP already has a resolution outstanding, if a rule forbids it, or
    /// if the device has no route to the peer.
    pub fn start_resolve(&self, peer: SocketAddr, options: &ResolveOptions) -> Result<(), Error> {
        // Events of an earlier resolution must not be mistaken for the outcome of this one.
        self.session().events.drain()?;
        self.session().events.with(|events| {
            while events.take(Subject::Qp(self.id()), settles_resolution).is_some() {}
        });
        self.session().command(RequestBody::Connect {
            qp: self.id(),
            peer,
            local: options.local,
            ird: None,
            ord: None,
            private_data: options.private_data.clone(),
        })
    }
}

fn outcome(answer: Event) -> Result<Resolved, Error> {
    match answer {
        Event::Resolved { addresses, source, remote_qp, q_key, private_data, .. } => {
            let gid = Gid::from(addresses.peer.ip());
            let address = DatagramAddress { source, gid, qp: remote_qp, q_key };
            Ok(Resolved { address, addresses, private_data })
        }
        Event::Rejected { private_data, .. } => Err(Error::Rejected { private_data }),
        Event::Unreachable { reason, .. } => Err(Error::Unreachable { reason }),
        other => Err(Error::protocol(format!("{other:?} does not answer a resolution"))),
    }
}
