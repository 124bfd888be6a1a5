//! A client as the target of scripted peers, and clients that the peers must not disturb.

use std::net::TcpStream;
use std::ops::Deref;

use rnic_client::{AcceptOptions, Access, CompletionStatus, Listener, Mr, Qp, RecvRequest};

use crate::wire::{self, CRC, fpdu, tagged};
use crate::{Client, DEADLINE, Daemon, Process};

/// Initial fill of the target's region.
pub const UNTOUCHED: u8 = 0xA5;
/// Length of the region in bytes.
pub const LEN: usize = 4096;

/// A client with a region as the target and a listener for its attackers.
pub struct Target {
    /// Listener for the peers.
    pub listener: Listener,
    /// The target region of [`LEN`] bytes, with remote write access.
    pub region: Mr,
    /// Buffer for incoming Sends.
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
    /// Opens a client of this daemon.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let region = client.region(LEN as u64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        region.fill(0, LEN, UNTOUCHED).expect("the daemon serves");
        let inbox = client.region(4096, Access::LOCAL_WRITE);
        let listener = client.context.listen("127.0.0.1:0", 64);
        Target { listener: listener.expect("the daemon serves"), region, inbox, client }
    }

    /// Connects a scripted peer and accepts it with a QP that has two receives.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn connected(&self) -> (TcpStream, Qp) {
        let mut peer = wire::dial(self.listener.local_addr());
        wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
        let qp = self.accept();
        wire::reply(&mut peer);
        (peer, qp)
    }

    /// Accepts the next request with a QP that has two receives.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn accept(&self) -> Qp {
        let request = self.listener.accept_request(Some(DEADLINE)).expect("the daemon serves");
        let qp = self.qp();
        let sges = [self.inbox.sge(0, 64)];
        qp.post_recv(&[RecvRequest::new(1, &sges), RecvRequest::new(2, &sges)])
            .expect("the daemon serves");
        request.start_accept(&qp, &AcceptOptions::default()).expect("the daemon serves");
        qp
    }

    /// Like [`Target::connected`], after the peer's first message has arrived.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn open(&self) -> (TcpStream, Qp) {
        let (mut peer, qp) = self.connected();
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, 0, 0, b"")));
        qp.wait_connected(Some(DEADLINE)).expect("the daemon serves");
        (peer, qp)
    }

    /// Returns a Write of `payload` at this offset of the region.
    pub fn write(&self, offset: u64, payload: &[u8]) -> Vec<u8> {
        tagged(0, self.region.rkey().0, self.region.iova() + offset, payload)
    }

    /// Returns the contents of the region.
    ///
    /// # Panics
    ///
    /// If the region cannot be read.
    pub fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.region.read_at(0, &mut bytes).expect("the daemon serves");
        bytes
    }

    /// Returns true if the region has its initial contents.
    pub fn is_untouched(&self) -> bool {
        self.memory().iter().all(|byte| *byte == UNTOUCHED)
    }

    /// Waits for `n` completions of receives, which must all be flushed.
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

/// Two processes with traffic that peers must not disturb.
pub struct Bystanders {
    server: Process,
    guest: Process,
}

impl Bystanders {
    /// Starts both processes and waits until their traffic flows.
    pub fn start(daemon: &Daemon) -> Self {
        let mut server = daemon.actor(&["serve"]);
        let address = server.line_after("listening on ");
        let mut guest = daemon.actor(&["traffic", &address, "7"]);
        guest.line_after("under way");
        Bystanders { server, guest }
    }

    /// Ends both processes.
    ///
    /// # Panics
    ///
    /// If their traffic was disturbed.
    pub fn were_not_disturbed(self) {
        let Bystanders { mut server, mut guest } = self;
        guest.release();
        let lines = guest.succeed();
        let rounds = lines.iter().find_map(|l| l.strip_suffix(" rounds"));
        assert!(rounds.is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n > 1)), "{lines:?}");
        server.line_after("ended after ");
        server.release();
        server.succeed();
    }
}
