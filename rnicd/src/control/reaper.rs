//! Threads that do the closing, so that nobody who must stay quick ever does.
//!
//! Unmapping gigabytes takes time, and `close` of a descriptor that a client made may take for
//! ever (a FUSE server answers the flush). They are apart, and sockets that clients made are apart
//! from both: a hostile descriptor delays only others of its kind. No thread is waited for when the
//! daemon ends.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;

use super::packet;
use crate::config::Seccomp;
use crate::privilege::{ThreadKind, spawn_confined};

/// Where things go to be dropped.
#[derive(Clone, Debug)]
pub struct Reaper {
    ours: Sender<(Box<dyn Any + Send>, Option<Receipt>)>,
    suspect: Sender<Suspect>,
    sockets: Sender<OwnedFd>,
    gone: Receiver<Receipt>,
    last: Arc<AtomicU64>,
}

/// What may take for ever to close.
enum Suspect {
    /// A descriptor of a client.
    Descriptor(OwnedFd),
    /// The daemon's end of a control socket, with packets from the client that nobody has taken: the
    /// descriptors in them are closed with it.
    Client(OwnedFd),
}

/// Names a thing whose end is of interest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Receipt(u64);

impl Reaper {
    /// Starts the threads. `control` is woken when something with a receipt is gone.
    pub fn start(control: Arc<Waker>, seccomp: Seccomp) -> io::Result<Self> {
        let (ours, ours_in) = unbounded::<(Box<dyn Any + Send>, _)>();
        let (suspect, suspect_in) = unbounded::<Suspect>();
        let (gone_out, gone) = unbounded();
        spawn_confined("reaper", ThreadKind::Reaper, seccomp, move || {
            for (thing, receipt) in ours_in {
                drop(thing);
                if let Some(receipt) = receipt {
                    // Nobody who asked is left when the daemon ends.
                    let _ = gone_out.send(receipt);
                    let _ = control.wake();
                }
            }
        })?;
        spawn_confined("reaper-suspect", ThreadKind::Reaper, seccomp, move || {
            suspect_in.into_iter().for_each(close);
        })?;
        let (sockets, sockets_in) = unbounded::<OwnedFd>();
        spawn_confined("reaper-sockets", ThreadKind::Reaper, seccomp, move || {
            sockets_in.into_iter().for_each(close_socket);
        })?;
        Ok(Reaper { ours, suspect, sockets, gone, last: Arc::default() })
    }

    /// Drops something of ours: mappings, buffers, sockets.
    pub fn drop_later(&self, thing: impl Any + Send) {
        // If the thread is gone the thing comes back in the error and is dropped here.
        let _ = self.ours.send((Box::new(thing), None));
    }

    /// Drops something of ours that counts against a limit until it is gone, which
    /// [`Reaper::poll_gone`] tells: a client must not be able to outrun the unmapping of what it
    /// gave back.
    pub fn drop_counted(&self, thing: impl Any + Send) -> Receipt {
        let receipt = Receipt(self.last.fetch_add(1, Ordering::Relaxed));
        let _ = self.ours.send((Box::new(thing), Some(receipt)));
        receipt
    }

    /// Something that is gone.
    pub fn poll_gone(&self) -> Option<Receipt> {
        self.gone.try_recv().ok()
    }

    /// Closes a descriptor that a client made and that is not of a known kind.
    pub fn close_suspect(&self, descriptor: OwnedFd) {
        let _ = self.suspect.send(Suspect::Descriptor(descriptor));
    }

    /// Descriptors of clients that wait behind one whose close takes its time.
    pub fn waiting(&self) -> usize {
        self.suspect.len() + self.sockets.len()
    }

    /// Closes the daemon's end of a control socket.
    pub fn close_client(&self, socket: OwnedFd) {
        packet::shut(socket.as_fd());
        match packet::is_waiting(socket.as_fd()) {
            true => drop(self.suspect.send(Suspect::Client(socket))),
            false => self.drop_later(socket),
        }
    }

    /// Closes a TCP socket that a client made.
    pub fn close_socket(&self, socket: OwnedFd) {
        let _ = self.sockets.send(socket);
    }
}

fn close(suspect: Suspect) {
    match suspect {
        Suspect::Descriptor(descriptor) => drop(descriptor),
        // Closing it with unread packets would take back from the client what it was told last. It
        // ends, as nothing comes any more.
        Suspect::Client(socket) => {
            while packet::is_waiting(socket.as_fd()) && packet::take(socket.as_fd()).is_ok() {}
        }
    }
}

/// Closes a socket without waiting for what it has still to send. The client may set `SO_LINGER`
/// again in between: then this thread waits, and other sockets of clients with it.
fn close_socket(socket: OwnedFd) {
    let _ = socket2::SockRef::from(&socket).set_linger(None);
}
