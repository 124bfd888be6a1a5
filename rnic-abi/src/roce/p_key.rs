//! P_Keys, which identify the partition of a QP (IBTA specification, volume 1, section 10.9).

/// The default P_Key, of a full member.
pub const DEFAULT_P_KEY: u16 = 0xFFFF;
/// Bits of a P_Key that identify the partition. No partition has the number 0.
pub const PARTITION: u16 = 0x7FFF;
/// Bit that is set in the P_Key of a full member.
const FULL_MEMBER: u16 = 0x8000;

/// Returns true if a QP with the P_Key `own` accepts packets with the P_Key `sender`: the partition
/// is the same, and at least one of the two is a full member (IBTA specification, volume 1, section
/// 10.9.3).
pub fn p_keys_match(own: u16, sender: u16) -> bool {
    (own ^ sender) & PARTITION == 0 && (own | sender) & FULL_MEMBER != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching_p_keys_need_a_full_member() {
        for (own, sender, matches) in [
            (0xFFFF, 0xFFFF, true),
            (0xFFFF, 0x7FFF, true),
            (0x7FFF, 0xFFFF, true),
            (0x7FFF, 0x7FFF, false),
            (0x8001, 0xFFFF, false),
            (0x8001, 0x0001, true),
        ] {
            assert_eq!(p_keys_match(own, sender), matches, "{own:#x} {sender:#x}");
        }
    }
}
