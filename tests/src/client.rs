//! Applications in the test's own process: a session with common objects, and the two ends of a
//! connection.
//!
//! All methods panic if the daemon refuses a request or does not answer before [`DEADLINE`].

use std::ops::Deref;
use std::time::Instant;

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq, Event,
    Listener, Mr, MrOptions, Pd, Qp, QpOptions, QpType, Scope, SharedBuffer,
};

use crate::{DEADLINE, Daemon};

/// Access rights of a region that its owner and peers read and write.
pub const READ_WRITE: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE);

/// A session with a domain and a completion queue.
pub struct Client {
    /// The session.
    pub context: Context,
    /// The protection domain, private unless [`Client::in_domain`] was called.
    pub pd: Pd,
    /// The completion queue of all requests.
    pub cq: Cq,
}

impl Client {
    /// Opens a new session with this daemon.
    pub fn new(daemon: &Daemon) -> Self {
        Client::of(&Context::open_at(daemon.socket()).unwrap())
    }

    /// Creates a domain and a completion queue in an existing session.
    pub fn of(context: &Context) -> Self {
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(256, None).unwrap();
        Client { context: context.clone(), pd, cq }
    }

    /// Replaces the completion queue with a queue of at least `entries` entries.
    #[must_use]
    pub fn with_cq(self, entries: u32) -> Self {
        let cq = self.context.create_cq(entries, None).unwrap();
        Client { cq, ..self }
    }

    /// Replaces the domain with a configured one.
    #[must_use]
    pub fn in_domain(self, name: &str) -> Self {
        let pd = self.context.open_pd(Some(name)).unwrap();
        Client { pd, ..self }
    }

    /// Returns QP options with this client's completion queue.
    pub fn options(&self) -> QpOptions<'_> {
        QpOptions::new(&self.cq)
    }

    /// Creates a QP with default options.
    pub fn qp(&self) -> Qp {
        self.pd.create_qp(&self.options()).unwrap()
    }

    /// Creates an unconnected QP of the given type.
    pub fn qp_of(&self, kind: QpType) -> Qp {
        self.pd.create_qp(&QpOptions { kind, ..self.options() }).unwrap()
    }

    /// Listens on a loopback port that the kernel chooses.
    pub fn listener(&self) -> Listener {
        self.listen("127.0.0.1:0")
    }

    /// Listens on this address.
    pub fn listen(&self, address: &str) -> Listener {
        self.context.listen(address, 8).unwrap()
    }

    /// Connects `active`, which may belong to another client, to a QP of this client.
    pub fn join(&self, active: &Qp, own: &Qp) {
        join(&self.listener(), active, own);
    }

    /// Connects two new QPs of this client to each other. Returns the active one first.
    pub fn pair(&self) -> [Qp; 2] {
        let [active, passive] = [(); 2].map(|()| self.qp());
        self.join(&active, &passive);
        [active, passive]
    }

    /// Creates a shared buffer of new memory.
    pub fn shared_buffer(&self, len: u64) -> SharedBuffer {
        self.context.create_shared_buffer(len).unwrap()
    }

    /// Registers new memory for all QPs of the domain.
    pub fn region(&self, len: u64, access: Access) -> Mr {
        self.region_for(Scope::Pd, len, access)
    }

    /// Registers new memory for the peers in `scope`.
    pub fn region_for(&self, scope: Scope, len: u64, access: Access) -> Mr {
        let buffer = self.shared_buffer(len);
        let options = MrOptions { access, scope, ..MrOptions::default() };
        self.pd.reg_mr_with(&buffer, .., &options).unwrap()
    }

    /// Waits for the next completion, successful or not.
    pub fn completion(&self) -> Completion {
        self.completions(1)[0]
    }

    /// Waits for the next completion, which must be successful.
    pub fn success(&self) -> Completion {
        self.completion().ok().unwrap()
    }

    /// Waits for the next completion, which must be successful and belong to this request.
    pub fn completes(&self, wr_id: u64, opcode: CompletionOpcode) -> Completion {
        let completion = self.success();
        assert_eq!((completion.wr_id, completion.opcode), (wr_id, opcode));
        completion
    }

    /// Waits for the next `count` completions, successful or not.
    pub fn completions(&self, count: usize) -> Vec<Completion> {
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            let mut some = [Completion::default(); 64];
            let most = some.len().min(count - all.len());
            let taken = self.cq.wait(&mut some[..most], Some(DEADLINE)).unwrap();
            assert_ne!(taken, 0, "{} of {count} completions: {all:?}", all.len());
            all.extend(&some[..taken]);
        }
        all
    }

    /// Waits for the next `count` completions, which must be successful.
    pub fn successes(&self, count: usize) -> Vec<Completion> {
        self.completions(count).into_iter().map(|c| c.ok().unwrap()).collect()
    }

    /// Discards all pending completions.
    pub fn drain(&self) {
        let mut some = [Completion::default(); 64];
        while self.cq.poll(&mut some).unwrap() > 0 {}
    }

    /// Waits for the next event that matches `wanted` and discards the events before it.
    pub fn event(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let event = self.context.next_event(Some(DEADLINE)).unwrap().expect("an event");
            if wanted(&event) {
                return event;
            }
            assert!(Instant::now() < deadline, "no such event in time; the last was {event:?}");
        }
    }
}

/// A client with a QP and memory: one end of a connection.
pub struct End {
    client: Client,
    /// The connected QP.
    pub qp: Qp,
    /// A region of 4096 bytes that the peer may read and write.
    pub region: Mr,
}

impl End {
    /// Creates a QP with default options and a region.
    pub fn new(client: Client) -> Self {
        let qp = client.qp();
        let region = client.region(4096, READ_WRITE);
        End { client, qp, region }
    }

    /// Connects two new sessions of a daemon. Returns the active end, then the passive one.
    pub fn pair(daemon: &Daemon) -> [End; 2] {
        End::joined([(); 2].map(|()| Client::new(daemon)))
    }

    /// Connects the first client to the second one.
    pub fn joined(clients: [Client; 2]) -> [End; 2] {
        let [active, passive] = clients.map(End::new);
        active.connect(&passive);
        [active, passive]
    }

    /// Connects to an end, which listens for this connection only.
    pub fn connect(&self, passive: &End) {
        passive.join(&self.qp, &passive.qp);
    }
}

impl Deref for End {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// Connects `active` to `passive` through `listener`, both with default options.
pub fn join(listener: &Listener, active: &Qp, passive: &Qp) {
    active.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    request.accept(passive, &AcceptOptions::default()).unwrap();
    active.wait_connected(Some(DEADLINE)).unwrap();
}
