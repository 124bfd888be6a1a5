//! What atomic operations do (RFC 7306 section 5.1).

/// Bytes that an operation reads and writes, at a multiple of as many.
pub const ATOMIC_LEN: u32 = 8;

/// What an atomic operation does to 64 bits. Numbers are in the order of the host that has the
/// memory; on the wire they are big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Adds.
    FetchAdd {
        /// What is added, in each field.
        add: u64,
        /// The top bit of each field that is added to by itself; its carry is lost. 0 for one field
        /// of 64 bits.
        boundaries: u64,
    },
    /// Swaps bits if others are as expected.
    CompareSwap {
        /// The bits to be there afterwards.
        swap: u64,
        /// Which bits are swapped.
        swap_mask: u64,
        /// The bits that are expected.
        compare: u64,
        /// Which bits are compared.
        compare_mask: u64,
    },
}

impl AtomicOperation {
    /// What is there afterwards, of what was there before.
    #[must_use]
    pub fn applied_to(self, old: u64) -> u64 {
        match self {
            AtomicOperation::FetchAdd { add, boundaries } => {
                // Without their top bits no field carries into the next one.
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

    /// Field by field, as section 5.2.1 describes it.
    fn added(old: u64, add: u64, boundaries: u64) -> u64 {
        let (mut sum, mut carry) = (0, 0);
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
        fn fields_are_added_to_by_themselves(old: u64, add: u64, boundaries: u64) {
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
        fn only_bits_of_the_mask_are_swapped_and_only_if_those_compared_are_equal(
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
