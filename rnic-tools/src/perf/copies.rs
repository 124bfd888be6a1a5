//! memcpy, and other work on the same bytes within one process.
//!
//! Uses memory of the same kind as the measured buffers (pages of a memfd that the daemon has
//! mapped too), a working set of the same size, and messages of the same size.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rnic_client::{Context, Lease};

use super::error::PerfError;
use super::spec::Spec;

/// Two working sets of this process.
pub struct Copies {
    from: Lease,
    to: Lease,
    size: usize,
}

impl Copies {
    /// Allocates the memory for a measurement and touches all pages.
    pub fn new(context: &Context, spec: &Spec) -> Result<Self, PerfError> {
        let pd = context.open_pd(None)?;
        let len = spec.working_set();
        let memory = || pd.reg_local(len)?.lease(..len);
        let mut from = memory()?;
        let mut to = memory()?;
        touch(&mut from);
        touch(&mut to);
        Ok(Copies { from, to, size: spec.size as usize })
    }

    /// Copies `count` messages between two working sets. Returns the time.
    pub fn copy(&mut self, count: u64) -> Duration {
        copy(&self.from, &mut self.to, self.size, count)
    }

    /// Calls `read` with `count` messages of a working set. Returns the time.
    pub fn read(&self, count: u64, read: impl FnMut(&[u8])) -> Duration {
        read_messages(&self.from, self.size, count, read)
    }
}

fn copy(from: &[u8], to: &mut [u8], size: usize, count: u64) -> Duration {
    let start = Instant::now();
    for slot in slots(from, size).zip(0..count).map(|(slot, _)| slot) {
        let at = slot * size..(slot + 1) * size;
        black_box(&mut to[at.clone()]).copy_from_slice(black_box(&from[at]));
    }
    start.elapsed()
}

fn read_messages(from: &[u8], size: usize, count: u64, mut read: impl FnMut(&[u8])) -> Duration {
    let start = Instant::now();
    for slot in slots(from, size).zip(0..count).map(|(slot, _)| slot) {
        read(black_box(&from[slot * size..(slot + 1) * size]));
    }
    start.elapsed()
}

/// Returns the message slots of the working set in rotation, endlessly.
fn slots(memory: &[u8], size: usize) -> impl Iterator<Item = usize> + use<> {
    (0..(memory.len() / size).max(1)).cycle()
}

/// Writes every page, with varying bytes.
fn touch(memory: &mut [u8]) {
    memory.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_go_through_the_whole_working_set() {
        let mut from = vec![0; 64 * 4];
        touch(&mut from);
        let mut to = vec![0xEE; 64 * 4];
        copy(&from, &mut to, 64, 3);
        assert_eq!(to[..192], from[..192]);
        assert!(to[192..].iter().all(|b| *b == 0xEE));
        copy(&from, &mut to, 64, 5);
        assert_eq!(to, from);
        let mut read = Vec::new();
        read_messages(&from, 64, 5, |message| read.extend_from_slice(message));
        assert_eq!(read, [&from[..], &from[..64]].concat());
    }
}
