//! The driver's side of a measurement: RDMA connections, or a raw TCP connection, with the peer.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rnic_client::Context;

use super::end::{End, RemoteMemory, Role};
use super::error::PerfError;
use super::measured::{Amount, Measured};
use super::peer::{Peer, unexpected};
use super::protocol::{Command, Reply};
use super::raw::{RawEnd, TcpMode};
use super::spec::Spec;
use super::stats::Times;

/// RDMA connections with the peer.
pub struct Link {
    /// Number of the peer's end.
    number: usize,
    /// The driver's end.
    pub end: End,
    /// The peer's memory that the driver may access.
    pub remote: RemoteMemory,
    /// Time taken to connect the QPs.
    pub connecting: Duration,
}

impl Link {
    /// Creates and connects both ends. The peer numbers its end `number`, and first destroys its
    /// ends with this and higher numbers.
    pub fn new(
        context: &Context,
        peer: &mut Peer,
        spec: &Spec,
        number: usize,
    ) -> Result<Self, PerfError> {
        spec.check()?;
        Self::connect(context, peer, spec, number).map_err(|e| peer.explain(e))
    }

    fn connect(
        context: &Context,
        peer: &mut Peer,
        spec: &Spec,
        number: usize,
    ) -> Result<Self, PerfError> {
        let end = End::new(context, Role::Driver, spec)?;
        let places = if spec.rc { end.places(context)? } else { Vec::new() };
        let sink = end.sink();
        peer.command(&Command::Link { end: number, spec: spec.clone(), sink, places })?;
        let reply = peer.reply()?;
        let start = Instant::now();
        let remote = match reply {
            Reply::Listening { address, source, sink } => {
                end.connect(peer.reach(address)?)?;
                RemoteMemory { source: Some(source), sink }
            }
            Reply::Rc { places, source, sink } => {
                end.wire(context, &places)?;
                RemoteMemory { source: Some(source), sink }
            }
            other => return Err(unexpected(&other)),
        };
        peer.await_reply(&Reply::Done)?;
        Ok(Link { number, end, remote, connecting: start.elapsed() })
    }

    /// Runs `count` messages or round trips. Records the times of round trips.
    pub fn run(
        &mut self,
        peer: &mut Peer,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        peer.command(&Command::Rdma { end: self.number, count })?;
        peer.await_reply(&Reply::Ready)?;
        let elapsed = self.end.drive(&self.remote, count, times)?;
        peer.await_reply(&Reply::Done)?;
        Ok(elapsed)
    }
}

/// A raw TCP connection with the peer.
pub struct TcpLink {
    raw: RawEnd,
}

impl TcpLink {
    /// Connects both ends.
    pub fn new(peer: &mut Peer, spec: &Spec) -> Result<Self, PerfError> {
        peer.command(&Command::RawLink { spec: spec.clone() })?;
        let stream = match peer.reply()? {
            Reply::RawListening { address } => {
                let address = peer.reach(address)?;
                TcpStream::connect(address).map_err(PerfError::io("connecting raw TCP"))?
            }
            other => return Err(unexpected(&other)),
        };
        peer.await_reply(&Reply::Done)?;
        Ok(TcpLink { raw: RawEnd::new(stream, spec.clone())? })
    }

    /// Runs `count` messages or round trips. Records the times of round trips.
    pub fn run(
        &mut self,
        peer: &mut Peer,
        mode: TcpMode,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        self.raw.set_mode(mode)?;
        peer.command(&Command::Tcp { count, mode })?;
        peer.await_reply(&Reply::Ready)?;
        let elapsed = self.raw.drive(count, times)?;
        peer.await_reply(&Reply::Done)?;
        Ok(elapsed)
    }
}

/// A measurement of one operation over RDMA.
pub struct Driver<'a> {
    peer: &'a mut Peer,
    batch: u32,
    link: Link,
    path: String,
}

impl<'a> Driver<'a> {
    /// Creates and connects both ends.
    pub fn new(context: &Context, peer: &'a mut Peer, spec: &Spec) -> Result<Self, PerfError> {
        let link = Link::new(context, peer, spec, 0)?;
        let path = link.end.path()?;
        Ok(Driver { peer, batch: spec.batch, link, path })
    }

    /// Returns the path of the connections: `direct` or `tcp`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the connections.
    pub fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    /// Warms up and determines the number of messages per round.
    pub fn prepare(&mut self, amount: Amount) -> Result<Measured, PerfError> {
        let Driver { peer, batch, link, .. } = self;
        Measured::prepare(amount, *batch, &mut |count, times| link.run(peer, count, times))
            .map_err(|e| peer.explain(e))
    }

    /// Measures another round.
    pub fn round(&mut self, measured: &mut Measured) -> Result<(), PerfError> {
        let Driver { peer, link, .. } = self;
        measured
            .round(&mut |count, times| link.run(peer, count, times))
            .map_err(|e| peer.explain(e))
    }
}
