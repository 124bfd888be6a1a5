//! Clients whose regions are attached memory: one that lends its memory to a guest, and the guest.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;

use rnic_client::{
    AcceptOptions, AttachedBuffer, Completion, ConnectOptions, Context, Cq, Listener, Mr,
    MrOptions, Pd, Qp, QpOptions, RemoteMr, Scope, SendRequest,
};
use rnic_core::abi::control::{
    MrRequest, MrSource, QueueLocation, Refusal, ReplyBody, RequestBody,
};
use rnic_core::abi::queue::QueueKind;
use rnic_core::shm::Mapping;
use rnic_core::shm::doorbell::DoorbellRinger;
use rnic_core::shm::queue::{CopyConsumer, QueueMemory};
use rnic_core::types::MrId;

use crate::raw::Raw;
use crate::traffic::Failure;
use crate::{Client, DEADLINE, Daemon, Process, READ_WRITE};

/// Bytes lent: not whole pages, and more than a step of any copy.
pub const LENT: usize = (1 << 20) + 77;

/// A region of this process's own memory that a peer may do anything with.
pub fn region(pd: &Pd, bytes: Vec<u8>) -> Result<Mr, Failure> {
    let buffer = AttachedBuffer::from_vec(bytes)?;
    Ok(pd.reg_mr_attached(
        &buffer,
        ..,
        &MrOptions { access: READ_WRITE, ..MrOptions::default() },
    )?)
}

/// Number of threads of a process that make copies for the daemon.
///
/// # Panics
///
/// If the process is gone.
pub fn copying_threads(process: u32) -> usize {
    let name = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it lives").flatten();
    // A thread may end while it is looked at.
    tasks.filter(|task| name(task).is_ok_and(|name| name.trim() == "rnic-copies")).count()
}

/// A queue of copies in the hands of a client that speaks the control socket itself.
#[derive(Debug)]
pub struct CopyQueue {
    /// The client's end.
    pub consumer: CopyConsumer,
    /// The first arena of the session or a later one.
    pub arena: Arc<Mapping>,
    /// The place of the queue in it.
    pub location: QueueLocation,
    doorbell: DoorbellRinger,
    eventfd: OwnedFd,
}

impl CopyQueue {
    /// Attaches the client's memory: one queue for each worker of the daemon.
    ///
    /// # Errors
    ///
    /// Refusals of the daemon, and those of the system.
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
        let (offset, shape) = (location.offset as usize, location.shape);
        let memory = QueueMemory::open(arena.clone(), offset, QueueKind::Copies, shape)?;
        // After the first arena and the channel of events.
        let eventfd = raw.descriptors.get(2 + usize::from(worker)).ok_or("no eventfd")?;
        Ok(CopyQueue {
            consumer: CopyConsumer::new(memory, Default::default()),
            arena,
            location,
            doorbell: DoorbellRinger::new(raw.arenas[0].clone(), worker.into())?,
            eventfd: eventfd.try_clone()?,
        })
    }

    /// Makes the copies there are, and rings for them. Returns true if there were any.
    pub fn serve(&self) -> bool {
        let served = self.consumer.serve();
        if served {
            self.ring();
        }
        served
    }

    /// Serves the queue as a library does, until the process ends.
    pub fn serve_for_ever(self) {
        loop {
            self.consumer.prepare_sleep();
            if !self.serve() {
                self.consumer.sleep();
            }
        }
    }

    /// Rings the worker's doorbell, and wakes it in any case.
    pub fn ring(&self) {
        let _ = self.doorbell.ring(self.consumer.doorbell());
        // A full eventfd rings as well.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

/// Registers attached memory of a client that speaks the control socket itself, in a named domain.
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
    let (address, length) = (of.address(), of.len() as u64);
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

/// A client that is connected to itself by QPs of a named domain, and so reaches every region
/// there.
pub struct Insider {
    /// The session, in that domain.
    pub client: Client,
    /// The QP whose requests name regions of others.
    pub qp: Qp,
    /// Memory of its own, shared with the daemon.
    pub own: Mr,
    _peer: Qp,
}

impl Insider {
    /// Bytes of its own memory.
    pub const LEN: u32 = 4096;

    /// Connects.
    ///
    /// # Panics
    ///
    /// If the daemon refuses it.
    pub fn new(daemon: &Daemon, pd: &str) -> Insider {
        let client = Client::new(daemon).in_domain(pd);
        let (qp, peer) = (client.qp(), client.qp());
        client.join(&qp, &peer);
        let own = client.region(Self::LEN.into(), READ_WRITE);
        Insider { client, qp, own, _peer: peer }
    }

    /// Posts a Read of the first bytes of a region into its own memory.
    ///
    /// # Panics
    ///
    /// If there is no room for it.
    pub fn post_read(&self, of: RemoteMr) {
        let read = SendRequest::read(1, self.own.sge(0, Self::LEN), of.at(0)).signaled();
        self.qp.post_send(&[read]).expect("room");
    }

    /// Reads the first bytes of a region, which has to fail.
    ///
    /// # Panics
    ///
    /// If it succeeds.
    pub fn fails_to_read(&self, of: RemoteMr) {
        self.post_read(of);
        let completion = self.client.completion();
        assert!(completion.ok().is_err(), "{completion:?}");
    }

    /// Its own memory.
    ///
    /// # Panics
    ///
    /// If it cannot be read.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::LEN as usize];
        self.own.read_at(0, &mut bytes).expect("it is its own");
        bytes
    }
}

