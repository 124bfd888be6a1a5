//! A TCP relay between client and server that records all bytes and ends of stream in the order in
//! which it forwards them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::{DEADLINE, wire};

/// Direction of a record entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the server, which is the MPA responder.
    Up,
    /// To the client.
    Down,
}

/// Content of a record entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Part of the stream.
    Bytes(Vec<u8>),
    /// End of stream.
    Fin,
}

/// Recorded bytes of a connection. The first entry of each direction is its start-up frame.
pub type Record = Vec<(Direction, Content)>;

/// Edits the responder's start-up frame before the relay forwards it.
pub type Edit = fn(&mut Vec<u8>);

/// A relay for one connection.
pub struct Relay {
    /// Address for the client to connect to.
    pub address: SocketAddr,
    carrier: JoinHandle<Record>,
}

impl Relay {
    /// Starts a relay to this server that edits the Reply.
    ///
    /// # Panics
    ///
    /// If no socket is available.
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

    /// Waits until both ends have closed and returns the record.
    ///
    /// # Panics
    ///
    /// If a connection was reset or did not end.
    pub fn finish(self) -> Record {
        self.carrier.join().expect("both ends closed gracefully")
    }
}

fn carry(mut client: TcpStream, mut server: TcpStream, edit: Edit) -> Record {
    client.set_nodelay(true).expect("a TCP socket");
    client.set_read_timeout(Some(DEADLINE)).expect("a TCP socket");
    let request = frame(&mut client);
    let first = (Direction::Up, Content::Bytes(request.clone()));
    let record = Arc::new(Mutex::new(vec![first]));
    server.write_all(&request).expect("a server that listens");
    let from_client = duplicate(&client);
    let to_server = duplicate(&server);
    let up = {
        let record = record.clone();
        std::thread::spawn(move || copy(Direction::Up, from_client, to_server, &record))
    };
    let mut reply = frame(&mut server);
    edit(&mut reply);
    record.lock().expect("no panic").push((Direction::Down, Content::Bytes(reply.clone())));
    (&client).write_all(&reply).expect("a client that reads");
    copy(Direction::Down, server, client, &record);
    up.join().expect("the upstream thread");
    std::mem::take(&mut record.lock().expect("no panic"))
}

/// Reads a start-up frame (RFC 5044 section 7.1.1), so that it has its own record entry.
fn frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut frame = wire::exactly(stream, 20);
    let private = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
    frame.extend(wire::exactly(stream, private));
    frame
}

fn duplicate(stream: &TcpStream) -> TcpStream {
    stream.try_clone().expect("a descriptor")
}

/// Relays one direction. Records bytes before it forwards them, so that their answer has a later
/// entry.
fn copy(way: Direction, mut from: TcpStream, mut to: TcpStream, record: &Mutex<Record>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = from.read(&mut buffer).expect("bytes or the end of the stream");
        let content = if n == 0 { Content::Fin } else { Content::Bytes(buffer[..n].to_vec()) };
        record.lock().expect("no panic").push((way, content));
        if n == 0 {
            // Fails harmlessly if the receiver has closed its socket.
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        to.write_all(&buffer[..n]).expect("a peer that reads");
    }
}
