//! Semantics of atomic operations (RFC 7306 section 5.1).

/// Size and alignment of the operand in memory, in bytes.
pub const ATOMIC_LEN: u32 = 8;

/// Atomic operation on 64 bits. Numbers in memory have the byte order of the host that owns it;
/// in messages they are big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Adds to one field or to several.
    FetchAdd {
        /// Addends of all fields.
        add: u64,
        /// Top bit of each field. A carry out of a field is lost. 0 means one 64-bit field.
        boundaries: u64,
    },
    /// Replaces some bits if others have an expected value.
    CompareSwap {
        /// New value of the bits.
        swap: u64,
        /// Bits to swap.
        swap_mask: u64,
        /// Expected value of the bits.
        compare: u64,
        /// Bits to compare.
        compare_mask: u64,
    },
}

impl AtomicOperation {
    /// Returns the new value for the original value `old`.
    #[must_use]
    pub fn applied_to(self, old: u64) -> u64 {
        match self {
            AtomicOperation::FetchAdd { add, boundaries } => {
                // With the top bits masked, no field carries into the next.
                //= 7306-5.1.1-1, 7306-5.1.1-3
                let below = (old & !boundaries).wrapping_add(add & !boundaries);
                //= 7306-5.1.1-2
                below ^ ((old ^ add) & boundaries)
            }
            AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                //= 7306-5.1.2-1, 7306-5.1.2-5
                match (compare ^ old) & compare_mask {
                    //= 7306-5.1.2-2
                    0 => (old & !swap_mask) | (swap & swap_mask),
                    //= 7306-5.1.2-3
                    _ => old,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Adds field by field, as RFC 7306 section 5.2.1 describes.
    fn added(old: u64, add: u64, boundaries: u64) -> u64 {
        let mut sum = 0;
        let mut carry = 0;
        for bit in 0..64 {
            let total = (old >> bit & 1) + (add >> bit & 1) + carry;
            sum |= (total & 1) << bit;
            carry = if boundaries >> bit & 1 == 1 { 0 } else { total >> 1 };
        }
        sum
    }

    proptest! {
        //= 7306-5.1.1-1
        //= 7306-5.1.1-2
        //= 7306-5.1.1-3
        #[test]
        fn fetch_add_fields_are_independent(old: u64, add: u64, boundaries: u64) {
            for boundaries in [boundaries, 0, u64::MAX, 1 << 63, 0x8000_8000_8000_8000] {
                let operation = AtomicOperation::FetchAdd { add, boundaries };
                prop_assert_eq!(operation.applied_to(old), added(old, add, boundaries));
            }
            let plain = AtomicOperation::FetchAdd { add, boundaries: 0 };
            prop_assert_eq!(plain.applied_to(old), old.wrapping_add(add));
        }

        //= 7306-5.1.2-1
        //= 7306-5.1.2-2
        //= 7306-5.1.2-3
        //= 7306-5.1.2-5
        #[test]
        fn compare_swap_masks(
            old: u64, swap: u64, swap_mask: u64, compare: u64, compare_mask: u64,
        ) {
            for compare in [compare, old, old ^ !compare_mask, old ^ compare_mask] {
                let operation =
                    AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask };
                let new = operation.applied_to(old);
                let equal = compare & compare_mask == old & compare_mask;
                let mixed = (0..64).fold(0, |new, bit| {
                    let from = if swap_mask >> bit & 1 == 1 { swap } else { old };
                    new | (from & 1 << bit)
                });
                prop_assert_eq!(new, if equal { mixed } else { old });
            }
        }
    }
}
