//! Two sessions of one daemon whose QPs talk to each other: the holder has memory, the visitor
//! reaches for it.

use rnic_client::{
    Access, CompletionStatus, DisconnectReason, Mr, MrOptions, Pd, Qp, RecvRequest, RemoteAddr,
    Scope, SendRequest, TerminateCode,
};
use rnic_tests::{Client, DEADLINE, Daemon};

/// Bytes of a region.
pub const LEN: usize = 4096;
/// What the holder's memory holds as long as nobody writes to it.
pub const UNTOUCHED: u8 = 0xA5;
/// What a visitor writes.
pub const MARK: u8 = 0x5A;

/// A region of a page with known contents.
pub fn page(client: &Client, access: Access) -> Mr {
    page_in(client, &client.pd, access, Scope::Pd)
}

/// As [`page`], in a domain of the client's and for those peers.
pub fn page_in(client: &Client, pd: &Pd, access: Access, scope: Scope) -> Mr {
    let buffer = client.context.create_shared_buffer(LEN as u64).unwrap();
    let options = MrOptions { access, scope, ..MrOptions::default() };
    let region = pd.reg_mr_with(&buffer, .., &options).unwrap();
    region.fill(0, LEN, UNTOUCHED).unwrap();
    region
}

/// A holder and a visitor.
pub struct Pair {
    pub holder: Client,
    pub visitor: Client,
    source: Mr,
    sink: Mr,
}

/// What came of reaching for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The stream was ended with this Terminate, as both ends were told.
    Terminated([u8; 3]),
}

impl Pair {
    pub fn new(daemon: &Daemon) -> Self {
        let (holder, visitor) = (Client::new(daemon), Client::new(daemon));
        let source = page(&visitor, Access::LOCAL_WRITE);
        source.fill(0, LEN, MARK).unwrap();
        let sink = page(&visitor, Access::LOCAL_WRITE);
        Pair { holder, visitor, source, sink }
    }

    /// A connection between new QPs: the holder's, the visitor's.
    pub fn connected(&self) -> (Qp, Qp) {
        let ends = (self.holder.qp(), self.visitor.qp());
        self.holder.join(&ends.1, &ends.0);
        ends
    }

    /// Has the visitor write `len` bytes, and waits until it is known what came of it.
    pub fn write(&self, ends: &(Qp, Qp), to: RemoteAddr, len: u32) -> Outcome {
        let sges = [self.source.sge(0, len)];
        // A Send behind the Write arrives when the Write has been placed.
        let send = SendRequest::send_inline(2, b"").signaled();
        ends.0.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
        ends.1.post_send(&[SendRequest::write(1, &sges, to), send]).unwrap();
        self.outcome(ends)
    }

    /// Has the visitor read `len` bytes.
    pub fn read(&self, ends: &(Qp, Qp), from: RemoteAddr, len: u32) -> Outcome {
        let read = SendRequest::read(1, self.sink.sge(0, len), from);
        let send = SendRequest::send_inline(2, b"").fence().signaled();
        ends.0.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
        ends.1.post_send(&[read, send]).unwrap();
        self.outcome(ends)
    }

    /// What the visitor has read.
    pub fn read_bytes(&self, len: usize) -> Vec<u8> {
        bytes(&self.sink, 0, len)
    }

    /// What the holder's receive and its QP say, and that the visitor was told the same.
    fn outcome(&self, ends: &(Qp, Qp)) -> Outcome {
        let receive = self.holder.completion();
        assert_eq!(receive.wr_id, 3);
        if receive.status == CompletionStatus::Success {
            assert_eq!(self.visitor.completion().ok().unwrap().wr_id, 2);
            return Outcome::Done;
        }
        assert_eq!(receive.status, CompletionStatus::WrFlush);
        let code = terminated(&ends.0);
        assert_eq!(terminated(&ends.1), code, "the ends were told different things");
        self.visitor.drain();
        self.holder.drain();
        Outcome::Terminated(code)
    }
}

/// The Terminate that ended a QP's stream.
pub fn terminated(qp: &Qp) -> [u8; 3] {
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { code: TerminateCode { layer, etype, code }, .. } => {
            [layer, etype, code]
        }
        other => panic!("ended otherwise: {other:?}"),
    }
}

pub fn bytes(region: &Mr, from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(from, &mut bytes).unwrap();
    bytes
}

/// Whether no byte of a region has changed.
pub fn is_untouched(region: &Mr) -> bool {
    bytes(region, 0, LEN).iter().all(|byte| *byte == UNTOUCHED)
}
