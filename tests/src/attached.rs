//! Clients with attached memory: a lender, and a guest that uses the lent memory.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;

use rnic_abi::abi::control::{MrRequest, MrSource, QueueLocation, Refusal, ReplyBody, RequestBody};
use rnic_abi::abi::queue::QueueKind;
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::DoorbellRinger;
use rnic_abi::shm::queue::{CopyConsumer, QueueMemory};
use rnic_abi::types::MrId;
use rnic_client::{
    AcceptOptions, Access, Completion, ConnectOptions, Context, Cq, Listener, Mr, MrOptions, Pd,
    ProgramMr, ProgramRange, Qp, QpOptions, RemoteMr, Scope, SendRequest, Sge,
};

use crate::raw::Raw;
use crate::traffic::Failure;
use crate::{Client, DEADLINE, Daemon, Process, READ_WRITE};

/// Length of the lent region: not a multiple of the page size, and larger than one copy step.
pub const LENT: usize = (1 << 20) + 77;

/// A region of this process's own memory.
pub struct Region {
    /// The memory, which is never freed.
    pub memory: &'static Mapping,
    mr: ProgramMr,
}

impl Region {
    /// Registers `bytes` with these rights.
    ///
    /// # Errors
    ///
    /// Errors of the library.
    pub fn new(pd: &Pd, bytes: Vec<u8>, access: Access) -> Result<Region, Failure> {
        let memory: &'static Mapping = Box::leak(Box::new(Mapping::from_vec(bytes)?));
        let options = MrOptions { access, ..MrOptions::default() };
        let mr = pd.reg_program_memory(&ProgramRange::of(memory), &options)?;
        Ok(Region { memory, mr })
    }

    /// Returns the SGE for the first `length` bytes.
    pub fn sge(&self, length: u32) -> Sge {
        Sge { addr: self.mr.iova(), length, lkey: self.mr.stag().0 }
    }

    /// Returns the description for a peer.
    pub fn remote(&self) -> RemoteMr {
        RemoteMr { addr: self.mr.iova(), len: self.mr.len(), rkey: self.mr.stag() }
    }

    /// Returns the contents.
    ///
    /// # Panics
    ///
    /// If the memory cannot be read.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.read(0, &mut bytes).expect("access to own memory");
        bytes
    }
}

/// Returns the number of threads of a process that copy data for the daemon.
///
/// # Panics
///
/// If the process has exited.
pub fn copying_threads(process: u32) -> usize {
    let name = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let tasks =
        std::fs::read_dir(format!("/proc/{process}/task")).expect("a running process").flatten();
    // A thread may end between the listing and the read.
    tasks.filter(|task| name(task).is_ok_and(|name| name.trim() == "rnic-copies")).count()
}

/// A copy queue of a client that implements the control protocol itself.
#[derive(Debug)]
pub struct CopyQueue {
    /// The client's end.
    pub consumer: CopyConsumer,
    /// The arena that holds the queue.
    pub arena: Arc<Mapping>,
    /// The queue's location in the arena.
    pub location: QueueLocation,
    doorbell: DoorbellRinger,
    eventfd: OwnedFd,
}

impl CopyQueue {
    /// Attaches the client's memory by creating one copy queue per worker of the daemon.
    ///
    /// # Errors
    ///
    /// Refusals of the daemon and system errors.
    pub fn of_each_worker(raw: &mut Raw) -> Result<Vec<CopyQueue>, Failure> {
        (0..raw.workers).map(|worker| CopyQueue::new(raw, worker)).collect()
    }

    fn new(raw: &mut Raw, worker: u16) -> Result<CopyQueue, Failure> {
        let body = RequestBody::ServeCopies { worker: worker.into() };
        let location = match raw.try_call(body, &[]) {
            Some(Ok(ReplyBody::Copies { queue, .. })) => queue,
            answer => return Err(format!("{answer:?}").into()),
        };
        let arena = raw.arenas.get(location.arena as usize).ok_or("an unknown arena")?.clone();
        let offset = location.offset as usize;
        let shape = location.shape;
        let memory = QueueMemory::open(arena.clone(), offset, QueueKind::Copies, shape)?;
        // Descriptors 0 and 1 are the first arena and the event channel.
        let eventfd = raw.descriptors.get(2 + usize::from(worker)).ok_or("no eventfd")?;
        Ok(CopyQueue {
            consumer: CopyConsumer::new(memory, Default::default()),
            arena,
            location,
            doorbell: DoorbellRinger::new(raw.arenas[0].clone(), worker.into())?,
            eventfd: eventfd.try_clone()?,
        })
    }

    /// Performs all pending copy jobs and rings the doorbell. Returns true if there were any.
    pub fn serve(&self) -> bool {
        let served = self.consumer.serve();
        if served {
            self.ring();
        }
        served
    }

