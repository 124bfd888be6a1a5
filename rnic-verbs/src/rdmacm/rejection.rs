//! Reasons for which a connection manager rejects the connection of an RC or UC QP.

/// Reason: the service ID is invalid.
pub(super) const NO_LISTENER: u16 = 8;

/// Returns the words for a reason (IBTA specification, volume 1, section 12.6.7.2).
pub(super) fn text(reason: u16) -> &'static str {
    const WORDS: [&str; 33] = [
        "no QP available",
        "no EEC available",
        "no resources available",
        "timeout",
        "unsupported request",
        "invalid communication ID",
        "invalid communication instance",
        "invalid service ID: no program listens at this port",
        "invalid transport service type",
        "stale connection",
        "RDC does not exist",
        "the primary remote port GID is rejected",
        "the primary remote port LID is rejected",
        "invalid primary SL",
        "invalid primary traffic class",
        "invalid primary hop limit",
        "invalid primary packet rate",
        "the alternate remote port GID is rejected",
        "the alternate remote port LID is rejected",
        "invalid alternate SL",
        "invalid alternate traffic class",
        "invalid alternate hop limit",
        "invalid alternate packet rate",
        "port and CM redirection",
        "port redirection",
        "invalid path MTU",
        "insufficient responder resources",
        "the peer's program rejects the connection",
        "the RNR retry count is rejected",
        "duplicate local communication ID",
        "unsupported class version",
        "invalid primary flow label",
        "invalid alternate flow label",
    ];
    let index = usize::from(reason).checked_sub(1);
    index.and_then(|index| WORDS.get(index)).copied().unwrap_or("unknown reason")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_their_number() {
        assert!(text(NO_LISTENER).contains("service ID"));
        for (reason, words) in [(1, "QP"), (3, "resources"), (10, "stale"), (12, "GID")] {
            assert!(text(reason).contains(words), "{reason}");
        }
        for (reason, words) in [(26, "MTU"), (28, "program"), (33, "flow label")] {
            assert!(text(reason).contains(words), "{reason}");
        }
        assert_eq!([0, 34, u16::MAX].map(text), ["unknown reason"; 3]);
    }
}
