//! A fake daemon in the test process, for tests of the client alone.
//!
//! A thread serves the control protocol on a real socket, with real arenas and rings. Tests use the
//! daemon's ends of the rings and send the events. The fake records every request and grants it,
//! unless the test has set another answer.

use std::collections::{HashMap, VecDeque};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Mutex, MutexGuard};
use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::*;
use rnic_abi::abi::queue::{
    ARM_NONE, ChannelRecord, Cqe, QueueKind, QueueShape, doorbell_offset, queue_header,
};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::shm::queue::{
    CompletionProducer, QueueMemory, ReceiveConsumer, SendConsumer, SendEntry, SgeList,
};
use rnic_abi::types::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::*;

use crate::{Context, OpenOptions};

pub(crate) const WORKERS: u32 = 2;
const ARENA_LEN: usize = 256 * 1024;

/// Answer of the fake to the next request, instead of granting it.
pub(crate) enum Answer {
    Refuse(Refusal),
    /// Closes all sockets without a reply.
    HangUp,
    /// Sends no reply.
    Silence,
    /// Sends these bytes as the reply.
    Bytes(Vec<u8>),
    /// Sends a reply with the wrong request ID.
    WrongId,
}

pub(crate) struct FakeDaemon {
    folder: tempfile::TempDir,
    device: Arc<Mutex<Device>>,
    thread: Option<JoinHandle<()>>,
}

/// The daemon's state of one session.
pub(crate) struct Device {
    /// Reply to Hello.
    pub(crate) hello: HelloReply,
    /// Answers to the next requests.
    pub(crate) script: VecDeque<Answer>,
    /// Requests so far.
    pub(crate) requests: Vec<RequestBody>,
    pub(crate) qps: HashMap<QpId, FakeQp>,
    pub(crate) srqs: HashMap<SrqId, ReceiveConsumer>,
    pub(crate) cqs: HashMap<CqId, FakeCq>,
    /// Length in bytes of shared buffers without memory.
    pub(crate) reserved: HashMap<SharedBufferId, u64>,
    pub(crate) shared_buffers: HashMap<SharedBufferId, Arc<Mapping>>,
    pub(crate) scanners: Vec<DoorbellScanner>,
    eventfds: Vec<OwnedFd>,
    channels: HashMap<ChannelId, OwnedFd>,
    events: Option<OwnedFd>,
    /// Number and mapping of the arena for the next queue, and its bytes in use.
    arena: Option<(u32, Arc<Mapping>, usize)>,
    /// Places the next queue in a new arena.
    pub(crate) next_in_new_arena: bool,
    /// Handle of the newest object.
    pub(crate) last_handle: u32,
}

pub(crate) struct FakeQp {
    pub(crate) sq: SendConsumer,
    pub(crate) rq: Option<ReceiveConsumer>,
}

impl FakeQp {
    /// Takes the next request with its SGEs. The test fails if none is posted.
    pub(crate) fn next_request(&mut self) -> (SendEntry, SgeList) {
        let mut sges = SgeList::new();
        let entry = self.sq.take(&mut sges).expect("well-formed").expect("posted");
        (entry, sges)
    }
}

pub(crate) struct FakeCq {
    pub(crate) producer: CompletionProducer,
    /// Offset of its arm word.
    arm_at: usize,
    channel: Option<ChannelId>,
    fired: u64,
}

impl FakeDaemon {
    pub(crate) fn start() -> Self {
        Self::with_hello_reply(HelloStatus::Ok, ABI_VERSION)
    }

