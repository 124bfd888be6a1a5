//! Messages between the two processes: one line of JSON each, over the peer's standard input and
//! output or over TCP.
//!
//! The driver commands, the peer replies. Nothing is said while a measurement runs.

use std::io::{BufRead, Read, Write};
use std::net::SocketAddr;

use rnic_client::{Gid, QpId, RemoteMr};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::placement::Placement;
use super::raw::Manner;
use super::relay::Seats;
use super::spec::Spec;

/// What the driver tells the peer to do, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// Make an RDMA end, tell where ([`Reply::Listening`]), accept all its connections, be done;
    /// or, with QPs that are wired by hand, wire them to these and tell which they are
    /// ([`Reply::Wired`]).
    Link {
        /// Number of the end: those from this one on are made anew.
        end: usize,
        /// Parameters of the measurement.
        spec: Spec,
        /// The driver's memory that the peer may write.
        sink: RemoteMr,
        /// The driver's QPs, if they are wired by hand.
        places: Vec<Place>,
    },
    /// Listen for a raw TCP connection ([`Reply::RawListening`]), accept it, be done.
    RawLink {
        /// Parameters of the measurement.
        spec: Spec,
    },
    /// Be the other end of so many messages over RDMA ([`Reply::Ready`], then done).
    Rdma {
        /// Number of the end.
        end: usize,
        /// Messages, or round trips.
        count: u64,
        /// Where both processes run.
        placement: Placement,
    },
    /// The same over TCP.
    Tcp {
        /// Messages, or round trips.
        count: u64,
        /// Blocking or not, and on which CPU.
        manner: Manner,
    },
    /// Be a load: connect a pair of processes of its own for such a stream, be done.
    Load {
        /// Parameters of the stream.
        spec: Spec,
    },
    /// Stream ([`Reply::Ready`]) until told to rest.
    Go,
    /// Stop streaming, tell how fast it was ([`Reply::Streamed`]).
    Rest,
    /// Share the page of a relay, be done.
    RelayLink {
        /// A path of its memory.
        memory: String,
    },
    /// Be a part of the relay for so many round trips ([`Reply::Ready`], then done).
    Relay {
        /// Round trips.
        count: u64,
        /// Who runs where.
        seats: Seats,
    },
}

/// A QP that is wired by hand.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Place {
    /// One of its device's.
    pub gid: Gid,
    /// Its number there.
    pub qp: QpId,
}

/// What the peer answers, a line each.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Where the RDMA end listens and what of its memory the driver may use.
    Listening {
        /// Address to which the driver connects its QPs.
        address: SocketAddr,
        /// Region that the driver may read.
        source: RemoteMr,
        /// Region that the driver may write.
        sink: RemoteMr,
    },
    /// The QPs that are wired to the driver's, in the order of those, and what of its memory the
    /// driver may use.
    Wired {
        /// The peer's QPs.
        places: Vec<Place>,
        /// Region that the driver may read.
        source: RemoteMr,
        /// Region that the driver may write.
        sink: RemoteMr,
    },
    /// Where the TCP end listens.
    RawListening {
        /// Address to which the driver connects its socket.
        address: SocketAddr,
    },
    /// The stream has stopped.
    Streamed {
        /// Messages per second.
        rate: f64,
    },
    /// The measurement may start.
    Ready,
    /// The command is done.
    Done,
    /// It failed, and the peer ends.
    Failed {
        /// Why, as a sentence for people.
        why: String,
    },
}

/// Bytes of the longest message: the places of 10,000 QPs are a third of it.
const LONGEST_LINE: u64 = 4 << 20;

/// Writes one line of JSON and flushes.
pub fn say(to: &mut impl Write, message: &impl Serialize) -> Result<(), PerfError> {
    let mut line = serde_json::to_vec(message)
        .map_err(|e| PerfError::Peer(format!("a message that cannot be written: {e}")))?;
    line.push(b'\n');
    to.write_all(&line)
        .and_then(|()| to.flush())
        .map_err(PerfError::io("talking to the other process"))
}

/// Reads one line; `None` when the other process has ended.
pub fn hear<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>, PerfError> {
    let mut line = String::new();
    match from.take(LONGEST_LINE).read_line(&mut line) {
        Ok(0) => Ok(None),
        Ok(_) => serde_json::from_str(&line)
            .map(Some)
            .map_err(|e| PerfError::Peer(format!("not a message: {e}: {}", line.trim_end()))),
        Err(e) => Err(PerfError::io("listening to the other process")(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::spec::{Flow, Op};

    #[test]
    fn messages_arrive_one_by_one_and_the_end_is_no_message() {
        let spec = Spec::new(Op::Send, Flow::PingPong, 8);
        let mut pipe = Vec::new();
        say(&mut pipe, &Command::RawLink { spec: spec.clone() }).unwrap();
        let placement = Placement::Free;
        say(&mut pipe, &Command::Rdma { end: 0, count: 3, placement }).unwrap();
        let mut pipe = &pipe[..];
        let first = hear::<Command>(&mut pipe).unwrap();
        assert!(matches!(first, Some(Command::RawLink { spec: s }) if s == spec));
        assert!(matches!(hear(&mut pipe).unwrap(), Some(Command::Rdma { end: 0, count: 3, .. })));
        assert!(hear::<Command>(&mut pipe).unwrap().is_none());
    }

    #[test]
    fn other_output_is_told_as_such() {
        let e = hear::<Reply>(&mut &b"thread panicked\n"[..]).unwrap_err();
        assert!(e.to_string().contains("thread panicked"), "{e}");
    }
}
