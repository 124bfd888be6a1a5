//! The live objects of this process, by kind and address.
//!
//! Every call looks up each of its handles, on the data path too. Most lookups find the handle in
//! [`RECENT`] with one load; the others take the lock of [`LIVE`].

use std::collections::HashSet;
use std::fmt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

/// Defines the kinds with their names.
macro_rules! kinds {
    ($($kind:ident $name:literal)*) => {
        /// Kind of an object that C holds a pointer to.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Kind {
            $($kind),*
        }

        impl fmt::Display for Kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Kind::$kind => $name),*
                })
            }
        }
    };
}

kinds! {
    Device "device"
    DeviceList "device list"
    Context "device context"
    Pd "protection domain"
    Mr "memory region"
    Mw "memory window"
    CompletionChannel "completion channel"
    Cq "completion queue"
    Srq "shared receive queue"
    Qp "queue pair"
    Ah "address handle"
    EventChannel "event channel"
    Id "rdma_cm_id"
    CmEvent "rdma_cm_event"
    ContextList "list of device contexts"
    AddressInfo "rdma_addrinfo"
    Buf "buffer"
}

/// Packs address and kind into one word: addresses are multiples of 32, and there are 17 kinds.
fn word(kind: Kind, address: usize) -> usize {
    address | kind as usize
}

static LIVE: LazyLock<RwLock<HashSet<usize>>> = LazyLock::new(RwLock::default);

/// A direct-mapped cache of [`LIVE`]. A new object displaces the previous entry of its slot.
static RECENT: [AtomicUsize; 1 << SLOT_BITS] = [const { AtomicUsize::new(0) }; 1 << SLOT_BITS];

const SLOT_BITS: u32 = 12;

fn slot(address: usize) -> &'static AtomicUsize {
    // Fibonacci hashing: the upper bits of the product depend on all bits of the address.
    let product = (address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    &RECENT[(product >> (u64::BITS - SLOT_BITS)) as usize]
}

/// Adds a new object.
pub(crate) fn add(kind: Kind, address: usize) {
    LIVE.write().insert(word(kind, address));
    slot(address).store(word(kind, address), Ordering::Release);
}

/// Removes an object before it is destroyed. Returns true if it was live.
pub(crate) fn remove(kind: Kind, address: usize) -> bool {
    let word = word(kind, address);
    // Another object may have displaced it.
    let _ = slot(address).compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
    LIVE.write().remove(&word)
}

/// Returns the addresses of the live objects of this kind that match `which`. No object is
/// destroyed while `which` reads it.
pub(crate) fn all(kind: Kind, which: impl Fn(usize) -> bool) -> Vec<usize> {
    let live = LIVE.read();
    let of_kind = live.iter().filter(|word| **word % ALIGNMENT == kind as usize);
    of_kind.map(|word| word - kind as usize).filter(|address| which(*address)).collect()
}

/// Returns true if an object of this kind is live at the address.
pub(crate) fn is_live(kind: Kind, address: usize) -> bool {
    // The low bits of an unaligned address would be mistaken for a kind.
    if !address.is_multiple_of(ALIGNMENT) {
        return false;
    }
    let word = word(kind, address);
    slot(address).load(Ordering::Acquire) == word || LIVE.read().contains(&word)
}

const ALIGNMENT: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    /// Far from the address of any real object.
    const BASE: usize = 0xFFFF_0000_0000_0000;

    #[test]
    fn a_handle_is_live_until_it_is_removed() {
        add(Kind::Qp, BASE);
        assert!(is_live(Kind::Qp, BASE));
        assert!(!is_live(Kind::Cq, BASE));
        assert!(!is_live(Kind::Device, BASE | Kind::Qp as usize));
        assert!(remove(Kind::Qp, BASE));
        assert!(!is_live(Kind::Qp, BASE));
        assert!(!remove(Kind::Qp, BASE));
    }

    #[test]
    fn displaced_handles_stay_live() {
        let of = |n: usize| BASE + 0x1_0000_0000 + n * ALIGNMENT;
        let count = 3 << SLOT_BITS;
        (0..count).for_each(|n| add(Kind::Mr, of(n)));
        assert!((0..count).all(|n| is_live(Kind::Mr, of(n))));
        assert!((0..count).all(|n| remove(Kind::Mr, of(n))));
        assert!((0..count).all(|n| !is_live(Kind::Mr, of(n))));
    }
}
