//! Tests of the filters: each kind of thread can make the calls it needs and no others.

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

/// Full name of the test that runs in a separate process.
const ATTACKER: &str = "privilege::seccomp::tests::attacker";

/// Runs `act` in a thread that is confined as this kind.
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

/// Tries every operation that only some kinds may perform.
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
fn memory_is_mapped_without_exec() {
    for kind in ThreadKind::ALL {
        let (grown, code) = as_kind(kind, || {
            // From the heap, in separate mappings, and grown in place or moved.
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
    // SAFETY: a new mapping of a page at an address that the kernel chooses. Nothing refers to it.
    let page = unsafe { rustix::mm::mmap_anonymous(null, 4096, protection, MapFlags::PRIVATE)? };
    // SAFETY: the mapping was just made, and nothing refers to it.
    unsafe { rustix::mm::munmap(page, 4096) }
}

#[test]
fn worker_moves_data_between_its_descriptors() {
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
fn confined_thread_reads_addresses() {
    let found = as_kind(ThreadKind::Addresses, if_addrs::get_if_addrs).unwrap();
    let loopback = found.iter().find(|interface| interface.is_loopback());
    assert!(loopback.is_some_and(|interface| interface.index.is_some()), "{found:?}");
}

#[test]
fn logging_lets_everything_pass() {
    let opened = as_kind_with(Seccomp::Log, ThreadKind::Worker, || File::open("/dev/null").is_ok());
    assert!(opened);
    // The process may have been started with no_new_privs (`setpriv --no-new-privs`).
    let before = rustix::thread::no_new_privs().unwrap();
    let (opened, after) = as_kind_with(Seccomp::Off, ThreadKind::Worker, || {
        (File::open("/dev/null").is_ok(), rustix::thread::no_new_privs().unwrap())
    });
    assert!(opened);
    assert_eq!(after, before);
}

#[test]
fn hostile_calls_end_the_process() {
    // An abort is not an attack: it must still end the process with its own signal.
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
fn one_time_library_calls_precede_the_filter() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", ATTACKER, "--nocapture"])
        .env("ATTACK", "none")
        .env("ATTACK_AS", "worker")
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
}

/// The attacker's side of the tests above, which run it in a separate process and check its end.
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
            // SAFETY: asks the parent to trace this process. Touches no memory.
            unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
        }
        "none" => assert!(rustix::param::page_size() >= 4096),
        "abort" => std::process::abort(),
        "setuid" => {
            let own = rustix::process::getuid();
            let _ = rustix::thread::set_thread_res_uid(own, own, own);
        }
        _ => {
            // SAFETY: changes the user namespace of this thread and no memory.
            unsafe { libc::unshare(libc::CLONE_NEWUSER) };
        }
    });
}
