//! The parts of the demo's child processes. They are ordinary clients that use `rnic-client` and
//! the tools written with it.

use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::Subcommand;
use rnic_client::Context;
use rnic_tools::endpoint::loopback;
use rnic_tools::{copy, perf, tour};

/// A part of the demo, run by a child process.
#[derive(Debug, Subcommand)]
pub enum Part {
    /// Serves one client, which runs all operations.
    Host,
    /// Runs all operations as the client.
    Visit {
        /// Address of the server.
        address: SocketAddr,
    },
    /// Receives a file.
    Receive {
        /// Folder for the file.
        folder: PathBuf,
    },
    /// Sends a file.
    Send {
        /// The file.
        file: PathBuf,
        /// Address of the receiver.
        address: SocketAddr,
    },
    /// Measures this path, raw TCP and memcpy.
    Measure,
    /// The other end of `measure`.
    MeasurePeer,
}

/// Runs a part and writes one line per result, `kind TAB rest`.
pub fn play(part: &Part) -> Result<(), Box<dyn Error>> {
    if let Part::MeasurePeer = part {
        return Ok(perf::serve(None)?);
    }
    if let Part::Measure = part {
        let mut peer = Command::new("/proc/self/exe");
        peer.args(["demo-part", "measure-peer"]);
        for measurement in
            format_measurements(&perf::quick(perf::QuickOptions { socket: None, peer })?)
        {
            writeln!(std::io::stdout(), "figure\t{measurement}")?;
        }
        return Ok(());
    }
    let context = Context::open()?;
    match part {
        Part::Measure | Part::MeasurePeer => {}
        Part::Host => {
            let listener = context.listen(loopback(), 16)?;
            writeln!(std::io::stdout(), "address\t{}", listener.local_addr())?;
            tour::host(&context, &listener, 1, PATIENCE)?;
        }
        Part::Visit { address } => {
            for step in tour::visit(&context, *address, PATIENCE)? {
                writeln!(
                    std::io::stdout(),
                    "{}\t{}\t{}",
                    step.name,
                    step.detail,
                    step.took.as_micros()
                )?;
            }
        }
        Part::Receive { folder } => {
            let listener = context.listen(loopback(), 1)?;
            writeln!(std::io::stdout(), "address\t{}", listener.local_addr())?;
            let options = copy::ReceiveOptions::default();
            let report =
                copy::serve_one(&context, &listener, folder, &options, Some(PATIENCE), |_, _| {})?;
            writeln!(
                std::io::stdout(),
                "received\t{}\t{}\t{}",
                report.bytes,
                report.sha256,
                report.seconds
            )?;
        }
        Part::Send { file, address } => {
            let options = copy::SendOptions::default();
            let report = copy::send_file(&context, file, *address, &options, |_| {})?;
            writeln!(
                std::io::stdout(),
                "sent\t{}\t{}\t{}",
                report.bytes,
                report.sha256,
                report.seconds
            )?;
        }
    }
    Ok(())
}

/// Formats the measurements.
fn format_measurements(q: &perf::Quick) -> Vec<String> {
    let bandwidth = |name: &str, bytes_per_second: f64| {
        format!(
            "{name:<28} {:>6.2} GB/s   {:.2} x raw TCP   {:.2} x memcpy",
            bytes_per_second / 1e9,
            bytes_per_second / q.tcp_bandwidth,
            bytes_per_second / q.memcpy_bandwidth,
        )
    };
    let latency = |name: &str, us: f64| format!("{name:<28} {us:>6.2} us");
    let ours = q.latency.as_secs_f64() * 1e6;
    let tcp = q.tcp_latency.as_secs_f64() * 1e6;
    vec![
        bandwidth("RDMA Write, 1 MiB", q.write_bandwidth),
        bandwidth("RDMA Read, 1 MiB", q.read_bandwidth),
        bandwidth("raw TCP stream, 1 MiB", q.tcp_bandwidth),
        bandwidth("memcpy, 1 MiB", q.memcpy_bandwidth),
        format!("{}   {:.2} x raw TCP", latency("Send, 8 bytes, one way, poll", ours), ours / tcp),
        latency("raw TCP, 8 bytes, one way", tcp),
    ]
}

const PATIENCE: Duration = Duration::from_secs(60);
