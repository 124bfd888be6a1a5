//! Copies whose writes bypass the caches, for data that would be evicted before their next use.
//!
//! An ordinary store first reads the line that it replaces, and writes it to memory on eviction.
//! A non-temporal store does neither. That nearly doubles the throughput of a copy that is larger
//! than the caches, but reduces that of a smaller one by a third.

/// Copies `len` bytes. Threads that see a later store of this thread also see the copied bytes.
///
/// # Safety
/// `from` must be valid for reading and `to` for writing `len` bytes, in shared memory to which no
/// part of this process holds a reference, and the two ranges must not overlap.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE * LINE;
    // SAFETY: the three parts make up the range, for which the caller guarantees validity. `to`
    // plus `head` is a multiple of a line, so every store in the loop is aligned. Loads need not
    // be. SSE2 is part of the architecture. The fence orders these stores before later ones.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let mut at = head;
        while at < head + lines {
            let source = from.add(at).cast::<__m128i>();
            let sink = to.add(at).cast::<__m128i>();
            let line = [
                _mm_loadu_si128(source),
                _mm_loadu_si128(source.add(1)),
                _mm_loadu_si128(source.add(2)),
                _mm_loadu_si128(source.add(3)),
            ];
            for (n, part) in line.into_iter().enumerate() {
                _mm_stream_si128(sink.add(n), part);
            }
            at += LINE;
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(from.add(at), to.add(at), len - at);
    }
}

/// Copies `len` bytes through the caches, on other architectures.
///
/// # Safety
/// `from` must be valid for reading and `to` for writing `len` bytes, in shared memory to which no
/// part of this process holds a reference, and the two ranges must not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees the same.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Size of a cache line in bytes.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[cfg(test)]
mod tests {
    use crate::shm::Mapping;

    #[test]
    fn every_length_and_alignment_is_copied() {
        const LEN: usize = 1 << 14;
        let (source, _fd) = Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
        let bytes: Vec<u8> = (0..LEN).map(|n| (n % 251) as u8).collect();
        source.write(0, &bytes).expect("in range");
        for (from, to) in [(0, 0), (1, 0), (0, 1), (63, 65), (17, 48), (100, 163)] {
            for len in (0..200).chain([4095, 4096, 5000]) {
                for tail_last in [false, true] {
                    let (sink, _fd) =
                        Mapping::create_shared_buffer(LEN).expect("memory for the buffer");
                    sink.fill(0, LEN, 0xEE).expect("in range");
                    source.copy_past_caches_to(from, &sink, to, len, tail_last).expect("in range");
                    let mut expected = vec![0xEE; LEN];
                    expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
                    let mut found = vec![0; LEN];
                    sink.read(0, &mut found).expect("in range");
                    assert!(found == expected, "{len} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn ranges_are_checked_and_may_overlap() {
        let (m, _fd) = Mapping::create_shared_buffer(8192).expect("memory for the buffer");
        assert!(m.copy_past_caches_to(0, &m, 4096, 4097, false).is_err());
        assert!(m.copy_past_caches_to(4096, &m, 0, 4097, true).is_err());
        let bytes: Vec<u8> = (0..8192).map(|n| (n % 251) as u8).collect();
        for (from, to) in [(100, 164), (164, 100), (100, 100)] {
            m.write(0, &bytes).expect("in range");
            m.copy_past_caches_to(from, &m, to, 1000, true).expect("in range");
            let mut expected = bytes.clone();
            expected.copy_within(from..from + 1000, to);
            let mut found = vec![0; 8192];
            m.read(0, &mut found).expect("in range");
            assert!(found == expected, "{from} to {to}");
        }
    }

    #[test]
    fn a_poisoned_mapping_fails_the_copy() {
        let (m, _fd) = Mapping::create_shared_buffer(4096).expect("memory for the buffer");
        let (other, _fd) = Mapping::create_shared_buffer(4096).expect("memory for the buffer");
        m.poison();
        assert!(m.copy_past_caches_to(0, &other, 0, 4096, true).is_err());
        assert!(other.copy_past_caches_to(0, &m, 0, 4096, true).is_err());
    }
}
