//! Messages between the two processes: one line of JSON each, over the peer's standard input and
//! output or over TCP.
//!
//! The driver sends commands; the peer replies. No messages are sent during a measurement.

use std::io::{BufRead, Read, Write};
use std::net::SocketAddr;

use rnic_client::{Gid, QpId, RemoteMr};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::PerfError;
use super::raw::TcpMode;
use super::spec::Spec;

/// A driver's command.
#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// Create an RDMA end, reply with its address ([`Reply::Listening`]), and accept all
    /// connections. For RC QPs: connect them to `places`, and reply with the peer's own
    /// ([`Reply::Rc`]). Then reply [`Reply::Done`].
    Link {
        /// Number of the end. Ends with this and higher numbers are destroyed first.
        end: usize,
        /// Parameters of the measurement.
        spec: Spec,
        /// The driver's memory that the peer may write.
        sink: RemoteMr,
        /// The driver's QPs, if they are RC QPs.
        places: Vec<QpAddress>,
    },
    /// Listen for a raw TCP connection ([`Reply::RawListening`]), and accept it.
    RawLink {
        /// Parameters of the measurement.
        spec: Spec,
    },
    /// Follow the driver for `count` messages over RDMA ([`Reply::Ready`], then done).
    Rdma {
        /// Number of the end.
        end: usize,
        /// Messages, or round trips.
        count: u64,
    },
    /// The same over TCP.
    Tcp {
        /// Messages, or round trips.
        count: u64,
        /// How both ends wait.
        mode: TcpMode,
    },
}

/// Address of an RC QP.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct QpAddress {
    /// A GID of its device.
    pub gid: Gid,
    /// QP number.
    pub qp: QpId,
}

/// A peer's reply.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The RDMA end listens.
    Listening {
        /// Address to which the driver connects its QPs.
        address: SocketAddr,
        /// Region that the driver may read.
        source: RemoteMr,
        /// Region that the driver may write.
        sink: RemoteMr,
    },
    /// The RC QPs are connected to the driver's.
    Rc {
        /// The peer's QPs, in the order of the driver's.
        places: Vec<QpAddress>,
        /// Region that the driver may read.
        source: RemoteMr,
        /// Region that the driver may write.
        sink: RemoteMr,
    },
    /// The TCP end listens.
    RawListening {
        /// Address to which the driver connects its socket.
        address: SocketAddr,
    },
    /// The measurement may start.
    Ready,
    /// The command has been carried out.
    Done,
    /// The command failed, and the peer exits.
    Failed {
        /// The error message.
        why: String,
    },
}

/// Maximum length of a message in bytes. The addresses of 10,000 QPs take a third of it.
const LONGEST_LINE: u64 = 4 << 20;

/// Writes one line of JSON and flushes.
pub fn write_msg(to: &mut impl Write, message: &impl Serialize) -> Result<(), PerfError> {
    let mut line = serde_json::to_vec(message)
        .map_err(|e| PerfError::Peer(format!("cannot encode a message: {e}")))?;
    line.push(b'\n');
    to.write_all(&line)
        .and_then(|()| to.flush())
        .map_err(PerfError::io("writing to the other process"))
}

/// Reads one line. Returns `None` if the other process has closed the connection.
pub fn read_msg<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>, PerfError> {
    let mut line = String::new();
    match from.take(LONGEST_LINE).read_line(&mut line) {
        Ok(0) => Ok(None),
        Ok(_) => serde_json::from_str(&line)
            .map(Some)
            .map_err(|e| PerfError::Peer(format!("not a message: {e}: {}", line.trim_end()))),
        Err(e) => Err(PerfError::io("reading from the other process")(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::spec::{Flow, Op};

    #[test]
    fn messages_arrive_one_by_one() {
        let spec = Spec::new(Op::Send, Flow::PingPong, 8);
        let mut pipe = Vec::new();
        write_msg(&mut pipe, &Command::RawLink { spec: spec.clone() }).unwrap();
        write_msg(&mut pipe, &Command::Rdma { end: 0, count: 3 }).unwrap();
        let mut pipe = &pipe[..];
        let first = read_msg::<Command>(&mut pipe).unwrap();
        assert!(matches!(first, Some(Command::RawLink { spec: s }) if s == spec));
        assert!(matches!(read_msg(&mut pipe).unwrap(), Some(Command::Rdma { end: 0, count: 3 })));
        assert!(read_msg::<Command>(&mut pipe).unwrap().is_none());
    }

    #[test]
    fn other_output_is_an_error() {
        let e = read_msg::<Reply>(&mut &b"thread panicked\n"[..]).unwrap_err();
        assert!(e.to_string().contains("thread panicked"), "{e}");
    }
}
