//! Sockets in packets that are dropped unread. The last close of a TCP socket may linger as long as
//! its owner has set (`SO_LINGER`), and blocks the thread that drops the packet.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use support::*;

/// Descriptors are counted for the whole process, so only one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    // Ignore a poisoned lock: a failed test leaves only descriptors, and each test counts them at
    // its start.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Duration of a lingering close, and the timeout for operations that must not wait for it.
const LINGER: Duration = Duration::from_secs(900);
const SOON: Duration = Duration::from_secs(180);

/// Returns a connection with unread bytes in flight, and its other end.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    let full = loop {
        if let Err(error) = stream.write_all(&[0; 65536]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    socket2::SockRef::from(&stream).set_linger(Some(LINGER)).unwrap();
    (stream, other)
}

/// Closes a socket in another thread. If the daemon has closed its descriptor already, this close
/// lingers until the other end is dropped.
fn close_elsewhere(stream: TcpStream) {
    std::thread::spawn(move || drop(stream));
}

/// Makes one request that the control thread completes, and one that the reaper completes.
fn assert_alive(bystander: &mut Raw, what: &str) {
    let start = Instant::now();
    let buffer = bystander.shared_buffer(4096);
    bystander.call(RequestBody::RemoveSharedBuffer { buffer }).unwrap();
    let took = start.elapsed();
    assert!(took < SOON, "{what}: answered after {took:?}");
}

#[test]
fn unexpected_sockets_delay_no_other_client() {
    let _alone = alone();
    let daemon = daemon("");
    let mut bystander = Raw::open(&daemon.socket());
    let hello = Hello { min_version: 1, max_version: 1, features: 0 }.to_bytes();
    let open_pd = RequestBody::OpenPd { name: None };
    let add_shared_buffer = RequestBody::AddSharedBuffer { length: 4096 };
    let memfd = memfd(4096);

    let mut raw = Raw::open(&daemon.socket());
    let (stream, _other) = lingering();
    raw.ask(open_pd.clone(), &[stream.as_fd()]);
    close_elsewhere(stream);
    assert!(matches!(raw.reply(), Some(Reply { result: Err(Refusal::Malformed { .. }), .. })));
    assert_alive(&mut bystander, "a request that carries none");

    let mut raw = Raw::open(&daemon.socket());
    let (stream, _other) = lingering();
    let mut many = vec![memfd.as_fd(); 16];
    many.push(stream.as_fd());
    raw.ask(add_shared_buffer, &many);
    close_elsewhere(stream);
    assert!(matches!(raw.reply(), Some(Reply { result: Err(Refusal::Malformed { .. }), .. })));
    assert_alive(&mut bystander, "one of many");

    // The first packet ends the client, and the second one carries the socket.
    for (last, bytes) in [("a packet", b"x".as_slice()), ("an empty packet", b"")] {
        let raw = Raw::connect(&daemon.socket());
        let (stream, _other) = lingering();
        raw.send(&hello[..31], &[]);
        raw.send(bytes, &[stream.as_fd()]);
        close_elsewhere(stream);
        assert_alive(&mut bystander, last);
        drop(raw);
        assert_alive(&mut bystander, last);
    }
    daemon.stop().unwrap();
}

#[test]
fn event_channel_is_one_way() {
    let _alone = alone();
    let daemon = daemon("");
    let mut raw = Raw::connect(&daemon.socket());
    let (_, descriptors) = raw.hello().unwrap();
    let channel: &OwnedFd = &descriptors[1];
    let rights = [memfd(4096)];
    let rights = [rights[0].as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&rights)));
    let bytes = [std::io::IoSlice::new(b"x")];
    let sent = sendmsg(channel, &bytes, &mut ancillary, SendFlags::NOSIGNAL);
    assert_eq!(sent, Err(rustix::io::Errno::PIPE));
    daemon.stop().unwrap();
}

/// Returns the number of descriptors of this process, which includes the daemon.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn shrinks_to(start: usize, what: &str) {
    let deadline = Instant::now() + SOON;
    while descriptors() > start {
        assert!(Instant::now() < deadline, "{what}: {start} have become {}", descriptors());
        std::thread::yield_now();
    }
}

/// A client without a session can pass descriptors, and so can a client at the end of its session.
#[test]
fn unread_sockets_do_not_accumulate() {
    let _alone = alone();
    let daemon = daemon("");
    let mut bystander = Raw::open(&daemon.socket());
    // The test holds the other ends, because the end of a peer would end the lingering.
    let mut others = Vec::new();
    let start = descriptors();
    for n in 0..30 {
        let raw = Raw::connect(&daemon.socket());
        let (stream, other) = lingering();
        others.push(other);
        // Shorter than a Hello.
        raw.send(b"x", &[stream.as_fd()]);
        close_elsewhere(stream);
        drop(raw);
        if n % 10 == 0 {
            assert_alive(&mut bystander, "clients that send no Hello");
        }
    }
    shrinks_to(start + others.len(), "sockets in packets");
    daemon.stop().unwrap();
}

/// A session survives refusals, so it can pass many descriptors in turn.
#[test]
fn refused_descriptors_do_not_accumulate() {
    let _alone = alone();
    let daemon = daemon("");
    let mut bystander = Raw::open(&daemon.socket());
    let mut raw = Raw::open(&daemon.socket());
    let mut others = Vec::new();
    let start = descriptors();
    for _ in 0..20 {
        let (stream, other) = lingering();
        others.push(other);
        raw.ask(RequestBody::AttachMemory, &[stream.as_fd()]);
        close_elsewhere(stream);
        assert!(matches!(raw.reply(), Some(Reply { result: Err(_), .. })));
    }
    assert_alive(&mut bystander, "a session that passed many");
    shrinks_to(start + others.len(), "sockets passed as memory");
    daemon.stop().unwrap();
}
