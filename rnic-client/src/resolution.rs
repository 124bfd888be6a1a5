//! Queue pairs of datagrams by the ports that they serve (`RDMA_PS_UDP` of `rdma_cm(7)`).
//!
//! Nothing is connected: a program asks which queue pair serves a port ([`Qp::resolve`]), and one
//! that listens there ([`Context::bind_datagrams`]) answers with the number and the Q_Key of one of
//! its own, or says no. After that both send each other datagrams as they like. Ports are those of
//! a space of their own, beside TCP's, at the addresses that the device's GIDs stand for.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rnic_core::abi::control::{Event, RequestBody};
use rnic_core::types::{AddressPair, Gid};

use crate::addresses::try_each;
use crate::connect::Claim;
use crate::context::Context;
use crate::datagram::DatagramAddress;
use crate::error::Error;
use crate::events::{Subject, settles_resolution};
use crate::inbox::deadline;
use crate::listener::{BindOptions, ConnectionRequest, Listener};
use crate::qp::Qp;

/// How to ask for a queue pair (compare `struct rdma_conn_param` of `rdma_connect(3)`).
#[derive(Clone, Debug)]
pub struct ResolveOptions {
    /// Bytes for the program that is asked, at most 180. It receives as many, filled up with zeros.
    pub private_data: Vec<u8>,
    /// Source address, one that a GID of the device's stands for, if it matters.
    pub local: Option<SocketAddr>,
    /// How long [`Qp::resolve`] waits; default 40 s, `None` as long as the daemon's own deadline
    /// lets it (`mpa.reply_deadline`).
    pub timeout: Option<Duration>,
}

impl Default for ResolveOptions {
    fn default() -> Self {
        let timeout = Some(Duration::from_secs(40));
        ResolveOptions { private_data: Vec::new(), local: None, timeout }
    }
}

/// A queue pair that serves a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Where datagrams for it go.
    pub address: DatagramAddress,
    /// Address and port of this end and of the peer.
    pub addresses: AddressPair,
    /// Bytes of the program that answered, filled up with zeros to 136.
    pub private_data: Vec<u8>,
}

impl Context {
    /// Binds an address of the port space of datagrams without listening (`rdma_bind_addr(3)` with
    /// `RDMA_PS_UDP`). Port 0 lets the daemon choose. It listens, and its requests come, as those
    /// of any [`Listener`]; they are answered by [`ConnectionRequest::accept_datagrams`].
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if no GID of the device's stands for the address, if it is in use, or if
    /// a limit or a rule of the administrator is against it.
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
    /// Answers that this queue pair of datagrams serves the port, with these bytes for the peer, at
    /// most 136. It is in Rtr, Rts or Sqd, and may be the answer to any number of requests. Who
    /// asked is told its Q_Key; no event follows. A rejection has as many bytes at most.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the time for an answer is over or the queue pair is in another state.
    pub fn accept_datagrams(self, qp: &Qp, private_data: &[u8]) -> Result<(), Error> {
        self.decide_with(qp, (None, None), private_data)
    }
}

impl Qp {
    /// Asks which queue pair serves a port, and waits for the answer (`rdma_connect(3)` with
    /// `RDMA_PS_UDP`). This queue pair is one of datagrams and stays as it is; it asks one question
    /// at a time. Each address of a name is asked in turn, each for the time that the options say.
    ///
    /// # Errors
    ///
    /// [`Error::Rejected`] has the bytes of a program that said no, filled up with zeros;
    /// [`Error::Unreachable`] says why there is no answer, mostly that nobody listens. After
    /// [`Error::TimedOut`] nothing more comes of it.
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
                // Refused if the answer has just come, which nobody reads any more.
                Ok(()) | Err(Error::Refused { .. }) => {
                    Err(Error::TimedOut { what: "the answer; it is not awaited any more" })
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Begins to ask. What comes of it is told by [`Context::next_event`]: [`Event::Resolved`],
    /// [`Event::Rejected`] or [`Event::Unreachable`]; [`Qp::abort`] ends it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if this queue pair asks already, if a rule is against it, or if there is
    /// no way from the device to the peer.
    pub fn start_resolve(&self, peer: SocketAddr, options: &ResolveOptions) -> Result<(), Error> {
        // What is left of an earlier question is no answer to this one.
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
        other => Err(Error::protocol(format!("{other:?} answers no question"))),
    }
}
