//! `rnic-device-plugin`: runs the Kubernetes device plugin until SIGTERM or SIGINT.

use std::process::ExitCode;

use clap::Parser;
use rnic_device_plugin::options::Options;
use rnic_device_plugin::plugin;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    let signals = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
    let [Ok(mut terminate), Ok(mut interrupt)] = signals else {
        eprintln!("rnic-device-plugin: cannot handle signals");
        return ExitCode::FAILURE;
    };
    tokio::select! {
        ended = plugin::run(&options) => match ended {
            Ok(never) => match never {},
            Err(error) => {
                eprintln!("rnic-device-plugin: {error}");
                ExitCode::FAILURE
            }
        },
        _ = terminate.recv() => ExitCode::SUCCESS,
        _ = interrupt.recv() => ExitCode::SUCCESS,
    }
}
