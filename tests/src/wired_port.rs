//! A listener on `wired.port` of a host without a daemon. It answers verification queries and
//! builds frames itself, without code of the daemon.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::{DEADLINE, ports, wire};

/// A decoded verification query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerificationQuery {
    /// GID and QP number of the QP that received the connection request.
    pub dialled: ([u8; 16], u32),
    /// GID and number of the QP that the query claims as the requester.
    pub dialler: ([u8; 16], u32),
    /// Number of the connection request.
    pub number: u64,
}

impl VerificationQuery {
    /// Decodes private data. Returns `None` if it is not a verification query.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != 56 || bytes[..8] != *b"RNWQ\x02\0\0\0" {
            return None;
        }
        let gid = |at: usize| bytes[at..at + 16].try_into().unwrap();
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let number = u64::from_be_bytes(bytes[48..].try_into().unwrap());
        Some(VerificationQuery {
            dialled: (gid(8), word(40)),
            dialler: (gid(24), word(44)),
            number,
        })
    }

    /// Encodes the query as private data.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"RNWQ\x02\0\0\0".to_vec();
        bytes.extend(self.dialled.0);
        bytes.extend(self.dialler.0);
        bytes.extend(self.dialled.1.to_be_bytes());
        bytes.extend(self.dialler.1.to_be_bytes());
        bytes.extend(self.number.to_be_bytes());
        bytes
    }
}

/// Returns an MPA Reject with the answer to a verification query.
pub fn answer(is_pending: bool) -> Vec<u8> {
    reject(&[b"RNWQ\x02".as_slice(), &[u8::from(is_pending)]].concat())
}

/// Returns an MPA Reject of revision 2 with this private data.
pub fn reject(private_data: &[u8]) -> Vec<u8> {
    let mut frame = wire::request(wire::CRC | 0x20, 2, private_data);
    frame[..16].copy_from_slice(b"MPA ID Rep Frame");
    frame
}

/// Reads the private data of an MPA Request, without IRD and ORD. Returns `None` if the connection
/// ends first.
pub fn private_data(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut head = [0; 20];
    stream.read_exact(&mut head).ok()?;
    let mut data = vec![0; usize::from(u16::from_be_bytes([head[18], head[19]]))];
    stream.read_exact(&mut data).ok()?;
    // In revision 2, IRD and ORD come first (flag S, RFC 6581 section 9).
    Some(data.split_off(if head[16] & 0x10 == 0 { 0 } else { 4 }))
}

/// Reads one verification query and confirms it.
///
/// # Panics
///
/// If the connection carries anything else.
pub fn confirm(stream: &mut TcpStream) -> VerificationQuery {
    stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
    let data = private_data(stream).expect("an MPA Request");
    let query = VerificationQuery::parse(&data).expect("a verification query");
    wire::send_bytes(stream, &answer(true));
    query
}

/// A thread that listens on `wired.port` of an address until it is dropped.
pub struct WiredPort {
    address: SocketAddr,
    queries: Arc<Mutex<Vec<VerificationQuery>>>,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl WiredPort {
    /// Confirms every verification query.
    pub fn confirming(address: SocketAddr) -> Self {
        WiredPort::on(ports::listen_again(address))
    }

    /// Like [`WiredPort::confirming`], with a socket that already listens.
    pub fn on(listener: TcpListener) -> Self {
        WiredPort::serve(listener, |stream, _| wire::send_bytes(stream, &answer(true)))
    }

    /// Calls `reply` with the connection of every verification query. Closes all other connections.
    pub fn replying(
        address: SocketAddr,
        reply: impl Fn(&mut TcpStream, &VerificationQuery) + Send + 'static,
    ) -> Self {
        WiredPort::serve(ports::listen_again(address), reply)
    }

    fn serve(
        listener: TcpListener,
        reply: impl Fn(&mut TcpStream, &VerificationQuery) + Send + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("its address");
        let queries = Arc::new(Mutex::new(Vec::new()));
        let stops = Arc::new(AtomicBool::new(false));
        let received = queries.clone();
        let stopped = stops.clone();
        let thread = std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                if stopped.load(Relaxed) {
                    return;
                }
                stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
                let data = private_data(&mut stream);
                let Some(query) = data.and_then(|data| VerificationQuery::parse(&data)) else {
                    continue;
                };
                // Record the query before the daemon can act on the answer.
                received.lock().expect("no panic").push(query.clone());
                reply(&mut stream, &query);
            }
        });
        WiredPort { address, queries, stops, thread: Some(thread) }
    }

    /// Returns the verification queries received so far.
    pub fn queries(&self) -> Vec<VerificationQuery> {
        self.queries.lock().expect("no panic").clone()
    }
}

impl Drop for WiredPort {
    fn drop(&mut self) {
        self.stops.store(true, Relaxed);
        // Wakes the thread.
        drop(TcpStream::connect(self.address));
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ended, Some(Ok(()))), "the listener on `wired.port` panicked");
        }
    }
}