    /// Serves the queue, as the library does, until the process ends.
    pub fn serve_forever(self) {
        loop {
            self.consumer.prepare_sleep();
            if !self.serve() {
                self.consumer.sleep();
            }
        }
    }

    /// Rings the worker's doorbell and always writes its eventfd.
    pub fn ring(&self) {
        let _ = self.doorbell.ring(self.consumer.doorbell());
        // A full eventfd also wakes the worker.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

/// Registers attached memory in a named domain, for a client that implements the control protocol
/// itself.
///
/// # Errors
///
/// Refusals of the daemon.
pub fn register_raw(raw: &mut Raw, pd: &str, of: &Mapping) -> Result<(MrId, RemoteMr), Failure> {
    let mut call = |body| match raw.try_call(body, &[]) {
        Some(Ok(reply)) => Ok(reply),
        answer => Err(Failure::from(format!("{answer:?}"))),
    };
    let name = Some(pd.to_owned());
    let ReplyBody::Pd { pd } = call(RequestBody::OpenPd { name })? else {
        return Err("no domain".into());
    };
    let address = of.address();
    let length = of.len() as u64;
    let request = RequestBody::RegMr(MrRequest {
        pd,
        source: MrSource::Attached { address },
        length,
        iova: address,
        access: READ_WRITE,
        scope: Scope::Pd,
    });
    let ReplyBody::Mr { mr, stag } = call(request)? else { return Err("no region".into()) };
    Ok((mr, RemoteMr { addr: address, len: length, rkey: stag }))
}

/// A client with two QPs of a named domain that are connected to each other, so that its requests
/// reach every region of the domain.
pub struct Insider {
    /// The session. Its `pd` is the named domain.
    pub client: Client,
    /// The QP with which it accesses regions of other clients.
    pub qp: Qp,
    /// The client's own region.
    pub own: Mr,
    _peer: Qp,
}

impl Insider {
    /// Length of the own region in bytes.
    pub const LEN: u32 = 4096;

    /// Opens the session and connects the QPs.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn new(daemon: &Daemon, pd: &str) -> Insider {
        let client = Client::new(daemon).in_domain(pd);
        let [qp, peer] = client.pair();
        let own = client.region(Self::LEN.into(), READ_WRITE);
        Insider { client, qp, own, _peer: peer }
    }

    /// Posts a Read from the start of a region into the client's own region.
    ///
    /// # Panics
    ///
    /// If the send queue is full.
    pub fn post_read(&self, of: RemoteMr) {
        let read = SendRequest::read(1, self.own.sge(0, Self::LEN), of.at(0)).signaled();
        self.qp.post_send(&[read]).expect("room in the queue");
    }

    /// Reads from the start of a region and asserts that the Read fails.
    ///
    /// # Panics
    ///
    /// If the Read succeeds.
    pub fn fails_to_read(&self, of: RemoteMr) {
        self.post_read(of);
        let completion = self.client.completion();
        assert!(completion.ok().is_err(), "{completion:?}");
    }

    /// Returns the contents of the client's own region.
    ///
    /// # Panics
    ///
    /// If it cannot be read.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::LEN as usize];
        self.own.read_at(0, &mut bytes).expect("access to own memory");
        bytes
    }
}

/// Opens this process's memory, to pass it to the daemon.
///
/// # Errors
///
/// System errors.
pub fn own_memory() -> Result<OwnedFd, Failure> {
    Ok(File::options().read(true).write(true).open("/proc/self/mem")?.into())
}

/// Tries to attach memory with invalid descriptors.
///
/// # Errors
///
/// If the daemon accepts a descriptor, or refuses it for a reason other than an invalid `memory`
/// field.
pub fn offer_wrong_descriptors(raw: &mut Raw) -> Result<(), Failure> {
    let open = |path: &str| Ok::<OwnedFd, Failure>(File::open(path)?.into());
    let (pipe, other_end) = rustix::pipe::pipe()?;
    let other = Process::start(Command::new("cat"));
    let path = format!("/proc/{}/mem", other.id());
    let others = File::options().read(true).write(true).open(path)?;
    for (what, descriptor) in [
        ("a pipe", pipe),
        ("its other end", other_end),
        ("a directory", open("/tmp")?),
        ("/dev/zero", open("/dev/zero")?),
        ("a memfd", crate::raw::memfd(4096)),
        ("a socket", raw.socket.try_clone()?),
        ("another file of /proc", open("/proc/self/maps")?),
        ("the memory of another process", others.into()),
        ("its own memory, opened read-only", open("/proc/self/mem")?),
    ] {
        match raw.try_call(RequestBody::AttachMemory, &[descriptor.as_fd()]) {
            Some(Err(Refusal::Invalid { field, .. })) if field == "memory" => {}
            answer => return Err(format!("{what}: {answer:?}").into()),
        }
    }
    other.kill();
    Ok(())
}

