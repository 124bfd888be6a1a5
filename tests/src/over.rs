//! Two ends that connect over TCP themselves, exchange plain bytes, and then pass both sockets to
//! the daemon, as clients outside the daemon's network namespace must do.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq,
    DisconnectReason, Error, Mr, Qp, QpOptions, RecvRequest, RemoteMr, SendRequest,
};

use crate::DEADLINE;
use crate::traffic::{Failure, Rng};

/// Number of bytes written through the connection, and of plain bytes in each direction.
const LEN: usize = 1 << 20;

/// One end: a QP and a region for data.
struct End {
    qp: Qp,
    cq: Cq,
    region: Mr,
}

impl End {
    fn new(context: &Context) -> Result<Self, Failure> {
        let pd = context.open_pd(None)?;
        let cq = context.create_cq(16, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let buffer = context.create_shared_buffer(LEN as u64)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        qp.post_recv(&[RecvRequest::new(1, &[])])?;
        Ok(End { qp, cq, region })
    }

    fn completes(&self, opcode: CompletionOpcode) -> Result<(), Failure> {
        let mut one = [Completion::default()];
        match self.cq.wait(&mut one, Some(DEADLINE))? {
            0 => Err("no completion in time".into()),
            _ if one[0].ok()?.opcode == opcode => Ok(()),
            _ => Err(format!("{:?} instead of {opcode:?}", one[0]).into()),
        }
    }
}

/// Exchanges seeded bytes in both directions at once over plain TCP.
fn exchange_plain_bytes(stream: &TcpStream, ours: u64, theirs: u64) -> Result<(), Failure> {
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut out = vec![0; LEN];
    let mut expected = vec![0; LEN];
    let mut found = vec![0; LEN];
    Rng::new(ours).fill(&mut out);
    Rng::new(theirs).fill(&mut expected);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let mut stream = stream;
            stream.write_all(&out)
        });
        (&mut &*stream).read_exact(&mut found)?;
        writing.join().map_err(|_| "the writer panicked")??;
        if found == expected { Ok(()) } else { Err("plain bytes differ".into()) }
    })
}

/// The connecting end: is rejected once, returns to plain TCP, connects again and writes.
fn initiate(context: &Context, stream: TcpStream) -> Result<(), Failure> {
    let end = End::new(context)?;
    exchange_plain_bytes(&stream, 1, 2)?;
    let private_data = b"first".to_vec();
    let options = ConnectOptions { private_data, ..ConnectOptions::default() };
    let Err(refused) = end.qp.connect_over(stream, &options) else {
        return Err("the request was not rejected".into());
    };
    match &refused.error {
        Error::Rejected { private_data } if private_data == b"later" => {}
        other => return Err(format!("not rejected but {other}").into()),
    }
    let stream = refused.stream.ok_or("the socket was not returned")?;
    exchange_plain_bytes(&stream, 3, 4)?;
    let connected = end.qp.connect_over(stream, &ConnectOptions::default())?;
    let theirs = RemoteMr::from_bytes(&connected.private_data)
        .ok_or("the private data contains no region")?;
    let mut bytes = vec![0; LEN];
    Rng::new(5).fill(&mut bytes);
    end.region.write_at(0, &bytes)?;
    let sges = [end.region.sge(0, LEN as u32)];
    end.qp.post_send(&[
        SendRequest::write(2, &sges, theirs.at(0)),
        SendRequest::send_inline(3, b"").signaled(),
    ])?;
    end.completes(CompletionOpcode::Send)?;
    end.completes(CompletionOpcode::Receive)?;
    end.qp.disconnect()?;
    ended(&end.qp)
}

/// The accepting end: rejects the first request and accepts the second.
fn respond(context: &Context, stream: TcpStream) -> Result<(), Failure> {
    let end = End::new(context)?;
    exchange_plain_bytes(&stream, 2, 1)?;
    let request = context.serve_over(stream)?.accept_request(Some(DEADLINE))?;
    if request.request().private_data() != b"first" {
        return Err(format!("private data {:?}", request.request().private_data()).into());
    }
    // The next plain bytes follow the MPA Reply directly.
    let stream = request.reject(b"later")?;
    exchange_plain_bytes(&stream, 4, 3)?;
    let request = context.serve_over(stream)?.accept_request(Some(DEADLINE))?;
    let private_data = end.region.remote().to_bytes().to_vec();
    request.accept(&end.qp, &AcceptOptions { private_data, ..AcceptOptions::default() })?;
    end.completes(CompletionOpcode::Receive)?;
    let mut expected = vec![0; LEN];
    let mut found = vec![0; LEN];
    Rng::new(5).fill(&mut expected);
    end.region.read_at(0, &mut found)?;
    if found != expected {
        return Err("written bytes differ".into());
    }
    if end.qp.query()?.path != "tcp" {
        return Err("the connection does not use the socket".into());
    }
    end.qp.post_send(&[SendRequest::send_inline(4, b"").signaled()])?;
    end.completes(CompletionOpcode::Send)?;
    ended(&end.qp)
}

fn ended(qp: &Qp) -> Result<(), Failure> {
    match qp.wait_disconnected(Some(DEADLINE))? {
        DisconnectReason::Orderly => Ok(()),
        other => Err(format!("ended by {other:?}").into()),
    }
}

/// Plays both ends over a connection in this process's network namespace.
pub fn play(initiator: &Context, responder: &Context) -> Result<(), Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let active = TcpStream::connect(listener.local_addr()?)?;
    let (passive, _) = listener.accept()?;
    std::thread::scope(|scope| {
        let responding = scope.spawn(move || respond(responder, passive));
        let initiated = initiate(initiator, active);
        let responded = responding.join().map_err(|_| "the responder panicked")?;
        initiated.map_err(|e| format!("initiator: {e}"))?;
        responded.map_err(|e| format!("responder: {e}").into())
    })
}