/// This process's memory, to be passed on.
///
/// # Errors
///
/// Those of the system.
pub fn own_memory() -> Result<OwnedFd, Failure> {
    Ok(File::options().read(true).write(true).open("/proc/self/mem")?.into())
}

/// Passes everything as its memory that is not.
///
/// # Errors
///
/// If anything is taken, or refused otherwise than by name.
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
        ("its own memory, to be read only", open("/proc/self/mem")?),
    ] {
        match raw.try_call(RequestBody::AttachMemory, &[descriptor.as_fd()]) {
            Some(Err(Refusal::Invalid { field, .. })) if field == "memory" => {}
            answer => return Err(format!("{what}: {answer:?}").into()),
        }
    }
    other.kill();
    Ok(())
}

/// Accepts one guest and lends it memory.
///
/// # Errors
///
/// Those of the library.
pub fn lend(context: &Context, listener: &Listener) -> Result<(Qp, Mr), Failure> {
    context.attach_memory()?;
    println!("attached");
    let pd = context.open_pd(None)?;
    let region = region(&pd, vec![0; LENT])?;
    let qp = pd.create_qp(&QpOptions::new(&context.create_cq(16, None)?))?;
    let private_data = region.remote().to_bytes().to_vec();
    let options = AcceptOptions { private_data, ..AcceptOptions::default() };
    listener.accept_request(Some(DEADLINE))?.accept(&qp, &options)?;
    Ok((qp, region))
}

/// A guest with a region of its own, as large.
pub struct Guest {
    /// What it was lent.
    pub lent: RemoteMr,
    /// Its own memory.
    pub own: Mr,
    /// The connection.
    pub qp: Qp,
    cq: Cq,
}

impl Guest {
    /// Connects to who lends, with these bytes as attached memory.
    ///
    /// # Errors
    ///
    /// Those of the library.
    pub fn connect(
        context: &Context,
        address: SocketAddr,
        bytes: Vec<u8>,
    ) -> Result<Self, Failure> {
        context.attach_memory()?;
        let pd = context.open_pd(None)?;
        let own = region(&pd, bytes)?;
        let cq = context.create_cq(64, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let connected = qp.connect(address, &ConnectOptions::default())?;
        let lent = RemoteMr::from_bytes(&connected.private_data).ok_or("nothing was lent")?;
        Ok(Guest { lent, own, qp, cq })
    }

    /// Posts a request.
    ///
    /// # Errors
    ///
    /// Those of the library.
    pub fn post(&self, request: SendRequest<'_>) -> Result<(), Failure> {
        Ok(self.qp.post_send(&[request.signaled()])?)
    }

    /// The next completion.
    ///
    /// # Errors
    ///
    /// If there is none before the deadline.
    pub fn completion(&self) -> Result<Completion, Failure> {
        let mut one = [Completion::default()];
        match self.cq.wait(&mut one, Some(DEADLINE))? {
            0 => Err("no completion in time".into()),
            _ => Ok(one[0]),
        }
    }

    /// Returns true if no request has completed that was not waited for.
    ///
    /// # Panics
    ///
    /// If the session has ended.
    pub fn has_no_completion(&self) -> bool {
        self.cq.poll(&mut [Completion::default()]).expect("the session goes on") == 0
    }

    /// Writes all of its memory to what it was lent, and waits until that is done.
    ///
    /// # Errors
    ///
    /// Those of the library, and the completion's.
    pub fn write(&self) -> Result<(), Failure> {
        self.post(SendRequest::write(1, &[self.own.sge(0, LENT as u32)], self.lent.at(0)))?;
        self.completion()?.ok()?;
        Ok(())
    }

    /// Reads all that it was lent into its memory, and waits until that is done.
    ///
    /// # Errors
    ///
    /// Those of the library, and the completion's.
    pub fn read(&self) -> Result<(), Failure> {
        self.post(SendRequest::read(2, self.own.sge(0, LENT as u32), self.lent.at(0)))?;
        self.completion()?.ok()?;
        Ok(())
    }
}

/// Bytes that differ everywhere and from those of other seeds.
pub fn pattern(seed: u32) -> Vec<u8> {
    (0..LENT as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed as u8).collect()
}

/// Writes all of a guest's memory to the lender and gets it back, twice; the second time it is
/// `pattern(3)`.
///
/// # Errors
///
/// Those of the library, and if something else comes back.
pub fn there_and_back(guest: &Guest) -> Result<(), Failure> {
    for seed in [2, 3] {
        let sent = pattern(seed);
        guest.own.write_at(0, &sent)?;
        guest.write()?;
        guest.own.fill(0, LENT, 0)?;
        guest.read()?;
        if bytes(&guest.own)? != sent {
            return Err("something else came back".into());
        }
    }
    Ok(())
}

/// Bytes of a region.
///
/// # Errors
///
/// Those of the library.
pub fn bytes(region: &Mr) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; LENT];
    region.read_at(0, &mut bytes)?;
    Ok(bytes)
}

/// Keeps what this process's descriptors name open across `exec`, as a program that is careless
/// about them does.
///
/// # Errors
///
/// Those of the system.
pub fn keep_descriptors() -> Result<(), Failure> {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    let listed: Vec<_> = std::fs::read_dir("/proc/self/fd")?.collect::<Result<_, _>>()?;
    let numbers = listed.iter().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    for number in numbers.filter(|n| *n > 2) {
        // The one that lists the others is closed by now.
        if let Ok(same) = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()) {
            rustix::io::fcntl_setfd(&same, rustix::io::FdFlags::empty())?;
            std::mem::forget(same);
        }
    }
    Ok(())
}
