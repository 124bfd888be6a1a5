//! Applications in the test's own process: one with what nearly every test needs of it, and the two
//! ends of a connection.
//!
//! All of this panics where the daemon refuses something or does not answer before [`DEADLINE`].

use std::ops::Deref;
use std::time::Instant;

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq, Event,
    Listener, Mr, MrOptions, Pd, Qp, QpOptions, QpType, Scope, SharedBuffer,
};

use crate::{DEADLINE, Daemon};

/// Rights of a region that its owner and his peers read and write.
pub const READ_WRITE: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE);

/// A session with a domain and a completion queue.
pub struct Client {
    /// The session.
    pub context: Context,
    /// A domain of its own, unless it asked for another one.
    pub pd: Pd,
    /// Where all its requests complete.
    pub cq: Cq,
}

impl Client {
    /// A client of this daemon, with a session of its own.
    pub fn new(daemon: &Daemon) -> Self {
        Client::of(&Context::open_at(daemon.socket()).unwrap())
    }

    /// A domain and a completion queue in a session that there is.
    pub fn of(context: &Context) -> Self {
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(256, None).unwrap();
        Client { context: context.clone(), pd, cq }
    }

    /// With a completion queue of at least so many entries.
    #[must_use]
    pub fn with_cq(self, entries: u32) -> Self {
        let cq = self.context.create_cq(entries, None).unwrap();
        Client { cq, ..self }
    }

    /// In a domain of the configuration.
    #[must_use]
    pub fn in_domain(self, name: &str) -> Self {
        let pd = self.context.open_pd(Some(name)).unwrap();
        Client { pd, ..self }
    }

    /// Options of a QP whose requests complete here.
    pub fn options(&self) -> QpOptions<'_> {
        QpOptions::new(&self.cq)
    }

    /// A QP with the default options.
    pub fn qp(&self) -> Qp {
        self.pd.create_qp(&self.options()).unwrap()
    }

    /// One of another kind, which is not connected.
    pub fn qp_of(&self, kind: QpType) -> Qp {
        self.pd.create_qp(&QpOptions { kind, ..self.options() }).unwrap()
    }

    /// A listener on a port of the loopback interface that the kernel chooses.
    pub fn listener(&self) -> Listener {
        self.listen("127.0.0.1:0")
    }

    /// A listener on this address.
    pub fn listen(&self, address: &str) -> Listener {
        self.context.listen(address, 8).unwrap()
    }

    /// Connects a QP, of this client or another one, to one of this client.
    pub fn join(&self, active: &Qp, own: &Qp) {
        join(&self.listener(), active, own);
    }

    /// New memory.
    pub fn shared_buffer(&self, len: u64) -> SharedBuffer {
        self.context.create_shared_buffer(len).unwrap()
    }

    /// A region of new memory, for all QPs of the domain.
    pub fn region(&self, len: u64, access: Access) -> Mr {
        self.region_for(Scope::Pd, len, access)
    }

    /// A region of new memory, for those peers.
    pub fn region_for(&self, scope: Scope, len: u64, access: Access) -> Mr {
        let buffer = self.shared_buffer(len);
        let options = MrOptions { access, scope, ..MrOptions::default() };
        self.pd.reg_mr_with(&buffer, .., &options).unwrap()
    }

    /// The next completion, however its request ended.
    pub fn completion(&self) -> Completion {
        self.completions(1)[0]
    }

    /// The next completion, which is a success.
    pub fn success(&self) -> Completion {
        self.completion().ok().unwrap()
    }

    /// The next completion, which is the success of this request.
    pub fn completes(&self, wr_id: u64, opcode: CompletionOpcode) -> Completion {
        let completion = self.success();
        assert_eq!((completion.wr_id, completion.opcode), (wr_id, opcode));
        completion
    }

    /// The next completions, however their requests ended.
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

    /// The next completions, which are successes.
    pub fn successes(&self, count: usize) -> Vec<Completion> {
        self.completions(count).into_iter().map(|c| c.ok().unwrap()).collect()
    }

    /// Takes what completions there are.
    pub fn drain(&self) {
        let mut some = [Completion::default(); 64];
        while self.cq.poll(&mut some).unwrap() > 0 {}
    }

    /// The next event of this kind, whatever comes before it.
    pub fn event(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let event = self.context.next_event(Some(DEADLINE)).unwrap().expect("an event");
            if wanted(&event) {
                return event;
            }
            assert!(Instant::now() < deadline, "the last one is {event:?}");
        }
    }
}

/// A client with a QP and memory: one end of a connection.
pub struct End {
    client: Client,
    /// What is connected.
    pub qp: Qp,
    /// A page that its peer may read and write.
    pub region: Mr,
}

impl End {
    /// A client with a QP of the default options.
    pub fn new(client: Client) -> Self {
        let (qp, region) = (client.qp(), client.region(4096, READ_WRITE));
        End { client, qp, region }
    }

    /// Two sessions of a daemon, connected: the one that asked and the one that accepted.
    pub fn pair(daemon: &Daemon) -> [End; 2] {
        End::joined([(); 2].map(|()| Client::new(daemon)))
    }

    /// Connects the first client to the second one.
    pub fn joined(clients: [Client; 2]) -> [End; 2] {
        let [active, passive] = clients.map(End::new);
        active.connect(&passive);
        [active, passive]
    }

    /// Connects to an end that listens for this connection alone.
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

/// Connects `active` to `passive`, which answers at `listener`, both with the default options.
pub fn join(listener: &Listener, active: &Qp, passive: &Qp) {
    active.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    request.accept(passive, &AcceptOptions::default()).unwrap();
    active.wait_connected(Some(DEADLINE)).unwrap();
}