/// Accepts a guest and lends it a region of attached memory.
///
/// # Errors
///
/// Errors of the library.
pub fn lend(context: &Context, listener: &Listener) -> Result<(Qp, Region), Failure> {
    let pd = context.open_pd(None)?;
    let region = Region::new(&pd, vec![0; LENT], READ_WRITE)?;
    println!("attached");
    let qp = pd.create_qp(&QpOptions::new(&context.create_cq(16, None)?))?;
    let private_data = region.remote().to_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    listener.accept_request(Some(DEADLINE))?.accept(&qp, &options)?;
    Ok((qp, region))
}

/// A guest with a region of the same size as the lent region.
pub struct Guest {
    /// The lent region.
    pub lent: RemoteMr,
    /// The guest's own region.
    pub own: Region,
    /// The connection.
    pub qp: Qp,
    cq: Cq,
}

impl Guest {
    /// Connects to the lender, with `bytes` as the guest's attached memory.
    ///
    /// # Errors
    ///
    /// Errors of the library.
    pub fn connect(
        context: &Context,
        address: SocketAddr,
        bytes: Vec<u8>,
    ) -> Result<Self, Failure> {
        let pd = context.open_pd(None)?;
        let own = Region::new(&pd, bytes, READ_WRITE)?;
        let cq = context.create_cq(64, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let connected = qp.connect(address, &ConnectOptions::default())?;
        let lent = RemoteMr::from_bytes(&connected.private_data)
            .ok_or("the private data contains no region")?;
        Ok(Guest { lent, own, qp, cq })
    }

    /// Posts a signaled request.
    ///
    /// # Errors
    ///
    /// Errors of the library.
    pub fn post(&self, request: SendRequest<'_>) -> Result<(), Failure> {
        Ok(self.qp.post_send(&[request.signaled()])?)
    }

    /// Waits for the next completion.
    ///
    /// # Errors
    ///
    /// If none arrives before the deadline.
    pub fn completion(&self) -> Result<Completion, Failure> {
        let mut one = [Completion::default()];
        match self.cq.wait(&mut one, Some(DEADLINE))? {
            0 => Err("no completion in time".into()),
            _ => Ok(one[0]),
        }
    }

    /// Returns true if the CQ is empty.
    ///
    /// # Panics
    ///
    /// If the session has ended.
    pub fn has_no_completion(&self) -> bool {
        self.cq.poll(&mut [Completion::default()]).expect("the session is open") == 0
    }

    /// Writes the guest's region to the lent region and waits for the completion.
    ///
    /// # Errors
    ///
    /// Errors of the library, or a failed completion.
    pub fn write(&self) -> Result<(), Failure> {
        self.post(SendRequest::write(1, &[self.own.sge(LENT as u32)], self.lent.at(0)))?;
        self.completion()?.ok()?;
        Ok(())
    }

    /// Reads the lent region into the guest's region and waits for the completion.
    ///
    /// # Errors
    ///
    /// Errors of the library, or a failed completion.
    pub fn read(&self) -> Result<(), Failure> {
        self.post(SendRequest::read(2, self.own.sge(LENT as u32), self.lent.at(0)))?;
        self.completion()?.ok()?;
        Ok(())
    }
}

/// Returns [`LENT`] pseudorandom bytes that depend on the seed.
pub fn pattern(seed: u32) -> Vec<u8> {
    (0..LENT as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed as u8).collect()
}

/// Writes the guest's memory to the lender and reads it back, twice. Leaves `pattern(3)` in both
/// regions.
///
/// # Errors
///
/// Errors of the library, or a mismatch of the bytes.
pub fn there_and_back(guest: &Guest) -> Result<(), Failure> {
    for seed in [2, 3] {
        let sent = pattern(seed);
        guest.own.memory.write(0, &sent)?;
        guest.write()?;
        guest.own.memory.fill(0, LENT, 0)?;
        guest.read()?;
        if guest.own.bytes() != sent {
            return Err("the bytes read back differ".into());
        }
    }
    Ok(())
}

/// Duplicates all descriptors of this process without `FD_CLOEXEC`, like a program that leaks them
/// across `exec`.
///
/// # Errors
///
/// System errors.
pub fn keep_descriptors() -> Result<(), Failure> {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    let listed: Vec<_> = std::fs::read_dir("/proc/self/fd")?.collect::<Result<_, _>>()?;
    let numbers = listed.iter().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    for number in numbers.filter(|n| *n > 2) {
        // The descriptor that listed the directory is closed by now.
        if let Ok(same) = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()) {
            rustix::io::fcntl_setfd(&same, rustix::io::FdFlags::empty())?;
            std::mem::forget(same);
        }
    }
    Ok(())
}
