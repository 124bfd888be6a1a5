//! Two sessions of one daemon with connected QPs: the holder owns memory, the visitor accesses it.

use rnic_client::{
    Access, CompletionStatus, DisconnectReason, Mr, MrOptions, Pd, Qp, RecvRequest, RemoteAddr,
    Scope, SendRequest, TerminateCode,
};
use rnic_tests::{Client, DEADLINE, Daemon};

/// Length of a region in bytes.
pub const LEN: usize = 4096;
/// Contents of the holder's memory until the first write.
pub const UNTOUCHED: u8 = 0xA5;
/// Byte that the visitor writes.
pub const MARK: u8 = 0x5A;

/// Registers a region of one page with known contents.
pub fn page(client: &Client, access: Access) -> Mr {
    page_in(client, &client.pd, access, Scope::Pd)
}

/// Like [`page`], in another domain of the client and with this scope.
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

/// Outcome of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The stream was ended with this Terminate, and both ends reported it.
    Terminated([u8; 3]),
}

impl Pair {
    pub fn new(daemon: &Daemon) -> Self {
        let holder = Client::new(daemon);
        let visitor = Client::new(daemon);
        let source = page(&visitor, Access::LOCAL_WRITE);
        source.fill(0, LEN, MARK).unwrap();
        let sink = page(&visitor, Access::LOCAL_WRITE);
        Pair { holder, visitor, source, sink }
    }

    /// Connects two new QPs, of the holder and the visitor.
    pub fn connected(&self) -> (Qp, Qp) {
        let ends = (self.holder.qp(), self.visitor.qp());
        self.holder.join(&ends.1, &ends.0);
        ends
    }

    /// Lets the visitor write `len` bytes, and returns the outcome.
    pub fn write(&self, ends: &(Qp, Qp), to: RemoteAddr, len: u32) -> Outcome {
        let sges = [self.source.sge(0, len)];
        // A Send after the Write arrives when the Write has been placed.
        let send = SendRequest::send_inline(2, b"").signaled();
        ends.0.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
        ends.1.post_send(&[SendRequest::write(1, &sges, to), send]).unwrap();
        self.outcome(ends)
    }

    /// Lets the visitor read `len` bytes, and returns the outcome.
    pub fn read(&self, ends: &(Qp, Qp), from: RemoteAddr, len: u32) -> Outcome {
        let read = SendRequest::read(1, self.sink.sge(0, len), from);
        let send = SendRequest::send_inline(2, b"").fence().signaled();
        ends.0.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
        ends.1.post_send(&[read, send]).unwrap();
        self.outcome(ends)
    }

    /// Returns the bytes that the visitor has read.
    pub fn read_bytes(&self, len: usize) -> Vec<u8> {
        bytes(&self.sink, 0, len)
    }

    /// Returns the outcome of the holder's receive and QP, which must match the visitor's.
    fn outcome(&self, ends: &(Qp, Qp)) -> Outcome {
        let receive = self.holder.completion();
        assert_eq!(receive.wr_id, 3);
        if receive.status == CompletionStatus::Success {
            assert_eq!(self.visitor.completion().ok().unwrap().wr_id, 2);
            return Outcome::Done;
        }
        assert_eq!(receive.status, CompletionStatus::WrFlush);
        let code = terminated(&ends.0);
        assert_eq!(terminated(&ends.1), code, "the ends report different codes");
        self.visitor.drain();
        self.holder.drain();
        Outcome::Terminated(code)
    }
}

/// Returns the layer, error type and error code of the Terminate that ended a QP's stream.
pub fn terminated(qp: &Qp) -> [u8; 3] {
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { code: TerminateCode { layer, etype, code }, .. } => {
            [layer, etype, code]
        }
        other => panic!("not a Terminate: {other:?}"),
    }
}

pub fn bytes(region: &Mr, from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(from, &mut bytes).unwrap();
    bytes
}

/// Returns true if no byte of a region has changed.
pub fn is_untouched(region: &Mr) -> bool {
    bytes(region, 0, LEN).iter().all(|byte| *byte == UNTOUCHED)
}
