//! Sends messages back and forth between two processes or hosts, and checks every byte.
//!
//!     pingpong serve 0.0.0.0:7471              serves one client, then ends
//!     pingpong visit HOST:7471 SIZE COUNT      prints the times of COUNT round trips
//!
//! Exit status 0 if all data were correct. The client's private data contain the size and the
//! number of messages. The content of a message depends on its number and its sender, so the check
//! also detects lost, repeated and echoed messages.

use std::error::Error;
use std::time::{Duration, Instant};

use rnic_client::*;

/// Start of the private data. Programs with another protocol are rejected.
const MAGIC: [u8; 8] = *b"pingpong";
/// Largest message that a server accepts, in bytes.
const LARGEST: u32 = 16 << 20;
/// Time without a message after which an end gives up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Sides of a connection.
const CLIENT: u64 = 0;
const SERVER: u64 = 1;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => serve(address),
        ["visit", address, size, count] => visit(address, size.parse()?, count.parse()?),
        _ => Err("usage: pingpong serve ADDRESS | visit ADDRESS SIZE COUNT".into()),
    }
}

fn serve(address: &str) -> Result<(), Failure> {
    let context = Context::open()?;
    let listener = context.listen(address, 1)?;
    println!("listening on {}", listener.local_addr());
    let request = listener.accept_request(None)?;
    let Some((size, count)) = parse(request.private_data()).filter(|(size, _)| *size <= LARGEST)
    else {
        request.reject(b"not a pingpong client with messages of at most 16 MiB")?;
        return Err("rejected a client".into());
    };
    let end = End::new(&context, SERVER, size)?;
    request.accept(&end.qp, &AcceptOptions::default())?;
    for number in 0..count {
        end.receive(number)?;
        end.send(number)?;
    }
    println!("{count} messages of {size} bytes: {}", end.qp.wait_disconnected(Some(PATIENCE))?);
    Ok(())
}

fn visit(address: &str, size: u32, count: u64) -> Result<(), Failure> {
    let context = Context::open()?;
    let end = End::new(&context, CLIENT, size)?;
    let private_data = [&MAGIC[..], &size.to_le_bytes(), &count.to_le_bytes()].concat();
    end.qp.connect(address, &ConnectOptions { private_data, ..ConnectOptions::default() })?;
    let path = end.qp.query()?.path;
    let mut times = Vec::new();
    for number in 0..count {
        let start = Instant::now();
        end.send(number)?;
        end.receive(number)?;
        times.push(start.elapsed());
    }
    end.qp.disconnect()?;
    end.qp.wait_disconnected(Some(PATIENCE))?;
    println!("{count} round trips of {size} bytes over the {path} path, all data correct");
    times.sort();
    if let (Some(min), Some(max)) = (times.first(), times.last()) {
        println!("minimum {min:?}, median {:?}, maximum {max:?}", times[times.len() / 2]);
    }
    Ok(())
}

/// Returns the size and the number of messages.
fn parse(private_data: &[u8]) -> Option<(u32, u64)> {
    let (size, count) = private_data.strip_prefix(&MAGIC)?.split_first_chunk()?;
    Some((u32::from_le_bytes(*size), u64::from_le_bytes(count.try_into().ok()?)))
}

/// One end of the connection, with one message of memory for each direction.
struct End {
    qp: Qp,
    cq: Cq,
    inbox: Mr,
    outbox: Mr,
    side: u64,
    size: u32,
}

impl End {
    /// Creates an end with a posted receive, because the peer may send as soon as it is connected.
    fn new(context: &Context, side: u64, size: u32) -> Result<End, Failure> {
        let pd = context.open_pd(None)?;
        let cq = context.create_cq(16, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let memory = || -> Result<Mr, rnic_client::Error> {
            let buffer = context.create_shared_buffer(u64::from(size.max(1)))?;
            pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)
        };
        let inbox = memory()?;
        let outbox = memory()?;
        let end = End { qp, cq, inbox, outbox, side, size };
        end.post_receive()?;
        Ok(end)
    }

    fn post_receive(&self) -> Result<(), PostError> {
        self.qp.post_recv(&[RecvRequest::new(0, &[self.inbox.sge(0, self.size)])])
    }

    /// Sends a message, unsignaled: the reply shows that it has arrived.
    fn send(&self, number: u64) -> Result<(), Failure> {
        self.outbox.write_at(0, &content(self.size, number, self.side))?;
        let message = [self.outbox.sge(0, self.size)];
        Ok(self.qp.post_send(&[SendRequest::send(0, &message)])?)
    }

    /// Waits for the message of the other side and checks it. Posts the receive again, before the
    /// caller replies.
    fn receive(&self, number: u64) -> Result<(), Failure> {
        let mut completions = [Completion::default()];
        if self.cq.wait(&mut completions, Some(PATIENCE))? == 0 {
            return Err(format!("message {number} did not arrive").into());
        }
        let Ok(completion) = completions[0].ok() else {
            // The request failed because the connection has ended.
            return Err(self.qp.wait_disconnected(Some(PATIENCE))?.to_string().into());
        };
        let mut found = vec![0; completion.byte_len as usize];
        self.inbox.read_at(0, &mut found)?;
        if found != content(self.size, number, 1 - self.side) {
            return Err(format!("message {number} is damaged").into());
        }
        Ok(self.post_receive()?)
    }
}

/// Returns the content of a message from this side.
fn content(size: u32, number: u64, side: u64) -> Vec<u8> {
    let start = number.wrapping_mul(2) + side;
    (start..start + u64::from(size)).map(|n| n.wrapping_mul(n) as u8).collect()
}
