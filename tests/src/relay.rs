//! A TCP relay that keeps what it carries: client -> relay -> server, bytes and ends in the order
//! in which they went by.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::{DEADLINE, wire};

/// Which way something went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// To the server, which is the responder.
    Up,
    /// To the client.
    Down,
}

/// What went by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// These bytes.
    Bytes(Vec<u8>),
    /// The end of what the sender has to say.
    Fin,
}

/// Everything that went over one connection: a start-up frame first, each way.
pub type Record = Vec<(Way, What)>;

/// What becomes of the responder's start-up frame on its way.
pub type Edit = fn(&mut Vec<u8>);

/// A relay for one connection.
pub struct Relay {
    /// Where the client is to connect.
    pub address: SocketAddr,
    carrier: JoinHandle<Record>,
}

impl Relay {
    /// A relay to this server, which changes the Reply in passing.
    ///
    /// # Panics
    ///
    /// If no socket can be had.
    pub fn start(server: SocketAddr, edit: Edit) -> Relay {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("a bound socket");
        let carrier = std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("a client");
            let server = wire::dial(server);
            carry(client, server, edit)
        });
        Relay { address, carrier }
    }

    /// Everything that was carried, once both ends have closed.
    ///
    /// # Panics
    ///
    /// If a connection was reset or did not end.
    pub fn finish(self) -> Record {
        self.carrier.join().expect("both ends closed in order")
    }
}

fn carry(mut client: TcpStream, mut server: TcpStream, edit: Edit) -> Record {
    client.set_nodelay(true).expect("a TCP socket");
    client.set_read_timeout(Some(DEADLINE)).expect("a TCP socket");
    let request = frame(&mut client);
    let record = Arc::new(Mutex::new(vec![(Way::Up, What::Bytes(request.clone()))]));
    server.write_all(&request).expect("a server that listens");
    let (from_client, to_server) = (both(&client), both(&server));
    let up = {
        let record = record.clone();
        std::thread::spawn(move || copy(Way::Up, from_client, to_server, &record))
    };
    let mut reply = frame(&mut server);
    edit(&mut reply);
    record.lock().expect("no panic").push((Way::Down, What::Bytes(reply.clone())));
    (&client).write_all(&reply).expect("a client that listens");
    copy(Way::Down, server, client, &record);
    up.join().expect("the way up");
    std::mem::take(&mut record.lock().expect("no panic"))
}

/// Reads a start-up frame (RFC 5044 section 7.1.1), so that it is on record by itself.
fn frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut frame = wire::exactly(stream, 20);
    let private = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
    frame.extend(wire::exactly(stream, private));
    frame
}

fn both(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a descriptor")
}

/// Carries one way. What is said is on record before it is passed on, so that an answer to it
/// comes later.
fn copy(way: Way, mut from: TcpStream, mut to: TcpStream, record: &Mutex<Record>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = from.read(&mut buffer).expect("bytes or an orderly end");
        let what = if n == 0 { What::Fin } else { What::Bytes(buffer[..n].to_vec()) };
        record.lock().expect("no panic").push((way, what));
        if n == 0 {
            // Whoever closed altogether does not mind.
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        to.write_all(&buffer[..n]).expect("a peer that listens");
    }
}
