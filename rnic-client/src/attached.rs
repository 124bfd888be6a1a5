//! Memory of this process for regions. The daemon can access it once the process's memory is
//! attached.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;

use rnic_abi::abi::control::MrSource;
use rnic_abi::shm::Mapping;
use rnic_abi::types::Access;

use crate::error::Error;
use crate::mr::{Mr, MrOptions};
use crate::pd::PdInner;
use crate::shared_buffer::resolve;

/// Heap memory that peers may read and write while regions cover it.
///
/// A peer may write at any time, so there must be no slice of the bytes: the buffer owns them, and
/// the regions provide access ([`Mr::read_at`] and similar). When the last region has been dropped,
/// [`AttachedBuffer::into_vec`] returns the bytes. Clones share the bytes.
///
/// ```no_run
/// use rnic_client::{AttachedBuffer, Context, MrOptions};
///
/// # fn main() -> Result<(), rnic_client::Error> {
/// let context = Context::open()?;
/// context.attach_memory()?;
/// let pd = context.open_pd(None)?;
/// let buffer = AttachedBuffer::from_vec(b"sent in place".to_vec())?;
/// let mr = pd.reg_mr_attached(&buffer, .., &MrOptions::default())?;
/// // Post requests that name `mr`, and wait for their completions.
/// mr.deregister()?;
/// let bytes = buffer.into_vec().expect("no region is left");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AttachedBuffer {
    mapping: Arc<Mapping>,
}

impl AttachedBuffer {
    /// Creates a buffer of `len` zeroed bytes, at least 1.
    pub fn new(len: usize) -> Result<Self, Error> {
        Self::from_vec(vec![0; len])
    }

    /// Creates a buffer from a vector, without moving its bytes. Fails if it is empty.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self, Error> {
        let mapping = Mapping::from_vec(bytes).map_err(|e| Error::io("attaching a buffer", e))?;
        Ok(AttachedBuffer { mapping })
    }

    /// Returns the bytes if no clone and no region is left; otherwise returns the buffer.
    pub fn into_vec(self) -> Result<Vec<u8>, Self> {
        self.mapping.into_vec().map_err(|mapping| AttachedBuffer { mapping })
    }

    /// Returns the length of the buffer in bytes, at least 1.
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Returns false: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    pub(crate) fn register(
        &self,
        pd: &Arc<PdInner>,
        range: impl RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        let (offset, length) = resolve(range, self.len())?;
        // The range lies inside the buffer, so the sum cannot overflow.
        let address = self.mapping.address() + offset;
        if options.access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE) {
            let maps = std::fs::read_to_string("/proc/self/maps")
                .map_err(|e| Error::io("reading /proc/self/maps", e))?;
            if let Some(at) = not_writable(&maps, address, length) {
                return Err(Error::NotWritable { address: at });
            }
        }
        let source = MrSource::Attached { address };
        Mr::register_range(pd, self.mapping.clone(), None, offset, length, source, options)
    }
}

impl fmt::Debug for AttachedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedBuffer").field("len", &self.len()).finish()
    }
}

/// Returns the first address of the range that this process may not write. `maps` is the contents
/// of `/proc/self/maps`: lines of `start-end rwxp ...` by ascending address.
fn not_writable(maps: &str, address: u64, length: u64) -> Option<u64> {
    let end = address.saturating_add(length);
    let mut at = address;
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
        let Some((from, to)) = range.split_once('-') else { continue };
        let hex = |digits| u64::from_str_radix(digits, 16);
        let (Ok(from), Ok(to)) = (hex(from), hex(to)) else { continue };
        if to <= at {
            continue;
        }
        if at >= end || from > at || rights.as_bytes().get(1) != Some(&b'w') {
            break;
        }
        at = to;
    }
    (at < end).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_of_a_range_must_be_writable() {
        let maps = "1000-3000 r-xp 0 0:0 1 /bin/program\n\
                    3000-4000 rw-p 0 0:0 1 /bin/program\n\
                    4000-6000 rw-p 0 0:0 0\n\
                    8000-9000 rw-p 0 0:0 0 [heap]\n\
                    9000-a000 r--p 0 0:0 0\n";
        for (address, length, first) in [
            (0x3000, 0x3000, None),
            (0x3fff, 2, None),
            (0x5000, 0x1000, None),
            (0x5000, 0x1001, Some(0x6000)),
            (0x2fff, 2, Some(0x2fff)),
            (0x7fff, 2, Some(0x7fff)),
            (0x8000, 0x1001, Some(0x9000)),
            (0x10000, 1, Some(0x10000)),
        ] {
            assert_eq!(not_writable(maps, address, length), first, "{length} at {address:#x}");
        }
        let here = vec![0u8; 100_000];
        let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
        assert_eq!(not_writable(&maps, here.as_ptr() as u64, 100_000), None);
        let code = maps.lines().find(|l| l.contains(" r-xp ")).and_then(|l| l.split('-').next());
        let code = code.and_then(|a| u64::from_str_radix(a, 16).ok()).expect("a program has code");
        assert_eq!(not_writable(&maps, code, 1), Some(code));
    }

    #[test]
    fn buffer_needs_a_byte_and_returns_its_bytes() {
        assert!(AttachedBuffer::new(0).is_err());
        let buffer = AttachedBuffer::from_vec(vec![1, 2, 3]).expect("bytes");
        let clone = buffer.clone();
        let buffer = buffer.into_vec().expect_err("there is a clone");
        drop(clone);
        assert_eq!(buffer.into_vec().expect("it is alone"), [1, 2, 3]);
    }
}
