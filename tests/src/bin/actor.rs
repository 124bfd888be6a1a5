//! A client process of a test: plays the part its arguments name, through `rnic-client` alone.

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
    DEADLINE, Process, attached, attacks, burst, exhaust, frozen, hammer, hostile, mortal, over,
    rping, traffic,
};
use rnic_tools::tour;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    part: Part,
}

/// What an address is bound for.
#[derive(Clone, Copy, clap::ValueEnum)]
enum PortSpace {
    /// To be connected to (`RDMA_PS_TCP`).
    Connections,
    /// To be asked for UD QPs (`RDMA_PS_UDP`).
    Datagrams,
    /// To connect from.
    Source,
}

/// Begins to connect from an address.
fn connects_from(context: &Context, address: SocketAddr) -> Result<(), Error> {
    let client = rnic_tests::Client::of(context);
    let options = ConnectOptions { local: Some(address), ..ConnectOptions::default() };
    client.qp().start_connect(([127, 0, 0, 1], 1).into(), &options)
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
    /// Serves checksummed traffic to visitors until its standard input closes; prints the address
    /// it listens on and how each connection ended.
    Serve {
        /// Address to listen on.
        #[arg(default_value = "127.0.0.1:0")]
        address: SocketAddr,
    },
    /// Exchanges checksummed traffic with a server, until its standard input closes or for a
    /// number of rounds; prints when it has begun and how many rounds there were.
    Traffic {
        /// The server's address.
        address: SocketAddr,
        /// Seed of data and sizes.
        #[arg(default_value_t = 1)]
        seed: u64,
        /// Rounds; 0 for as many as there is time for.
        #[arg(default_value_t = 0)]
        rounds: u64,
    },
    /// Makes and destroys objects until it is killed; prints when it has begun.
    Churn,
    /// Lets others write into a region until its standard input closes; prints its address.
    Sink,
    /// Lends attached memory to one guest; prints its address, and when its standard input closes
    /// a checksum of what is in it.
    Lend {
        /// Becomes another program instead, which sleeps.
        #[arg(long)]
        exec: bool,
        /// That program has its descriptors.
        #[arg(long)]
        keep: bool,
    },
    /// Is the RC QP of a peer of the same device: lends it attached memory, whose address
    /// it prints with its own number, and posts receives until it is killed.
    Answer {
        /// The peer's QP.
        peer: u32,
    },
    /// Attaches its memory whenever its standard input says so and prints the result. When that
    /// closes, ends the session and prints when no thread of the process copies any more.
    Attach,
    /// Writes and reads memory that a lender lends, from and to attached memory of its own.
    Borrow {
        /// The lender's address.
        address: SocketAddr,
    },
    /// Makes a shared buffer of so many bytes, with 4 GiB of address space; prints why it cannot,
    /// and how much memory it has touched.
    Take {
        /// Bytes.
        bytes: u64,
    },
    /// Asks the server of `rping -s -P` for an atomic operation, then offers it bytes as rping's
    /// client does; prints what became of both.
    Rping {
        /// The server's address.
        address: SocketAddr,
    },
    /// Posts small Writes in batches as fast as they are taken; prints how many calls of `read`
    /// and `write` that cost.
    Burst {
        /// The sink's address.
        address: SocketAddr,
        /// Writes.
        posts: u64,
    },
    /// Lets others write into a region of a named protection domain until its standard input
    /// closes; prints where it is, and its first bytes at the end.
    Share {
        /// The domain's name.
        pd: String,
    },
    /// Writes into the memory that a host names, connecting again whenever that is ended; prints
    /// each end, and how many there were when nobody listens any more.
    Hammer {
        /// The host's address.
        address: SocketAddr,
    },
    /// Listens at so many addresses, which it prints, and decides about no request until its
    /// standard input closes.
    Ignore {
        /// Addresses.
        listeners: usize,
    },
    /// Accepts whoever comes, and does nothing else, until its standard input closes; prints where.
    Bait,
    /// Binds windows until it is killed; prints when it has begun.
    Binds,
    /// Prints how many sessions it may see.
    Clients,
    /// Breaks every rule for a number of seconds; prints how many sessions that took.
    Attack {
        /// Seed of its choices.
        seed: u64,
        /// Seconds.
        seconds: u64,
        /// Somebody to connect to.
        victim: Option<SocketAddr>,
    },
    /// Takes more than its share in one way, until its standard input closes; prints how far it is.
    Overload {
        /// In which way.
        #[arg(value_enum)]
        attack: attacks::Attack,
        /// The CPU it keeps to.
        cpu: usize,
    },
    /// Measures itself whenever its standard input says so.
    Bystand {
        /// The CPU it keeps to.
        cpu: usize,
    },
    /// Takes all there is of something, prints the refusal, and asks on until its standard input
    /// closes.
    Exhaust {
        /// Of what.
        #[arg(value_enum)]
        what: exhaust::What,
    },
    /// Visits a host in a process of its own.
    Duet,
    /// Connects two sessions over sockets of its own network namespace.
    Over,
    /// Binds an address; prints that it is bound, or the refusal.
    Bind {
        /// As what.
        #[arg(value_enum)]
        space: PortSpace,
        /// The address.
        address: SocketAddr,
    },
    /// Has so many descriptors in flight until its standard input closes; prints when it has.
    InFlight {
        /// How many.
        count: usize,
    },
    /// Serves a file system that never answers, and starts a client in front of it.
    Freeze {
        /// Where to mount it.
        directory: PathBuf,
        /// The client's user.
        uid: u32,
        /// The part it plays, with the frozen file as its last argument.
        part: Vec<String>,
    },
    /// Passes a descriptor of a frozen file to the daemon, and stays until its standard input
    /// closes.
    PassFrozen {
        /// As what.
        #[arg(value_enum)]
        how: frozen::Passed,
        /// The file.
        file: PathBuf,
    },
    /// Lends the pages of a frozen file to a named protection domain until its standard input
    /// closes; prints where they are.
    LendFrozen {
        /// The domain's name.
        pd: String,
        /// The file.
        file: PathBuf,
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

/// Returns when whoever started this actor wants it to end, or is gone.
fn wait_for_release() {
    // Whatever the error, there is nobody left to wait for.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// Becomes true when whoever started this actor wants it to end, or is gone.
fn released() -> Arc<AtomicBool> {
    let released = Arc::new(AtomicBool::new(false));
    let release = released.clone();
    std::thread::spawn(move || {
        wait_for_release();
        release.store(true, Ordering::Relaxed);
    });
    released
}

/// The daemon's socket, for those who speak to it by hand.
fn socket() -> Result<PathBuf, traffic::Failure> {
    Ok(std::env::var_os("RNIC_SOCKET").ok_or("RNIC_SOCKET is not set")?.into())
}

fn play(part: Part) -> Result<(), traffic::Failure> {
    match part {
        Part::Attack { seed, seconds, victim } => {
            let (socket, time) = (socket()?, Duration::from_secs(seconds));
            let sessions = hostile::attack(&socket, seed, time, victim);
            println!("{sessions} sessions");
            // In the middle of a session it becomes a program that knows nothing of it.
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
        Part::Exhaust { what } => {
            rnic_tests::process::raise_descriptor_limit();
            let released = released();
            let refused = |error: &rnic_client::Error| println!("refused: {error}");
            let had = exhaust::exhaust(what, refused, || !released.load(Ordering::Relaxed))?;
            println!("had {had}");
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

/// Plays a part that has a session of the library.
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
                let said = |line: String| println!("{line}");
                if let Err(e) = traffic::host(&context, &listener, u32::MAX, DEADLINE, said) {
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
            println!("checksum {:08x}", crc32c::crc32c(&attached::bytes(&region)?));
            drop((qp, region));
        }
        Part::Answer { peer } => mortal::answer(&context, peer)?,
        Part::Attach => {
            println!("has a session");
            for _ in std::io::stdin().lines().map_while(Result::ok) {
                match context.attach_memory() {
                    Ok(()) => println!("memory: attached"),
                    Err(error) => println!("memory: {error}"),
                }
            }
            drop(context);
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
            println!("the same came back");
        }
        Part::Rping { address } => {
            let (status, why) = rping::ask_for_an_atomic_operation(&context, address)?;
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
            let before = rnic_tests::process::touched()?;
            match context.create_shared_buffer(bytes) {
                Ok(buffer) => return Err(format!("made {buffer:?}").into()),
                Err(error) => println!("refused: {error}"),
            }
            println!("KiB touched: {}", rnic_tests::process::touched()?.saturating_sub(before));
        }
        Part::Hammer { address } => {
            println!("{} times", hammer::hammer(&context, address)?);
        }
        Part::Binds => hammer::bind_for_ever(&context)?,
        Part::Ignore { listeners } => {
            let all = (0..listeners).map(|_| context.listen("127.0.0.1:0", 1024));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            all.iter().for_each(|listener| println!("listening on {}", listener.local_addr()));
            wait_for_release();
        }
        Part::Bait => {
            let listener = context.listen("127.0.0.1:0", 64)?;
            println!("listening on {}", listener.local_addr());
            let (pd, cq) = (context.open_pd(None)?, context.create_cq(1024, None)?);
            let released = released();
            let mut taken = Vec::new();
            while !released.load(Ordering::Relaxed) {
                match listener.accept_request(Some(Duration::from_millis(100))) {
                    Ok(request) => {
                        let qp = pd.create_qp(&QpOptions::new(&cq))?;
                        // Its peer may be gone.
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
