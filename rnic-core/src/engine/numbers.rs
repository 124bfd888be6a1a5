//! Conversions of lengths to the integer types of queues, headers and costs, each with the reason
//! why the cast is valid.

/// Converts the length of a queue, message or table, all of which are below 2^32.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32, see above")]
pub(super) const fn count(len: usize) -> u32 {
    debug_assert!(len <= u32::MAX as usize);
    len as u32
}

/// Returns the low 32 bits of a number, for an identifier that need not be unique.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the high half is not needed")]
pub(super) const fn low_half(number: u64) -> u32 {
    number as u32
}

/// Returns the high 32 bits of a number.
#[inline]
pub(super) const fn high_half(number: u64) -> u32 {
    (number >> 32) as u32
}

/// Converts the length of a ULPDU or of a part of one, which MPA carries in 16 bits.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a ULPDU is shorter than 64 KiB")]
pub(super) const fn ulpdu_len(len: usize) -> u16 {
    debug_assert!(len <= u16::MAX as usize);
    len as u16
}

/// Returns the cost of `amount` bytes or steps in a turn.
#[inline]
#[expect(clippy::cast_possible_wrap, reason = "no allocation has 2^63 bytes")]
pub(super) const fn cost(amount: usize) -> i64 {
    amount as i64
}
