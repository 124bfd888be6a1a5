//! Threads that do the closing, so that nobody who must stay quick ever does.
//!
//! Unmapping gigabytes takes time, and `close` of a descriptor that a client made may take for
//! ever (a FUSE server answers the flush). The two are apart: a hostile descriptor delays only
//! other hostile descriptors. Neither thread is waited for when the daemon ends.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;

use crossbeam_channel::{Sender, unbounded};

/// Where things go to be dropped.
#[derive(Clone, Debug)]
pub struct Reaper {
    ours: Sender<Box<dyn Any + Send>>,
    suspect: Sender<OwnedFd>,
}

impl Reaper {
    /// Starts both threads.
    pub fn start() -> io::Result<Self> {
        let (ours, ours_in) = unbounded::<Box<dyn Any + Send>>();
        let (suspect, suspect_in) = unbounded::<OwnedFd>();
        let builder = |name: &str| std::thread::Builder::new().name(name.to_owned());
        builder("reaper").spawn(move || ours_in.iter().for_each(drop))?;
        builder("reaper-suspect").spawn(move || suspect_in.iter().for_each(drop))?;
        Ok(Reaper { ours, suspect })
    }

    /// Drops something of ours: mappings, buffers, sockets.
    pub fn drop_later(&self, thing: impl Any + Send) {
        // If the thread is gone the thing comes back in the error and is dropped here.
        let _ = self.ours.send(Box::new(thing));
    }

    /// Closes a descriptor that a client made and that is not of a known kind.
    pub fn close_suspect(&self, descriptor: OwnedFd) {
        let _ = self.suspect.send(descriptor);
    }
}
