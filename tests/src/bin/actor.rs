//! A client process of a test. Its arguments select the part that it plays.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use rnic_client::{
    AcceptOptions, Access, BindOptions, ConnectOptions, Context, Error, ListKind, QpOptions,
    SrqOptions,
};
use rnic_tests::{
    DEADLINE, Process, READ_WRITE, attached, attacks, burst, exhaust, frozen, hammer, hostile,
    mortal, over, rping, traffic,
};
use rnic_tools::tour;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    part: Part,
}

/// Purpose of a bound address.
#[derive(Clone, Copy, clap::ValueEnum)]
enum PortSpace {
    /// To accept connections (`RDMA_PS_TCP`).
    Connections,
    /// To accept UD requests (`RDMA_PS_UDP`).
    Datagrams,
    /// To connect from.
    Source,
}

/// Starts to connect from an address.
fn connects_from(context: &Context, address: SocketAddr) -> Result<(), Error> {
    let client = rnic_tests::Client::of(context);
    let options = ConnectOptions { local: Some(address), ..ConnectOptions::default() };
    client.qp().start_connect(([127, 0, 0, 1], 1).into(), &options)
}

#[derive(Subcommand)]
enum Part {
    /// Serves the tour of a number of guests; prints the address it listens on.
    Host {
        /// Number of guests to receive.
        guests: u32,
        /// Address to listen on.
        #[arg(default_value = "127.0.0.1:0")]
        address: SocketAddr,
    },
    /// Serves checksummed traffic to guests until its standard input closes; prints the address it
    /// listens on and how each connection ended.
    Serve {
        /// Address to listen on.
        #[arg(default_value = "127.0.0.1:0")]
        address: SocketAddr,
    },
    /// Exchanges checksummed traffic with a server, until its standard input closes or for a
    /// number of rounds; prints when it has started and the number of rounds.
    Traffic {
        /// The server's address.
        address: SocketAddr,
        /// Seed of data and sizes.
        #[arg(default_value_t = 1)]
        seed: u64,
        /// Rounds; 0 for no limit.
        #[arg(default_value_t = 0)]
        rounds: u64,
    },
    /// Creates and destroys objects until it is killed; prints when it has started.
    Churn,
    /// Lets peers write into a region until its standard input closes; prints its address.
    Sink,
    /// Lends attached memory to one guest; prints its address, and a checksum of the memory when
    /// its standard input closes.
    Lend {
        /// When its standard input closes, executes `sleep` instead of printing the checksum.
        #[arg(long)]
        exec: bool,
        /// Leaks its descriptors to `sleep`.
        #[arg(long)]
        keep: bool,
    },
    /// Connects an RC QP to a peer of the same device and lends it attached memory; prints its
    /// QP number and the address; posts receives until it is killed.
    Answer {
        /// The peer's QP.
        peer: u32,
    },
    /// Attaches its memory for each line of its standard input and prints the result. At end of
    /// input, ends the session and prints when the process has no more copying threads.
    Attach,
    /// Writes and reads the memory of a lender, from and to its own attached memory.
    Borrow {
        /// The lender's address.
        address: SocketAddr,
    },
    /// Creates a shared buffer of the given length with 4 GiB of address space; prints the error
    /// and the amount of memory touched.
    Take {
        /// Length in bytes.
        bytes: u64,
    },
    /// Requests an atomic operation from the server of `rping -s -P`, then offers it bytes as the
    /// client of rping does; prints the result of both.
    Rping {
        /// The server's address.
        address: SocketAddr,
    },
    /// Posts small Writes in batches as fast as possible; prints the number of read and write
    /// system calls that this takes.
    Burst {
        /// The sink's address.
        address: SocketAddr,
        /// Number of Writes.
        posts: u64,
    },
    /// Lets peers write into a region of a named protection domain until its standard input
    /// closes; prints its location, and its first bytes at the end.
    Share {
        /// The domain's name.
        pd: String,
    },
    /// Writes into the region that a host's message describes and reconnects after each disconnect;
    /// prints each disconnect, and their number when the host no longer listens.
    Hammer {
        /// The host's address.
        address: SocketAddr,
    },
    /// Listens on the given number of addresses, prints them, and leaves all requests undecided
    /// until its standard input closes.
    Ignore {
        /// Number of addresses.
        listeners: usize,
    },
    /// Accepts all connections until its standard input closes; prints its address.
    Bait,
    /// Binds windows until it is killed; prints when it has started.
    Binds,
    /// Prints the number of sessions it can list.
    Clients,
    /// Violates the protocol in many ways for a number of seconds; prints the number of sessions
    /// used.
    Attack {
        /// Seed of its choices.
        seed: u64,
        /// Duration in seconds.
        seconds: u64,
        /// Address of a victim to connect to.
        victim: Option<SocketAddr>,
    },
    /// Runs an attack until its standard input closes; prints its progress.
    Overload {
        /// The attack.
        #[arg(value_enum)]
        attack: attacks::Attack,
        /// CPU to run on.
        cpu: usize,
    },
    /// Takes a measurement for each line of its standard input.
    Bystand {
        /// CPU to run on.
        cpu: usize,
    },
    /// Creates objects until the daemon refuses one, prints the refusal, and keeps trying until its
    /// standard input closes.
    Exhaust {
        /// The resource.
        #[arg(value_enum)]
        resource: exhaust::Resource,
    },
    /// Starts a host as another process and tours it.
    Duet,
    /// Connects two sessions over sockets of its own network namespace.
    Over,
    /// Binds an address; prints success or the refusal.
    Bind {
        /// Purpose of the address.
        #[arg(value_enum)]
        space: PortSpace,
        /// The address.
        address: SocketAddr,
    },
    /// Keeps descriptors in flight until its standard input closes; prints when they are.
    InFlight {
        /// Number of descriptors.
        count: usize,
    },
    /// Serves a file system that never answers, and starts a client that uses it.
    Freeze {
        /// Mount point.
        directory: PathBuf,
        /// The client's user.
        uid: u32,
        /// The client's part. The frozen file is appended as its last argument.
        part: Vec<String>,
    },
    /// Passes a descriptor of a frozen file to the daemon and waits until its standard input
    /// closes.
    PassFrozen {
        /// The request that carries the descriptor.
        #[arg(value_enum)]
        how: frozen::Passed,
        /// The file.
        file: PathBuf,
    },
    /// Lends the pages of a frozen file to a named protection domain until its standard input
    /// closes; prints their location.
    LendFrozen {
        /// The domain's name.
        pd: String,
        /// The file.
        file: PathBuf,
    },
    /// Performs and verifies every operation with a host.
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

/// Blocks until the parent releases this actor or exits.
fn wait_for_release() {
    // An error also means that the parent has exited.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// Returns a flag that becomes true when the parent releases this actor or exits.
fn released() -> Arc<AtomicBool> {
    let released = Arc::new(AtomicBool::new(false));
    let release = released.clone();
    std::thread::spawn(move || {
        wait_for_release();
        release.store(true, Ordering::Relaxed);
    });
    released
}

/// Returns the path of the daemon's socket, for commands that implement the control protocol
/// themselves.
fn socket() -> Result<PathBuf, traffic::Failure> {
    Ok(std::env::var_os("RNIC_SOCKET").ok_or("RNIC_SOCKET is not set")?.into())
}

fn play(part: Part) -> Result<(), traffic::Failure> {
    match part {
        Part::Attack { seed, seconds, victim } => {
            let socket = socket()?;
            let time = Duration::from_secs(seconds);
            let sessions = hostile::attack(&socket, seed, time, victim);
            println!("{sessions} sessions");
            // Executes another program in the middle of a session.
            Err(hostile::exec_in_a_session(&socket, seed, &mut Command::new("true")).into())
        }
        Part::Overload { attack, cpu } => {
            attacks::confine(&[cpu]);
            std::thread::spawn(|| {
                wait_for_release();
                std::process::exit(0);
            });
            match attacks::play(attack, &socket()?)? {}
        }
        Part::Bystand { cpu } => {
            attacks::confine(&[cpu]);
            attacks::bystander::serve(&socket()?, std::io::stdin().lines())
        }
        Part::Exhaust { resource } => {
            rnic_tests::process::raise_descriptor_limit();
            let released = released();
            let refused = |error: &rnic_client::Error| println!("refused: {error}");
            let created =
                exhaust::exhaust(resource, refused, || !released.load(Ordering::Relaxed))?;
            println!("created {created}");
            Ok(())
        }
        Part::InFlight { count } => {
            let _unread = exhaust::in_flight(count)?;
            println!("in flight");
            wait_for_release();
            Ok(())
        }
        Part::Freeze { directory, uid, part } => frozen::serve(&directory, uid, &part),
        Part::PassFrozen { how, file } => {
            frozen::pass(&socket()?, how, &file)?;
            println!("passed");
            wait_for_release();
            Ok(())
        }
        Part::LendFrozen { pd, file } => {
            let _lent = frozen::Lent::new(&socket()?, &pd, &file)?;
            wait_for_release();
            Ok(())
        }
        part => play_with(Context::open()?, part),
    }
}

/// Runs a command that uses a session of the library.
fn play_with(context: Context, part: Part) -> Result<(), traffic::Failure> {
    match part {
        Part::Attack { .. }
        | Part::Overload { .. }
        | Part::Bystand { .. }
        | Part::Exhaust { .. }
        | Part::InFlight { .. }
        | Part::Freeze { .. }
        | Part::PassFrozen { .. }
        | Part::LendFrozen { .. } => unreachable!("played without a session of the library"),
        Part::Bind { space, address } => {
            let bound = match space {
                PortSpace::Connections => context.bind(address).map(drop),
                PortSpace::Datagrams => {
                    context.bind_datagrams(address, BindOptions::default()).map(drop)
                }
                PortSpace::Source => connects_from(&context, address),
            };
            match bound {
                Ok(()) => println!("bound"),
                Err(error) => println!("{error}"),
            }
        }
        Part::Host { guests, address } => {
            let listener = context.listen(address, 16)?;
            println!("listening on {}", listener.local_addr());
            tour::host(&context, &listener, guests, DEADLINE)?;
        }
        Part::Serve { address } => {
            let listener = context.listen(address, 64)?;
            println!("listening on {}", listener.local_addr());
            std::thread::spawn(move || {
                let report = |line: String| println!("{line}");
                if let Err(e) = traffic::host(&context, &listener, u32::MAX, DEADLINE, report) {
                    println!("serving ended: {e}");
                }
            });
            wait_for_release();
        }
        Part::Traffic { address, seed, rounds } => {
            let released = released();
            let done = traffic::visit(&context, address, seed, DEADLINE, |round| {
                if round == 1 {
                    println!("under way");
                }
                match rounds {
                    0 => round < 1 || !released.load(Ordering::Relaxed),
                    n => round < n,
                }
            });
            println!("{} rounds", done?);
        }
        Part::Sink => {
            let listener = context.listen("127.0.0.1:0", 4)?;
            println!("listening on {}", listener.local_addr());
            let (qp, region) = burst::accept(&context, &listener)?;
            wait_for_release();
            drop((qp, region));
        }
        Part::Lend { exec, keep } => {
            let listener = context.listen("127.0.0.1:0", 4)?;
            println!("listening on {}", listener.local_addr());
            let (qp, region) = attached::lend(&context, &listener)?;
            wait_for_release();
            if keep {
                attached::keep_descriptors()?;
            }
            if exec {
                return Err(Command::new("sleep").arg("600").exec().into());
            }
            println!("checksum {:08x}", crc32c::crc32c(&region.bytes()));
            drop((qp, region));
        }
        Part::Answer { peer } => mortal::answer(&context, peer)?,
        Part::Attach => {
            let pd = context.open_pd(None)?;
            println!("has a session");
            for _ in std::io::stdin().lines().map_while(Result::ok) {
                match attached::Region::new(&pd, vec![0], READ_WRITE) {
                    Ok(_) => println!("memory: attached"),
                    Err(error) => println!("memory: {error}"),
                }
            }
            drop((pd, context));
            let deadline = Instant::now() + DEADLINE;
            while attached::copying_threads(std::process::id()) > 0 {
                if Instant::now() > deadline {
                    return Err("threads copy after the end of the session".into());
                }
                std::thread::yield_now();
            }
            println!("no thread copies");
        }
        Part::Borrow { address } => {
            attached::there_and_back(&attached::Guest::connect(
                &context,
                address,
                attached::pattern(1),
            )?)?;
            println!("the bytes read back are equal");
        }
        Part::Rping { address } => {
            let (status, why) = rping::request_atomic(&context, address)?;
            println!("{status:?}; {why}");
            rping::offer_bytes(&context, address)?;
            println!("the next connection works");
        }
        Part::Burst { address, posts } => {
            println!("calls: {}", burst::post(&context, address, posts)?);
        }
        Part::Share { pd } => {
            let pd = context.open_pd(Some(&pd))?;
            let buffer = context.create_shared_buffer(4096)?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
            let region = pd.reg_mr(&buffer, .., access)?;
            println!("region {} {}", region.iova(), region.rkey().0);
            wait_for_release();
            let mut bytes = [0; 4];
            region.read_at(0, &mut bytes)?;
            println!("holds {bytes:?}");
        }
        Part::Take { bytes } => {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let most = Some(4 << 30);
            setrlimit(Resource::As, Rlimit { current: most, maximum: most })?;
            let before = rnic_tests::process::peak_memory_kib()?;
            match context.create_shared_buffer(bytes) {
                Ok(buffer) => return Err(format!("made {buffer:?}").into()),
                Err(error) => println!("refused: {error}"),
            }
            println!(
                "KiB touched: {}",
                rnic_tests::process::peak_memory_kib()?.saturating_sub(before)
            );
        }
        Part::Hammer { address } => {
            println!("{} times", hammer::hammer(&context, address)?);
        }
        Part::Binds => hammer::bind_forever(&context)?,
        Part::Ignore { listeners } => {
            let all = (0..listeners).map(|_| context.listen("127.0.0.1:0", 1024));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            all.iter().for_each(|listener| println!("listening on {}", listener.local_addr()));
            wait_for_release();
        }
        Part::Bait => {
            let listener = context.listen("127.0.0.1:0", 64)?;
            println!("listening on {}", listener.local_addr());
            let pd = context.open_pd(None)?;
            let cq = context.create_cq(1024, None)?;
            let released = released();
            let mut taken = Vec::new();
            while !released.load(Ordering::Relaxed) {
                match listener.accept_request(Some(Duration::from_millis(100))) {
                    Ok(request) => {
                        let qp = pd.create_qp(&QpOptions::new(&cq))?;
                        // The peer may have exited.
                        if request.start_accept(&qp, &AcceptOptions::default()).is_ok() {
                            taken.push(qp);
                        }
                    }
                    Err(Error::TimedOut { .. }) => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        Part::Clients => {
            println!("{} clients", context.list(ListKind::Clients, 0)?.total);
        }
        Part::Churn => loop {
            let pd = context.open_pd(None)?;
            let buffer = context.create_shared_buffer(65536)?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let regions = (0..8).map(|_| pd.reg_mr(&buffer, .., access));
            let regions = regions.collect::<Result<Vec<_>, _>>()?;
            let cq = context.create_cq(16, None)?;
            let srq = pd.create_srq(&SrqOptions::default())?;
            let qp = pd.create_qp(&QpOptions { srq: Some(&srq), ..QpOptions::new(&cq) })?;
            let listener = context.listen("127.0.0.1:0", 4)?;
            let guest = pd.create_qp(&QpOptions::new(&cq))?;
            guest.start_connect(listener.local_addr(), &ConnectOptions::default())?;
            let request = listener.accept_request(Some(DEADLINE))?;
            request.accept(&qp, &AcceptOptions::default())?;
            println!("under way");
            drop(regions);
        },
        Part::Duet => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["host", "1"]);
            let mut host = Process::start(command);
            let address = host.line_after("listening on ").parse()?;
            tour::visit(&context, address, DEADLINE)?;
            host.succeed();
        }
        Part::Over => {
            over::play(&context, &Context::open()?)?;
            println!("both ends are done");
        }
        Part::Visit { address } => {
            for step in tour::visit(&context, address, DEADLINE)? {
                println!("{}: {}", step.name, step.detail);
            }
        }
    }
    Ok(())
}
