//! A key-value store in about a hundred lines. Gets bypass the server's program.
//!
//!     kv serve 127.0.0.1:0             serves until the process ends
//!     kv put 127.0.0.1:PORT KEY VALUE
//!     kv get 127.0.0.1:PORT KEY        exit status 1 if there is no such key
//!
//! The table is a registered region that peers may read. A get reads the slot of its key with one
//! RDMA Read. A put is a Send, which the server stores and acknowledges.

use std::error::Error;

use rnic_client::*;

/// Length of the key at the start of a slot, in bytes, zero-padded.
const KEY: usize = 32;
/// Length of a slot in bytes: a key and a value, both zero-padded.
const SLOT: usize = 128;
/// Number of slots. A key replaces any other key with the same hash.
const SLOTS: usize = 1024;

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => serve(address),
        ["put", address, key, value] => Client::connect(address)?.put(key, value),
        ["get", address, key] => {
            let value = Client::connect(address)?.get(key)?.ok_or("no such key")?;
            println!("{value}");
            Ok(())
        }
        _ => Err("usage: kv serve ADDRESS | put ADDRESS KEY VALUE | get ADDRESS KEY".into()),
    }
}

fn serve(address: &str) -> Result<(), Failure> {
    let context = Context::open()?;
    let pd = context.open_pd(None)?;
    let memory = context.create_shared_buffer((SLOTS * SLOT) as u64)?;
    let table = pd.reg_mr(&memory, .., Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let listener = context.listen(address, 16)?;
    println!("listening on {}", listener.local_addr());
    loop {
        let request = listener.accept_request(None)?;
        // A client that fails ends only its own connection.
        if let Err(error) = serve_one(&context, &pd, &table, request) {
            eprintln!("{error}");
        }
    }
}

/// Serves one client until it disconnects. The reply's private data describe the table.
fn serve_one(
    context: &Context,
    pd: &Pd,
    table: &Mr,
    request: ConnectionRequest,
) -> Result<(), Failure> {
    let cq = context.create_cq(16, None)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let memory = context.create_shared_buffer(SLOT as u64)?;
    let inbox = pd.reg_mr(&memory, .., Access::LOCAL_WRITE)?;
    let receive = [inbox.sge(0, SLOT as u32)];
    qp.post_recv(&[RecvRequest::new(0, &receive)])?;
    let private_data = table.remote().to_bytes().to_vec();
    request.accept(&qp, &AcceptOptions { private_data, ..AcceptOptions::default() })?;
    // The client's disconnect flushes the receive, which completes unsuccessfully.
    std::thread::scope(|scope| {
        scope.spawn(|| qp.wait_disconnected(None));
        for completion in cq.completions_iter() {
            let Ok(completion) = completion?.ok() else { break };
            if completion.opcode == CompletionOpcode::Receive {
                let mut slot = [0; SLOT];
                inbox.read_at(0, &mut slot)?;
                table.write_at(offset_of(&slot[..KEY]), &slot)?;
                qp.post_recv(&[RecvRequest::new(0, &receive)])?;
                qp.post_send(&[SendRequest::send_inline(0, b"stored")])?;
            }
        }
        Ok(())
    })
}

struct Client {
    qp: Qp,
    cq: Cq,
    slot: Mr,
    table: RemoteMr,
}

impl Client {
    fn connect(address: &str) -> Result<Client, Failure> {
        let context = Context::open()?;
        let pd = context.open_pd(None)?;
        let cq = context.create_cq(16, None)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let memory = context.create_shared_buffer(SLOT as u64)?;
        let slot = pd.reg_mr(&memory, .., Access::LOCAL_WRITE)?;
        let connected = qp.connect(address, &ConnectOptions::default())?;
        let table = RemoteMr::from_bytes(&connected.private_data).ok_or("not a kv server")?;
        Ok(Client { qp, cq, slot, table })
    }

    fn put(self, key: &str, value: &str) -> Result<(), Failure> {
        let max = SLOT - KEY;
        if value.len() > max {
            return Err(format!("the value has {} bytes, at most {max} fit", value.len()).into());
        }
        self.slot.fill(0, SLOT, 0)?;
        self.slot.write_at(0, &key_bytes(key)?)?;
        self.slot.write_at(KEY as u64, value.as_bytes())?;
        let whole = [self.slot.sge(0, SLOT as u32)];
        // The reply overwrites the slot, but only after the slot has been sent.
        self.qp.post_recv(&[RecvRequest::new(1, &whole)])?;
        self.qp.post_send(&[SendRequest::send(2, &whole)])?;
        self.completed()
    }

    fn get(self, key: &str) -> Result<Option<String>, Failure> {
        let key = key_bytes(key)?;
        let from = self.table.at(offset_of(&key));
        let into = self.slot.sge(0, SLOT as u32);
        self.qp.post_send(&[SendRequest::read(1, into, from).signaled()])?;
        self.completed()?;
        let mut slot = [0; SLOT];
        self.slot.read_at(0, &mut slot)?;
        if slot[..KEY] != key {
            return Ok(None);
        }
        let end = slot.iter().rposition(|byte| *byte != 0).map_or(KEY, |last| last + 1);
        Ok(Some(String::from_utf8_lossy(&slot[KEY..end.max(KEY)]).into_owned()))
    }

    /// Waits for the completion of the request, then disconnects.
    fn completed(&self) -> Result<(), Failure> {
        self.cq.completions_iter().next().ok_or("no completion")??.ok()?;
        self.qp.disconnect()?;
        self.qp.wait_disconnected(None)?;
        Ok(())
    }
}

fn key_bytes(key: &str) -> Result<[u8; KEY], Failure> {
    if key.is_empty() || key.len() > KEY {
        return Err(format!("the key has {} bytes, but must have 1 to {KEY}", key.len()).into());
    }
    let mut bytes = [0; KEY];
    bytes[..key.len()].copy_from_slice(key.as_bytes());
    Ok(bytes)
}

/// Returns the offset of a key's slot in the table, in bytes. The slot is the FNV-1a hash of the
/// key modulo the number of slots.
fn offset_of(key: &[u8]) -> u64 {
    let hash = key.iter().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
    });
    hash % SLOTS as u64 * SLOT as u64
}