    /// Starts a fake that replies to Hello with this status and version.
    pub(crate) fn with_hello_reply(status: HelloStatus, version: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        bind(&listener, &SocketAddrUnix::new(folder.path().join("rnicd.sock")).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        let hello = HelloReply {
            status: status as u32,
            version,
            workers: WORKERS as u16,
            session: SessionId(42),
            arena_len: ARENA_LEN as u32,
            features: Features::DIRECT_PATH.bits(),
        };
        let device = Arc::new(Mutex::new(Device {
            hello,
            script: VecDeque::new(),
            requests: Vec::new(),
            qps: HashMap::new(),
            srqs: HashMap::new(),
            cqs: HashMap::new(),
            reserved: HashMap::new(),
            shared_buffers: HashMap::new(),
            scanners: Vec::new(),
            eventfds: Vec::new(),
            channels: HashMap::new(),
            events: None,
            arena: None,
            next_in_new_arena: false,
            last_handle: 0,
        }));
        let thread = std::thread::spawn({
            let device = device.clone();
            move || {
                let socket = accept_with(&listener, SocketFlags::CLOEXEC).unwrap();
                serve(&socket, &device);
            }
        });
        FakeDaemon { folder, device, thread: Some(thread) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("rnicd.sock")
    }

    /// Opens a context on the fake, which serves only one.
    pub(crate) fn open(&self) -> Context {
        Context::open_with(self.options()).unwrap()
    }

    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions { socket: Some(self.socket()), ..OpenOptions::default() }
    }

    pub(crate) fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock()
    }

    pub(crate) fn answer_next(&self, answer: Answer) {
        self.device().script.push_back(answer);
    }

    /// Waits for a request with this property and returns its index in [`Device::requests`].
    pub(crate) fn await_request(&self, is: impl Fn(&RequestBody) -> bool) -> usize {
        super::tests::until("a request", || {
            let device = self.device();
            device.requests.iter().position(&is)
        })
    }

    pub(crate) fn event(&self, event: &Event) {
        let packet = postcard::to_stdvec(event).unwrap();
        let device = self.device();
        send(device.events.as_ref().unwrap(), &packet, SendFlags::NOSIGNAL).unwrap();
    }

    /// Closes the event socket and the completion channels. The client concludes that the daemon
    /// has exited.
    pub(crate) fn hang_up(&self) {
        self.device().hang_up();
    }

    /// Waits for the end of the session.
    pub(crate) fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

impl Device {
    /// Writes a completion and, if the CQ is armed, sends an event, as an engine does.
    pub(crate) fn complete(&mut self, cq: CqId, entry: &Cqe) {
        let fake = self.cqs.get_mut(&cq).unwrap();
        fake.producer.publish(entry).unwrap();
        if fake.producer.take_arm(true) {
            self.fire(cq);
        }
    }

    /// Sends a completion channel record.
    pub(crate) fn fire(&mut self, cq: CqId) {
        let fake = self.cqs.get_mut(&cq).unwrap();
        fake.fired += 1;
        let record = ChannelRecord { cq: cq.0, sequence: fake.fired };
        let channel = &self.channels[&fake.channel.unwrap()];
        send(channel, &record.to_bytes(), SendFlags::NOSIGNAL).unwrap();
    }

