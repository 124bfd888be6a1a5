//! A short measurement of one path, for `rnicd demo`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::bench::{Amount, Bench, Measured, Subject};
use super::error::PerfError;
use super::peer::{Peer, open};
use super::raw::TcpMode;
use super::spec::{Flow, Op, Spec, Wait};

/// The daemon to measure, and the program of the second process.
pub struct QuickOptions<'a> {
    /// Socket of the daemon; `None` for the default path of the environment.
    pub socket: Option<&'a Path>,
    /// Program and arguments of the second process, which must only call [`serve`](super::serve)
    /// with the socket of its daemon.
    pub peer: Command,
}

/// Results: medians of three rounds, measured in turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Quick {
    /// The path of the connections: `direct` or `tcp`.
    pub path: String,
    /// RDMA Writes of 1 MiB, bytes per second.
    pub write_bandwidth: f64,
    /// RDMA Reads of 1 MiB, bytes per second.
    pub read_bandwidth: f64,
    /// A raw TCP stream of the same chunks, bytes per second.
    pub tcp_bandwidth: f64,
    /// memcpy of the same working set, bytes per second.
    pub memcpy_bandwidth: f64,
    /// Half a round trip of 8-byte Sends, polled.
    pub latency: Duration,
    /// Half a round trip of 8 bytes over blocking raw TCP.
    pub tcp_latency: Duration,
}

/// Measures bandwidth and latency of one path, raw TCP and memcpy, in less than three seconds.
pub fn quick(options: QuickOptions<'_>) -> Result<Quick, PerfError> {
    let context = open(options.socket)?;
    let mut peer = Peer::start(options.peer)?;
    let mut measure = |spec: &Spec, subjects: &[Subject]| {
        let mut bench = Bench::new(&context, &mut peer, spec, subjects)?;
        let measured = bench.measure(ROUND, ROUNDS, &mut |_, _| ())?;
        Ok::<_, PerfError>((measured, bench.path().to_owned()))
    };
    let stream = |op| Spec::new(op, Flow::Stream, CHUNK).stream(DEPTH, DEPTH / 4, WORKING_SET);
    let tcp = Subject::Tcp(TcpMode::BLOCKING);
    let (writes, path) = measure(&stream(Op::Write), &[Subject::Rdma, tcp, Subject::Memcpy])?;
    let (reads, _) = measure(&stream(Op::Read), &[Subject::Rdma])?;
    let ping_pong = Spec { wait: Wait::Polled, ..Spec::new(Op::Send, Flow::PingPong, 8) };
    let (ping_pongs, _) = measure(&ping_pong, &[Subject::Rdma, tcp])?;
    Ok(Quick {
        path,
        write_bandwidth: bandwidth(&writes, 0),
        read_bandwidth: bandwidth(&reads, 0),
        tcp_bandwidth: bandwidth(&writes, 1),
        memcpy_bandwidth: bandwidth(&writes, 2),
        latency: half_round_trip(&ping_pongs, 0),
        tcp_latency: half_round_trip(&ping_pongs, 1),
    })
}

fn bandwidth(measured: &[Measured], subject: usize) -> f64 {
    measured[subject].rates.median().unwrap_or(0.0) * f64::from(CHUNK)
}

fn half_round_trip(measured: &[Measured], subject: usize) -> Duration {
    Duration::from_secs_f64(measured[subject].medians_us.median().unwrap_or(0.0) / 2e6)
}

/// Six subjects, each with a warm-up of at most a third of a round and three rounds, take about two
/// seconds.
const ROUND: Amount = Amount::Time(Duration::from_millis(90));
const ROUNDS: u32 = 3;
const CHUNK: u32 = 1 << 20;
const DEPTH: u32 = 16;
const WORKING_SET: u64 = 32 << 20;
