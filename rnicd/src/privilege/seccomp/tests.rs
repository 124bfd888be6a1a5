//! The filters of system calls hold: each kind of thread can do what it is for and nothing else.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use libc::{SIGABRT, SIGSYS};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{AddressFamily, SocketType};

use super::{ThreadKind, confine};
use crate::config::Seccomp;

/// The test that is run in a process of its own, by its full name.
const ATTACKER: &str = "privilege::seccomp::tests::attacker";

/// Runs `act` in a thread that is confined as one of this kind.
fn as_kind<T: Send + 'static>(kind: ThreadKind, act: impl FnOnce() -> T + Send + 'static) -> T {
    as_kind_with(Seccomp::Enforce, kind, act)
}

fn as_kind_with<T: Send + 'static>(
    seccomp: Seccomp,
    kind: ThreadKind,
    act: impl FnOnce() -> T + Send + 'static,
) -> T {
    let thread = std::thread::spawn(move || {
        confine(kind, seccomp).unwrap();
        act()
    });
    thread.join().unwrap()
}

/// Everything that some kinds may do and others may not; who may.
#[test]
fn each_kind_has_what_it_needs_and_no_more() {
    use ThreadKind::{Addresses, Control};
    for kind in ThreadKind::ALL {
        let opens = kind == Control;
        let reads = opens || kind == ThreadKind::ConfigReader;
        let written = as_kind(kind, || {
            File::options().write(true).open("/dev/null").map(drop).map_err(|e| e.kind())
        });
        let (file, socket, tcp, raw, memory, new, child, thread) = as_kind(kind, || {
            (
                File::open("/dev/null").map(drop).map_err(|e| e.kind()),
                UnixStream::pair().map(drop).map_err(|e| e.kind()),
                TcpListener::bind("127.0.0.1:0").map(drop).map_err(|e| e.kind()),
                rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None).map(drop),
                memfd_create("t", MemfdFlags::CLOEXEC).map(drop),
                eventfd(0, EventfdFlags::CLOEXEC).map(drop),
                rustix::process::test_kill_process(rustix::process::getpid()),
                std::thread::Builder::new().spawn(|| {}).map(drop).map_err(|e| e.kind()),
            )
        });
        let may = |may: bool| if may { Ok(()) } else { Err(ErrorKind::PermissionDenied) };
        let can = |may: bool| if may { Ok(()) } else { Err(Errno::PERM) };
        assert_eq!(file, may(reads), "{kind:?} reads files");
        assert_eq!(written, may(opens), "{kind:?} writes files");
        assert_eq!(socket, may(opens), "{kind:?} makes socket pairs");
        assert_eq!(tcp, may(opens), "{kind:?} makes TCP sockets");
        assert_eq!(raw, can(kind == Addresses), "{kind:?} makes netlink sockets");
        assert_eq!(memory, can(opens), "{kind:?} makes shared memory");
        assert_eq!(new, can(opens), "{kind:?} makes descriptors");
        assert_eq!(child, can(false), "{kind:?} sends signals");
        assert_eq!(thread, may(false), "{kind:?} starts threads");
    }
}

#[test]
fn memory_comes_and_goes_but_not_with_code() {
    for kind in ThreadKind::ALL {
        let (grown, code) = as_kind(kind, || {
            // From the heap, from mappings of their own, and larger in place or elsewhere.
            let mut blocks: Vec<Vec<u8>> = (0..24).map(|n| vec![1; 1 << n]).collect();
            blocks.iter_mut().for_each(|b| b.extend_from_within(..));
            let grown: usize = blocks.iter().map(Vec::len).sum();
            let protection = ProtFlags::READ | ProtFlags::EXEC;
            (grown, map(protection).map_err(|e| e == Errno::PERM))
        });
        assert_eq!(grown, (1 << 25) - 2);
        assert_eq!(code, Err(true));
    }
}