    /// Returns the number of wake-ups sent to a worker since the last call.
    pub(crate) fn wakes(&mut self, worker: u32) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.eventfds[worker as usize], &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(rustix::io::Errno::AGAIN) => 0,
            Err(e) => panic!("eventfd: {e}"),
        }
    }

    /// Returns the doorbell indices rung for a worker since the last call.
    pub(crate) fn rung(&mut self, worker: u32) -> Vec<u32> {
        let mut indices = Vec::new();
        self.scanners[worker as usize].scan(|n| indices.push(n));
        indices
    }

    /// Returns true if a CQ is armed, without changing it.
    pub(crate) fn armed(&self, cq: CqId) -> bool {
        let fake = &self.cqs[&cq];
        let word = fake.producer.queue().mapping().load_u64(fake.arm_at).unwrap();
        word as u32 != ARM_NONE
    }

    fn hang_up(&mut self) {
        self.events = None;
        self.channels.clear();
    }

    fn next_handle(&mut self) -> u32 {
        self.last_handle += 1;
        self.last_handle
    }

    /// Creates a queue. Sets `fd` if the queue is in a new arena.
    fn place(
        &mut self,
        kind: QueueKind,
        shape: QueueShape,
        owner: u32,
        fd: &mut Option<(NewArena, OwnedFd)>,
    ) -> (QueueMemory, QueueLocation) {
        if std::mem::take(&mut self.next_in_new_arena) {
            let (mapping, new) = Mapping::create_arena("fake", ARENA_LEN).unwrap();
            let arena = self.arena.as_ref().unwrap().0 + 1;
            self.arena = Some((arena, mapping, 0));
            *fd = Some((NewArena { arena, length: ARENA_LEN as u32 }, new));
        }
        let (arena, mapping, used) = self.arena.as_mut().unwrap();
        let offset = *used;
        *used += shape.bytes().next_multiple_of(64);
        let memory =
            QueueMemory::format(mapping.clone(), offset, kind, shape, owner, owner % 1024).unwrap();
        (memory, QueueLocation { arena: *arena, offset: offset as u32, shape })
    }

    /// Grants a request. Returns the reply and its descriptors.
    fn grant(&mut self, body: &RequestBody, passed: Option<OwnedFd>) -> (ReplyBody, Vec<OwnedFd>) {
        let mut fd = None;
        let reply = match body {
            RequestBody::OpenPd { .. } => ReplyBody::Pd { pd: PdId(self.next_handle()) },
            RequestBody::ReserveSharedBuffer { length } => {
                let buffer = SharedBufferId(self.next_handle());
                self.reserved.insert(buffer, *length);
                ReplyBody::SharedBuffer { buffer }
            }
            RequestBody::FillSharedBuffer { buffer, .. } => {
                let length = self.reserved.remove(buffer).unwrap();
                let mapping =
                    Mapping::adopt_shared_buffer(passed.unwrap().as_fd(), length).unwrap();
                self.shared_buffers.insert(*buffer, mapping);
                ReplyBody::Done
            }
            RequestBody::RegMr(_) => {
                let n = self.next_handle();
                ReplyBody::Mr { mr: MrId(n), stag: Stag(n << 8 | 0xAB) }
            }
            RequestBody::CreateChannel => {
                let channel = ChannelId(self.next_handle());
                let (ours, theirs) = pair();
                self.channels.insert(channel, ours);
                return (ReplyBody::Channel { channel }, vec![theirs]);
            }
            RequestBody::CreateCq { entries, channel, .. } => {
                let cq = CqId(self.next_handle());
                let shape = QueueShape::completion(*entries);
                let (memory, queue) = self.place(QueueKind::Completion, shape, cq.0, &mut fd);
                let fake = FakeCq {
                    producer: CompletionProducer::new(memory),
                    arm_at: queue.offset as usize + queue_header::ARM,
                    channel: *channel,
                    fired: 0,
                };
                self.cqs.insert(cq, fake);
                ReplyBody::Cq { cq, queue, new_arena: fd.as_ref().map(|(new, _)| *new) }
            }
            RequestBody::ResizeCq { cq, entries } => {
                let shape = QueueShape::completion(*entries);
                let (memory, queue) = self.place(QueueKind::Completion, shape, cq.0, &mut fd);
                let fake = self.cqs.get_mut(cq).unwrap();
                let mut moving = fake.producer.begin_move(memory).unwrap();
                moving.prepare();
                moving.copy();
                fake.producer.finish_move(moving, 0).unwrap();
                fake.arm_at = queue.offset as usize + queue_header::ARM;
                ReplyBody::Cq { cq: *cq, queue, new_arena: fd.as_ref().map(|(new, _)| *new) }
            }
            RequestBody::CreateQp(request) => {
                let qp = QpId(self.next_handle());
                let shape =
                    QueueShape::send(request.sq_depth, request.max_send_sge, request.max_inline);
                let (send, sq) = self.place(QueueKind::Send, shape, qp.0, &mut fd);
                let rq = request.srq.is_none().then(|| {
                    let shape = QueueShape::receive(request.rq_depth, request.max_recv_sge);
                    self.place(QueueKind::Receive, shape, qp.0, &mut fd)
                });
                let (receive, rq) = rq.unzip();
                let rq_end = receive.map(ReceiveConsumer::new);
                self.qps.insert(qp, FakeQp { sq: SendConsumer::new(send), rq: rq_end });
                ReplyBody::Qp { qp, sq, rq, new_arena: fd.as_ref().map(|(new, _)| *new) }
            }
            RequestBody::CreateSrq(request) => {
                let srq = SrqId(self.next_handle());
                let shape = QueueShape::receive(request.depth, request.max_sge);
                let (memory, queue) = self.place(QueueKind::SharedReceive, shape, srq.0, &mut fd);
                self.srqs.insert(srq, ReceiveConsumer::new(memory));
                ReplyBody::Srq { srq, queue, new_arena: fd.as_ref().map(|(new, _)| *new) }
            }
            RequestBody::Bind { address, .. } | RequestBody::BindDatagrams { address, .. } => {
                let mut address = *address;
                address.set_port(7471);
                ReplyBody::Listener { listener: ListenerId(self.next_handle()), address }
            }
            RequestBody::AllocWindow { .. } => {
                let n = self.next_handle();
                ReplyBody::Window { window: MwId(n), stag: Stag(n << 8 | 0xFE) }
            }
            _ => ReplyBody::Done,
        };
        (reply, fd.into_iter().map(|(_, fd)| fd).collect())
    }
}

