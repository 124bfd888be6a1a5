//! A short measurement of one path, for `rnicd demo`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rnic_client::Context;

use super::copies::Copies;
use super::driver::{Link, TcpLink};
use super::error::PerfError;
use super::measured::{Amount, Measured};
use super::peer::{Peer, open};
use super::raw::TcpMode;
use super::spec::{Flow, Op, Spec, Wait};
use super::stats::Times;

/// The daemon to measure, and the program of the second process.
pub struct QuickOptions<'a> {
    /// Socket of the daemon; `None` to search for it.
    pub socket: Option<&'a Path>,
    /// Program and arguments of the second process, which must only call [`serve`](super::serve)
    /// with the socket of its daemon.
    pub peer: Command,
}

/// Results: medians of three rounds, each of which measures all subjects.
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
    measure_all(&context, &mut peer).map_err(|e| peer.explain(e))
}

fn measure_all(context: &Context, peer: &mut Peer) -> Result<Quick, PerfError> {
    let stream = |op| Spec::new(op, Flow::Stream, CHUNK).stream(DEPTH, DEPTH / 4, WORKING_SET);
    let spec = stream(Op::Write);
    let link = Link::new(context, peer, &spec, 0)?;
    let path = link.end.path()?;
    let tcp = TcpLink::new(peer, &spec)?;
    let copies = Copies::new(context, &spec)?;
    let subjects = [Subject::Rdma(link.into()), Subject::Tcp(tcp), Subject::Memcpy(copies)];
    let [writes, tcp, memcpy] = measure(peer, &spec, subjects)?;
    let spec = stream(Op::Read);
    let subjects = [Subject::Rdma(Link::new(context, peer, &spec, 0)?.into())];
    let [reads] = measure(peer, &spec, subjects)?;
    let spec = Spec { wait: Wait::Polled, ..Spec::new(Op::Send, Flow::PingPong, 8) };
    let link = Link::new(context, peer, &spec, 0)?;
    let subjects = [Subject::Rdma(link.into()), Subject::Tcp(TcpLink::new(peer, &spec)?)];
    let [ping_pongs, tcp_ping_pongs] = measure(peer, &spec, subjects)?;
    Ok(Quick {
        path,
        write_bandwidth: bandwidth(&writes),
        read_bandwidth: bandwidth(&reads),
        tcp_bandwidth: bandwidth(&tcp),
        memcpy_bandwidth: bandwidth(&memcpy),
        latency: half_round_trip(&ping_pongs),
        tcp_latency: half_round_trip(&tcp_ping_pongs),
    })
}

enum Subject {
    Rdma(Box<Link>),
    Tcp(TcpLink),
    Memcpy(Copies),
}

impl Subject {
    fn run(
        &mut self,
        peer: &mut Peer,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        match self {
            Subject::Rdma(link) => link.run(peer, count, times),
            Subject::Tcp(link) => link.run(peer, TcpMode::Blocking, count, times),
            Subject::Memcpy(copies) => Ok(copies.copy(count)),
        }
    }
}

/// Warms up all subjects, then measures each of them once per round.
fn measure<const N: usize>(
    peer: &mut Peer,
    spec: &Spec,
    mut subjects: [Subject; N],
) -> Result<[Measured; N], PerfError> {
    let mut all = [(); N].map(|()| Measured::default());
    for (subject, measured) in subjects.iter_mut().zip(&mut all) {
        let mut run = |count, times: &mut Times| subject.run(peer, count, times);
        *measured = Measured::prepare(ROUND, spec.batch, &mut run)?;
    }
    for _ in 0..ROUNDS {
        for (subject, measured) in subjects.iter_mut().zip(&mut all) {
            measured.round(&mut |count, times| subject.run(peer, count, times))?;
        }
    }
    Ok(all)
}

fn bandwidth(measured: &Measured) -> f64 {
    measured.rates.median().unwrap_or(0.0) * f64::from(CHUNK)
}

fn half_round_trip(measured: &Measured) -> Duration {
    Duration::from_secs_f64(measured.medians_us.median().unwrap_or(0.0) / 2e6)
}

/// Six subjects, each with a warm-up of at most a third of a round and three rounds, take about two
/// seconds.
const ROUND: Amount = Amount::Time(Duration::from_millis(90));
const ROUNDS: u32 = 3;
const CHUNK: u32 = 1 << 20;
const DEPTH: u32 = 16;
const WORKING_SET: u64 = 32 << 20;