fn map(protection: ProtFlags) -> Result<(), Errno> {
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping of a page at a place of the kernel's choice, to which nothing refers.
    let page = unsafe { rustix::mm::mmap_anonymous(null, 4096, protection, MapFlags::PRIVATE)? };
    // SAFETY: the mapping just made.
    unsafe { rustix::mm::munmap(page, 4096) }
}

#[test]
fn a_worker_moves_data_between_descriptors_it_has() {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let poll = mio::Poll::new().unwrap();
    let waker = mio::Waker::new(poll.registry(), mio::Token(0)).unwrap();
    let (fired, address) = as_kind(ThreadKind::Worker, move || {
        let mut poll = poll;
        theirs.write_all(b"hello").unwrap();
        waker.wake().unwrap();
        let mut events = mio::Events::with_capacity(1);
        poll.poll(&mut events, None).unwrap();
        (events.iter().count(), socket.local_addr().is_ok())
    });
    assert_eq!((fired, address), (1, true));
    std::io::Read::read_exact(&mut ours, &mut [0; 5]).unwrap();
}

#[test]
fn addresses_are_read_in_confinement() {
    let found = as_kind(ThreadKind::Addresses, if_addrs::get_if_addrs).unwrap();
    let loopback = found.iter().find(|interface| interface.is_loopback());
    assert!(loopback.is_some_and(|interface| interface.index.is_some()), "{found:?}");
}

#[test]
fn logging_lets_everything_pass() {
    let opened = as_kind_with(Seccomp::Log, ThreadKind::Worker, || File::open("/dev/null").is_ok());
    assert!(opened);
    // The process may have been started with it (`setpriv --no-new-privs`).
    let before = rustix::thread::no_new_privs().unwrap();
    let (opened, after) = as_kind_with(Seccomp::Off, ThreadKind::Worker, || {
        (File::open("/dev/null").is_ok(), rustix::thread::no_new_privs().unwrap())
    });
    assert!(opened);
    assert_eq!(after, before);
}

#[test]
fn what_only_an_attacker_does_ends_the_process() {
    // Aborting is no attack: it must still end the process as it should.
    for (what, signal) in [
        ("execve", SIGSYS),
        ("ptrace", SIGSYS),
        ("setuid", SIGSYS),
        ("unshare", SIGSYS),
        ("abort", SIGABRT),
    ] {
        for kind in ["control", "worker", "config reader", "reaper", "log", "addresses"] {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", ATTACKER, "--nocapture"])
                .env("ATTACK", what)
                .env("ATTACK_AS", kind)
                .output()
                .unwrap();
            assert_eq!(child.status.signal(), Some(signal), "{what} as {kind}: {child:?}");
        }
    }
}

#[test]
fn what_libraries_ask_for_once_is_asked_before() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", ATTACKER, "--nocapture"])
        .env("ATTACK", "none")
        .env("ATTACK_AS", "worker")
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
}

/// The other half of the tests above, which run it in a process of its own and see that end.
#[test]
fn attacker() {
    let Ok(what) = std::env::var("ATTACK") else { return };
    let kind = match std::env::var("ATTACK_AS").unwrap().as_str() {
        "control" => ThreadKind::Control,
        "worker" => ThreadKind::Worker,
        "config reader" => ThreadKind::ConfigReader,
        "reaper" => ThreadKind::Reaper,
        "log" => ThreadKind::Log,
        _ => ThreadKind::Addresses,
    };
    as_kind(kind, move || match what.as_str() {
        "execve" => {
            use std::os::unix::process::CommandExt;
            panic!("{}", Command::new("/bin/echo").arg("executed").exec());
        }
        "ptrace" => {
            // SAFETY: asks to be traced by the parent; touches no memory.
            unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
        }
        "none" => assert!(rustix::param::page_size() >= 4096),
        "abort" => std::process::abort(),
        "setuid" => {
            let own = rustix::process::getuid();
            let _ = rustix::thread::set_thread_res_uid(own, own, own);
        }
        _ => {
            // SAFETY: affects which user namespace this thread is in and no memory.
            unsafe { libc::unshare(libc::CLONE_NEWUSER) };
        }
    });
}