/// Serves one session until the client or the script ends it.
fn serve(socket: &OwnedFd, device: &Mutex<Device>) {
    let Some((hello, _)) = receive(socket) else { return };
    assert!(Hello::from_bytes(&hello).is_some());
    if !welcome(socket, &mut device.lock()) {
        return;
    }
    while let Some((packet, passed)) = receive(socket) {
        let request: Request = postcard::from_bytes(&packet).unwrap();
        let mut device = device.lock();
        device.requests.push(request.body.clone());
        let mut id = request.id;
        let (result, descriptors) = match device.script.pop_front() {
            None => {
                let (reply, descriptors) = device.grant(&request.body, passed);
                (Ok(reply), descriptors)
            }
            Some(Answer::Refuse(refusal)) => (Err(refusal), vec![]),
            Some(Answer::HangUp) => break,
            Some(Answer::Silence) => continue,
            Some(Answer::Bytes(bytes)) => {
                transmit(socket, &bytes, &[]);
                continue;
            }
            Some(Answer::WrongId) => {
                id += 1;
                (Ok(ReplyBody::Done), vec![])
            }
        };
        transmit(
            socket,
            &postcard::to_stdvec(&Reply { id, result, diagnosis_id: 0 }).unwrap(),
            &descriptors,
        );
    }
    device.lock().hang_up();
}

fn welcome(socket: &OwnedFd, device: &mut Device) -> bool {
    let reply = device.hello;
    if reply.status != HelloStatus::Ok as u32 {
        transmit(socket, &reply.to_bytes(), &[]);
        return false;
    }
    let (arena, arena_fd) = Mapping::create_arena("fake", ARENA_LEN).unwrap();
    let (ours, events) = pair();
    let mut descriptors = vec![arena_fd, events];
    for worker in 0..WORKERS {
        device.scanners.push(DoorbellScanner::new(arena.clone(), worker).unwrap());
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        descriptors.push(fd.try_clone().unwrap());
        device.eventfds.push(fd);
    }
    device.events = Some(ours);
    device.arena = Some((0, arena, doorbell_offset(WORKERS)));
    transmit(socket, &reply.to_bytes(), &descriptors);
    true
}

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    let mut packet = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut packet)];
    let n = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
    let passed = ancillary.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    packet.truncate(n);
    (n > 0).then_some((packet, passed))
}

fn transmit(socket: &OwnedFd, packet: &[u8], descriptors: &[OwnedFd]) {
    let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    // Fails if the client has closed already, which is fine.
    let _ = sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL);
}
