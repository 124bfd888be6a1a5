//! One end of a connection that a test drives directly, to send messages that no program would.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq, Error,
    Listener, Mr, Pd, Qp, QpOptions, RecvRequest, RemoteAddr, SendRequest,
};
use rnic_tests::{DEADLINE, Daemon};

/// A QP with posted receives, and buffers for messages.
pub struct Talker {
    pub context: Context,
    pub pd: Pd,
    pub qp: Qp,
    cq: Cq,
    inbox: Mr,
    outbox: Mr,
    /// Number of bytes of the outbox used so far.
    used: AtomicU64,
}

/// Number of posted receives, and the size of each in bytes.
const RECEIVES: u64 = 32;
const PLACE: u64 = 4096;
/// Maximum number of bytes that a talker can send in total.
const OUTBOX: u64 = 4 << 20;

impl Talker {
    pub fn new(daemon: &Daemon) -> Talker {
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(256, None).unwrap();
        let options = QpOptions { rq_depth: RECEIVES as u32, ..QpOptions::new(&cq) };
        let qp = pd.create_qp(&options).unwrap();
        let memory = |bytes| {
            let buffer = context.create_shared_buffer(bytes).unwrap();
            pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap()
        };
        let inbox = memory(RECEIVES * PLACE);
        let outbox = memory(OUTBOX);
        let talker = Talker { context, pd, qp, cq, inbox, outbox, used: AtomicU64::new(0) };
        (0..RECEIVES).for_each(|place| talker.post(place));
        talker
    }

    /// Connects with this private data. Returns the private data of the reply.
    pub fn connect(&self, to: SocketAddr, private_data: &[u8]) -> Result<Vec<u8>, Error> {
        let private_data = private_data.to_vec();
        let options = ConnectOptions { private_data, ..ConnectOptions::default() };
        self.qp.connect(to, &options).map(|connected| connected.private_data)
    }

    /// Accepts the next connection with this private data. Returns the private data of the request.
    pub fn accept(&self, listener: &Listener, private_data: &[u8]) -> Vec<u8> {
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        let asked = request.private_data().to_vec();
        let private_data = private_data.to_vec();
        let options = AcceptOptions { private_data, ..AcceptOptions::default() };
        request.start_accept(&self.qp, &options).unwrap();
        asked
    }

    /// Listens on a free port.
    pub fn listen(&self) -> Listener {
        self.context.listen("127.0.0.1:0", 4).unwrap()
    }

    /// Sends a message.
    pub fn send_message(&self, message: &[u8]) {
        let sge = [self.outbox.sge(self.put(message), message.len() as u32)];
        self.qp.post_send(&[SendRequest::send(SENT, &sge)]).unwrap();
    }

    /// Writes into the memory of the other end.
    pub fn write(&self, to: RemoteAddr, bytes: &[u8]) {
        let sge = [self.outbox.sge(self.put(bytes), bytes.len() as u32)];
        self.qp.post_send(&[SendRequest::write(SENT, &sge, to)]).unwrap();
    }

    /// Waits for the next message. Returns `None` if the connection has ended.
    pub fn next_message(&self) -> Option<Vec<u8>> {
        loop {
            let mut one = [Completion::default()];
            let n = self.cq.wait(&mut one, Some(DEADLINE)).unwrap();
            assert_eq!(n, 1, "no message at the deadline");
            let completion = one[0].ok().ok()?;
            if completion.opcode == CompletionOpcode::Receive {
                let mut message = vec![0; completion.byte_len as usize];
                self.inbox.read_at(completion.wr_id * PLACE, &mut message).unwrap();
                self.post(completion.wr_id);
                return Some(message);
            }
        }
    }

    fn put(&self, bytes: &[u8]) -> u64 {
        let len = (bytes.len() as u64).next_multiple_of(64);
        let at = self.used.fetch_add(len, Ordering::Relaxed);
        self.outbox.write_at(at, bytes).unwrap();
        at
    }

    fn post(&self, place: u64) {
        let sge = [self.inbox.sge(place * PLACE, PLACE as u32)];
        // Fails after the end of the connection, which `next_message` reports.
        let _ = self.qp.post_recv(&[RecvRequest::new(place, &sge)]);
    }
}

const SENT: u64 = u64::MAX;
