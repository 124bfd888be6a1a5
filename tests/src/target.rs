//! A client for scripted peers to aim at, and clients whom nobody may disturb.

use std::net::TcpStream;
use std::ops::Deref;

use rnic_client::{AcceptOptions, Access, CompletionStatus, Listener, Mr, Qp, RecvRequest};

use crate::wire::{self, CRC, fpdu, tagged};
use crate::{Client, DEADLINE, Daemon, Process};

/// What the target's region holds as long as nobody has written to it.
pub const UNTOUCHED: u8 = 0xA5;
/// Bytes of the region.
pub const LEN: usize = 4096;

/// A client whose region is aimed at, and a listener for those who aim.
pub struct Target {
    /// Where peers connect to.
    pub listener: Listener,
    /// What they aim at; [`LEN`] bytes that they may write.
    pub region: Mr,
    /// Where their Sends go.
    pub inbox: Mr,
    client: Client,
}

impl Deref for Target {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Target {
    /// A client of this daemon.
    ///
    /// # Panics
    ///
    /// If the daemon does not serve.
    pub fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let region = client.region(LEN as u64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        region.fill(0, LEN, UNTOUCHED).expect("the daemon serves");
        let inbox = client.region(4096, Access::LOCAL_WRITE);
        let listener = client.context.listen("127.0.0.1:0", 64);
        Target { listener: listener.expect("the daemon serves"), region, inbox, client }
    }

    /// A peer whose request has been accepted with a QP that has two receives.
    ///
    /// # Panics
    ///
    /// If the daemon does not serve.
    pub fn connected(&self) -> (TcpStream, Qp) {
        let mut peer = wire::dial(self.listener.local_addr());
        wire::say(&mut peer, &wire::request(CRC, 1, b""));
        let qp = self.accept();
        wire::reply(&mut peer);
        (peer, qp)
    }

    /// Accepts the next request with a QP that has two receives.
    ///
    /// # Panics
    ///
    /// If the daemon does not serve.
    pub fn accept(&self) -> Qp {
        let request = self.listener.accept_request(Some(DEADLINE)).expect("the daemon serves");
        let qp = self.qp();
        let sges = [self.inbox.sge(0, 64)];
        qp.post_recv(&[RecvRequest::new(1, &sges), RecvRequest::new(2, &sges)])
            .expect("the daemon serves");
        request.start_accept(&qp, &AcceptOptions::default()).expect("the daemon serves");
        qp
    }

    /// A peer whose first message has arrived.
    ///
    /// # Panics
    ///
    /// If the daemon does not serve.
    pub fn open(&self) -> (TcpStream, Qp) {
        let (mut peer, qp) = self.connected();
        wire::say(&mut peer, &fpdu(&tagged(0, 0, 0, b"")));
        qp.wait_connected(Some(DEADLINE)).expect("the daemon serves");
        (peer, qp)
    }

    /// A Write of these bytes to this place of the region.
    pub fn write(&self, offset: u64, payload: &[u8]) -> Vec<u8> {
        tagged(0, self.region.rkey().0, self.region.iova() + offset, payload)
    }

    /// What the region holds.
    ///
    /// # Panics
    ///
    /// If the daemon does not serve.
    pub fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.region.read_at(0, &mut bytes).expect("the daemon serves");
        bytes
    }

    /// Whether nobody has written to it.
    pub fn is_untouched(&self) -> bool {
        self.memory().iter().all(|byte| *byte == UNTOUCHED)
    }

    /// Completions of the receives of a connection that is gone: all of them, each flushed.
    ///
    /// # Panics
    ///
    /// If they are not.
    pub fn flushed(&self, n: usize) {
        for completion in self.completions(n) {
            assert_eq!(completion.status, CompletionStatus::WrFlush, "{completion:?}");
        }
    }
}

/// Two processes whose traffic nobody may disturb.
pub struct Bystanders {
    server: Process,
    visitor: Process,
}

impl Bystanders {
    /// Starts them and waits until they are under way.
    pub fn start(daemon: &Daemon) -> Self {
        let mut server = daemon.actor(&["serve"]);
        let address = server.line_after("listening on ");
        let mut visitor = daemon.actor(&["traffic", &address, "7"]);
        visitor.line_after("under way");
        Bystanders { server, visitor }
    }

    /// Ends them.
    ///
    /// # Panics
    ///
    /// If they were disturbed.
    pub fn were_not_disturbed(self) {
        let Bystanders { mut server, mut visitor } = self;
        visitor.release();
        let lines = visitor.succeed();
        let rounds = lines.iter().find_map(|l| l.strip_suffix(" rounds"));
        assert!(rounds.is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n > 1)), "{lines:?}");
        server.line_after("ended after ");
        server.release();
        server.succeed();
    }
}
