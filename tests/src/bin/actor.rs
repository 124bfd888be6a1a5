//! A client process of a test: plays the part its arguments name, through `rnic-client` alone.

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rnic_client::Context;
use rnic_client::programs::tour;
use rnic_tests::DEADLINE;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand)]
enum Part {
    /// Hosts tours; prints the address it listens on.
    Host {
        /// How many guests to receive.
        guests: u32,
        /// Address to listen on.
        #[arg(default_value = "127.0.0.1:0")]
        address: SocketAddr,
    },
    /// Goes on a tour of every operation.
    Visit {
        /// The host's address.
        address: SocketAddr,
    },
}

fn main() -> ExitCode {
    match play(Args::parse().part) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("actor: {e}");
            ExitCode::FAILURE
        }
    }
}

fn play(part: Part) -> Result<(), Box<dyn std::error::Error>> {
    let context = Context::open()?;
    match part {
        Part::Host { guests, address } => {
            let listener = context.listen(address, 16)?;
            println!("listening on {}", listener.local_addr());
            tour::host(&context, &listener, guests, DEADLINE)?;
        }
        Part::Visit { address } => {
            for step in tour::visit(&context, address, DEADLINE)? {
                println!("{}: {}", step.name, step.detail);
            }
        }
    }
    Ok(())
}
